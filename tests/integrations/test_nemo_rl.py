"""NeMo-RL's functions against values: vocabulary indices, the shift, packing, context parallelism, and the sign of its
entropy. NeMo-RL is in no registry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ppo_ops import reference
from ppo_ops.integrations import nemo_rl as ours
from tests.cases import Case, generator
from tests.distributed.harness import Pool
from tests.integrations import hosts
from tests.integrations.hosts import VOCABULARY, Evaluated, case_of
from tests.tolerances import assert_exact, assert_same_bits

CHUNK, UNEVEN = 2, (100, 28)
DTYPES = [torch.float32, torch.bfloat16]


def _log_prob(start: int, end: int, group: Any) -> dict[str, hosts.Function]:
    where = (start, end)
    return {
        "DistributedLogprob": lambda x, t: (ours.DistributedLogprob.apply(x, t, *where, group),),
        "ChunkedDistributedLogprob": lambda x, t: (ours.ChunkedDistributedLogprob.apply(x, t, *where, CHUNK, group),),
        "ChunkedDistributedGatherLogprob": lambda x, t: (
            ours.ChunkedDistributedGatherLogprob.apply(x, t.unsqueeze(-1), *where, CHUNK, group).squeeze(-1),
        ),
    }


def _entropy(group: Any) -> hosts.Function:
    """NeMo-RL's is sum p log p."""
    return lambda logits, _: (-ours.ChunkedDistributedEntropy.apply(logits, CHUNK, group),)


def _judge(found: Evaluated, dtype: torch.dtype, which: str) -> None:
    """float32 for bfloat16 logits, as NeMo-RL."""
    case = case_of("nemo", dtype)
    hosts.judge(found, hosts.plainly(case, (which,), torch.float32), case, (which,))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", _log_prob(0, 0, None))
def test_log_probs(name: str, dtype: torch.dtype) -> None:
    function = _log_prob(0, VOCABULARY, None)[name]
    _judge(hosts.evaluate(function, case_of("nemo", dtype), ("log_prob",)), dtype, "log_prob")


@pytest.mark.parametrize("dtype", DTYPES)
def test_entropy(dtype: torch.dtype) -> None:
    _judge(hosts.evaluate(_entropy(None), case_of("nemo", dtype), ("entropy",)), dtype, "entropy")


def test_entropy_is_not_positive() -> None:
    """The sign of NeMo-RL: -ln 4 for four equal logits."""
    found = ours.ChunkedDistributedEntropy.apply(torch.zeros(1, 1, 4), CHUNK, None)
    torch.testing.assert_close(found, -torch.full((1, 1), 4.0).log())


def _on_rank(group: ProcessGroup, name: str, sizes: tuple[int, ...]) -> Evaluated:
    case, rank = case_of("nemo"), group.rank()
    start = sum(sizes[:rank])
    logits = case.logits[..., start : start + sizes[rank]]
    if name == "entropy":
        return hosts.evaluate(_entropy(group), case, ("entropy",), logits)
    return hosts.evaluate(_log_prob(start, start + sizes[rank], group)[name], case, ("log_prob",), logits)


@pytest.mark.parametrize("sizes", [(64, 64), UNEVEN])
@pytest.mark.parametrize("name", [*_log_prob(0, 0, None), "entropy"])
def test_on_two_ranks(ranks: Pool, name: str, sizes: tuple[int, ...]) -> None:
    found = hosts.join(ranks.run(_on_rank, name, sizes, size=2))
    _judge(found, torch.float32, "entropy" if name == "entropy" else "log_prob")


def _next_tokens(logits: Tensor, target: Tensor) -> Tensor:
    """In float64, the definition: position t against token t + 1."""
    return reference.logprob_entropy(logits.double()[:, : target.shape[1] - 1], target[:, 1:])[0]


def _close(found: Tensor, expected: Tensor) -> None:
    # float32 roundings of numbers up to 40.
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_size", [None, CHUNK])
def test_next_token(chunk_size: int | None) -> None:
    """Also where the logits are longer than the tokens, by padding."""
    case = case_of("nemo")
    for length in (hosts.LENGTH, hosts.LENGTH - 2):
        target = case.target[:, :length]
        leaf = case.logits.clone().requires_grad_()
        found = ours.from_parallel_logits_to_logprobs(leaf, target, 0, VOCABULARY, None, chunk_size=chunk_size)
        assert found.shape == (hosts.BATCH, length - 1)
        _close(found, _next_tokens(case.logits, target))
        found.sum().backward()
        assert leaf.grad is not None
        # The last token has no successor, and what comes behind it is padding.
        assert_exact(leaf.grad[:, length - 1 :], torch.zeros_like(leaf.grad[:, length - 1 :]))
        double = case.logits.double().requires_grad_()
        _next_tokens(double, target).sum().backward()
        assert double.grad is not None
        _close(leaf.grad, double.grad)


@pytest.mark.parametrize("length", [hosts.LENGTH, hosts.LENGTH - 2])
def test_without_the_shift(length: int) -> None:
    """As NeMo-RL's diffusion models: position t against token t, none dropped."""
    case = case_of("nemo")
    target = case.target[:, :length]
    found = ours.from_parallel_logits_to_logprobs(case.logits, target, 0, VOCABULARY, None, shift_targets=False)
    _close(found, reference.logprob_entropy(case.logits.double()[:, :length], target)[0])


def test_sampling_parameters() -> None:
    """Those that filter nothing change no bit (the temperature has been applied before); others are refused."""
    case = case_of("nemo")
    arguments = case.logits, case.target, 0, VOCABULARY, None
    whole = ours.from_parallel_logits_to_logprobs(*arguments)
    for top_k, top_p in ((None, 1.0), (-1, 1.0), (0, None)):
        params = SimpleNamespace(top_k=top_k, top_p=top_p, temperature=0.7)
        assert_same_bits(ours.from_parallel_logits_to_logprobs(*arguments, sampling_params=params), whole)
    packed = case.logits[:1], case.target[:1], torch.tensor([0, hosts.LENGTH]), hosts.LENGTH, 0, VOCABULARY, None
    for top_k, top_p in ((5, 1.0), (None, 0.9)):
        params = SimpleNamespace(top_k=top_k, top_p=top_p, temperature=1.0)
        with pytest.raises(ValueError, match=f"sampling_params must not filter, got top_k={top_k}, top_p={top_p}"):
            ours.from_parallel_logits_to_logprobs(*arguments, sampling_params=params)
        with pytest.raises(ValueError, match="sampling_params must not filter"):
            ours.from_parallel_logits_to_logprobs_packed_sequences(*packed, sampling_params=params)


def test_inference_only_needs_no_gradient() -> None:
    case = case_of("nemo")
    leaf = case.logits.clone().requires_grad_()
    for inference_only in (False, True):
        found = ours.from_parallel_logits_to_logprobs(leaf, case.target, 0, VOCABULARY, None, inference_only)
        entropy = ours.ChunkedDistributedEntropy.apply(leaf, CHUNK, None, inference_only)
        assert found.requires_grad is entropy.requires_grad is not inference_only


def test_packed_sequences() -> None:
    lengths, width = (3, 5, 1, 4), 5
    source = generator("nemo packed")
    logits = torch.randn(1, sum(lengths), VOCABULARY, generator=source)
    target = torch.randint(VOCABULARY, (1, sum(lengths)), generator=source)
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    found = ours.from_parallel_logits_to_logprobs_packed_sequences(logits, target, ends, width, 0, VOCABULARY, None)
    assert found.shape == (len(lengths), width - 1)
    for row, (begin, end) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
        expected = torch.zeros(width - 1, dtype=torch.float64)
        own = _next_tokens(logits[:, begin:end], target[:, begin:end])[0] if end - begin > 1 else expected[:0]
        expected[: len(own)] = own[: width - 1]
        _close(found[row], expected)


def test_packed_targets_that_were_rolled() -> None:
    """`target_is_pre_rolled`: each sequence shifted by its caller, what was its first token now at its end."""
    logits = torch.randn(1, 8, VOCABULARY, generator=generator("nemo rolled"))
    target, ends = torch.arange(8).unsqueeze(0), torch.tensor([0, 3, 8])
    rolled = torch.cat([part.roll(-1) for part in target[0].split([3, 5])]).unsqueeze(0)
    function, rest = ours.from_parallel_logits_to_logprobs_packed_sequences, (ends, 5, 0, VOCABULARY, None)
    found = function(logits, rolled, *rest, target_is_pre_rolled=True)
    assert_same_bits(found, function(logits, target, *rest))


def _context_parallel(group: ProcessGroup, length: int, padded: int) -> tuple[Tensor, Tensor]:
    """A sequence over two ranks, each with the whole vocabulary; the gradient of this rank's logits."""
    logits = torch.randn(2, padded, VOCABULARY, generator=generator("nemo cp"))
    target = torch.randint(VOCABULARY, (2, length), generator=generator("nemo cp target"))
    chunks = logits.chunk(2 * group.size(), 1)
    own = torch.cat([chunks[group.rank()], chunks[2 * group.size() - 1 - group.rank()]], 1).requires_grad_()
    found = ours.from_parallel_logits_to_logprobs(own, target, 0, VOCABULARY, None, cp_group=group)
    assert found.shape == (2, length - 1)
    _close(found.detach(), _next_tokens(logits, target))
    # As in NeMo-RL, the gradients of all ranks' losses are summed; each takes half of the same loss here.
    (found.sum() / group.size()).backward()
    double = logits.double().requires_grad_()
    _next_tokens(double, target).sum().backward()
    assert own.grad is not None
    assert double.grad is not None
    right = double.grad.chunk(2 * group.size(), 1)
    _close(own.grad, torch.cat([right[group.rank()], right[2 * group.size() - 1 - group.rank()]], 1))
    return found.detach(), own.grad


@pytest.mark.parametrize(("length", "padded"), [(8, 8), (6, 8)])
def test_context_parallelism(ranks: Pool, length: int, padded: int) -> None:
    replies = ranks.run(_context_parallel, length, padded, size=2)
    assert_same_bits(replies[0][0], replies[1][0])


def _packed_over_ranks(group: ProcessGroup) -> None:
    arguments = torch.zeros(1, 4, 2), torch.zeros(1, 4, dtype=torch.int64), torch.tensor([0, 4]), 4, 0, 2, None
    with pytest.raises(ValueError, match="cp_group must be None or of one rank, got 2 ranks"):
        ours.from_parallel_logits_to_logprobs_packed_sequences(*arguments, cp_group=group)


def test_packed_sequences_over_ranks_are_refused(ranks: Pool) -> None:
    ranks.run(_packed_over_ranks, size=2)


def test_what_is_refused() -> None:
    case = case_of("nemo")
    arguments = case.logits, case.target, 0, VOCABULARY
    with pytest.raises(ValueError, match="must be the 128 columns of the logits, got 127 - 0"):
        ours.DistributedLogprob.apply(*arguments[:3], VOCABULARY - 1, None)
    with pytest.raises(ValueError, match="target must be no longer than the 6 positions of the logits, got 7"):
        ours.from_parallel_logits_to_logprobs(case.logits[:, :-1], *arguments[1:], None)
    for bad in (0, -1):
        with pytest.raises(ValueError, match="chunk_size must be a positive integer, got"):
            ours.from_parallel_logits_to_logprobs(*arguments, None, chunk_size=bad)
        with pytest.raises(ValueError, match="chunk_size must be a positive integer, got"):
            ours.ChunkedDistributedEntropy.apply(case.logits, bad, None)


def test_banned_tokens_have_an_entropy() -> None:
    """In NeMo-RL's formula, p log p of a -inf logit is 0 * -inf: NaN."""
    case = case_of("nemo banned")
    logits = case.logits.index_fill(-1, torch.tensor([5]), -torch.inf)
    case = Case(case.name, logits, case.target)
    assert (logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).isnan().all()
    found, near = hosts.evaluate(_entropy(None), case, ("entropy",)), hosts.plainly(case, ("entropy",), torch.float32)
    (right,) = hosts.truth(case, ("entropy",)).outputs
    _close(found.outputs[0], right)
    _close(found.grad_logits, near.grad_logits.double())
