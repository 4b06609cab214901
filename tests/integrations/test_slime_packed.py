"""slime's function of packed responses: the rows it reads, the kept sets of top-p sampling, one collective."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from ppo_ops.integrations.slime import get_log_probs_and_entropy
from tests.cases import generator
from tests.distributed.harness import Pool
from tests.tolerances import assert_same_bits

# Three samples of 5, 3 and 4 tokens with 2, 0 and 3 response tokens, and two rows of padding.
TOTALS, RESPONSES, VOCABULARY, ROWS = [5, 3, 4], [2, 0, 3], 20, 14
# The last sample's third token has no recorded set, its second an empty one; ids said twice; the target left out.
IDS, OFFSETS = [[3, 7, 7, 1, 0], [], [19, 2]], [[0, 3, 5], [0], [0, 2, 2]]


def _micro_batch(requires_grad: bool = True) -> tuple[Tensor, list[Tensor]]:
    source = generator("slime packed")
    logits = 4 * torch.randn(1, ROWS, VOCABULARY, generator=source)
    tokens = [torch.randint(VOCABULARY, (total,), generator=source) for total in TOTALS]
    return logits.requires_grad_(requires_grad), tokens


def _plainly(logits: Tensor, tokens: list[Tensor], temperature: float, kept: bool) -> list[tuple[Tensor, Tensor]]:
    """Log-prob and entropy of each response token, sample by sample, in float64 and with boolean sets."""
    found, end = [], 0
    for sample, (total, response) in enumerate(zip(TOTALS, RESPONSES, strict=True)):
        end += total
        log_probs, entropies = [logits.new_empty(0, dtype=torch.float64)], [logits.new_empty(0, dtype=torch.float64)]
        for r in range(response):
            z = logits[0, end - response + r - 1].double() / temperature
            token = tokens[sample][total - response + r]
            offsets = OFFSETS[sample]
            recorded = kept and r + 1 < len(offsets)
            ids = IDS[sample][offsets[r] : offsets[r + 1]] if recorded else []
            keep = torch.full((VOCABULARY,), not recorded)
            keep[[*ids, int(token)]] = True
            log_probs.append(z.masked_fill(~keep, -torch.inf).log_softmax(-1)[token].unsqueeze(0))
            entropies.append(-(z.softmax(-1) * z.log_softmax(-1)).sum(-1, keepdim=True))
        found.append((torch.cat(log_probs), torch.cat(entropies)))
    return found


def _packed(logits: Tensor, tokens: list[Tensor], group: Any = "", **more: Any) -> dict[str, list[Tensor]]:
    arguments = {"args": SimpleNamespace(rollout_temperature=0.7, entropy_coef=0.1, allgather_cp=False), **more}
    lengths = {"unconcat_tokens": tokens, "total_lengths": TOTALS, "response_lengths": RESPONSES}
    empty, found = get_log_probs_and_entropy(logits, **{**lengths, **arguments}, tp_group=group)
    assert empty.shape == (0,)
    return found


KEPT = {"top_p_token_ids": IDS, "top_p_token_offsets": OFFSETS}
AS_TENSORS = {name: [torch.tensor(x, dtype=torch.int32) for x in value] for name, value in KEPT.items()}


class _Reference:
    """As slime's `TensorRef`: the tensor comes with `load`."""

    def __init__(self, tensor: Tensor) -> None:
        self.load = lambda: tensor


AS_REFERENCES = {name: [_Reference(x) for x in value] for name, value in AS_TENSORS.items()}
FORMS = {"whole": {}, "lists": KEPT, "int32_tensors": AS_TENSORS, "references": AS_REFERENCES}


@pytest.mark.parametrize("kept", FORMS.values(), ids=FORMS)
def test_packed_responses(kept: dict[str, Any]) -> None:
    logits, tokens = _micro_batch()
    found = _packed(logits, tokens, with_entropy=True, **kept)
    alone = _packed(logits, tokens, **kept)
    assert list(alone) == ["log_probs"]
    truth = _plainly(logits, tokens, 0.7, bool(kept))
    # float32 against float64: a few roundings of numbers below 30.
    close = functools.partial(torch.testing.assert_close, rtol=1e-6, atol=1e-5)
    assert [len(x) for x in found["log_probs"]] == [len(x) for x in found["entropy"]] == RESPONSES
    for log_prob, entropy, again, (right, right_entropy) in zip(
        found["log_probs"], found["entropy"], alone["log_probs"], truth, strict=True
    ):
        close(log_prob.double(), right)
        close(entropy.double(), right_entropy)
        close(again.double(), right)
    weighted = torch.cat(found["log_probs"]).sum() - 0.3 * torch.cat(found["entropy"]).sum()
    (grad,) = torch.autograd.grad(weighted, logits)
    right_total = sum(p.sum() - 0.3 * h.sum() for p, h in truth)
    close(grad, torch.autograd.grad(right_total, logits)[0])
    read = grad[0].abs().amax(-1) > 0
    assert read.nonzero().squeeze(1).tolist() == [2, 3, 8, 9, 10]  # the rows before the response tokens, no other


def test_a_token_with_an_empty_set_was_not_sampled() -> None:
    """As in slime, where the target alone is kept then: a log-prob of 0 and no gradient, not that of the whole row."""
    logits, tokens = _micro_batch()
    found = _packed(logits, tokens, **KEPT)["log_probs"][2]
    assert found[1] == 0
    assert found[0] != 0
    assert found[2] != 0  # past the last offset: nothing is recorded, so the row is unrestricted
    (grad,) = torch.autograd.grad(found.sum(), logits)
    assert [bool(row.any()) for row in grad[0, 8:11]] == [True, False, True]


def test_rows_outside_the_responses_are_not_read() -> None:
    logits, tokens = _micro_batch(requires_grad=False)
    spoiled = torch.full_like(logits, torch.nan)
    rows = [2, 3, 8, 9, 10]
    spoiled[:, rows] = logits[:, rows]
    for expected, actual in zip(
        _packed(logits, tokens, with_entropy=True, **KEPT).values(),
        _packed(spoiled[0], tokens, with_entropy=True, **KEPT).values(),
        strict=True,
    ):
        assert_same_bits(torch.cat(actual), torch.cat(expected))


class _Storages(TorchDispatchMode):
    """Memory as large as the logits that operators hand out, each once."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.seen = size, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.nbytes >= self.size:
            self.seen.add(found.untyped_storage().data_ptr())
        return found


@pytest.mark.parametrize("kept", FORMS.values(), ids=FORMS)
def test_one_gradient_and_no_copy(kept: dict[str, Any]) -> None:
    """Of the logits' size there are the logits, by which the count shows that it sees, and one gradient."""
    logits, tokens = _micro_batch()
    with _Storages(logits.nbytes) as storages:
        found = _packed(logits, tokens, with_entropy=True, **kept)
        assert storages.seen <= {logits.untyped_storage().data_ptr()}
        (torch.cat(found["log_probs"]).sum() + torch.cat(found["entropy"]).sum()).backward()
    assert logits.grad is not None
    assert storages.seen == {tensor.untyped_storage().data_ptr() for tensor in (logits, logits.grad)}


def test_entropy_coefficient_zero_gives_an_entropy_without_gradient() -> None:
    logits, tokens = _micro_batch()
    found = _packed(logits, tokens, with_entropy=True, args=SimpleNamespace())
    assert not torch.cat(found["entropy"]).requires_grad
    assert torch.cat(found["log_probs"]).requires_grad


def _packed_on_rank(group: ProcessGroup, with_entropy: bool) -> tuple[list[str], list[Tensor], Tensor]:
    logits, tokens = _micro_batch(requires_grad=False)
    shard = logits.chunk(group.size(), -1)[group.rank()].clone().requires_grad_()
    with profile(activities=[ProfilerActivity.CPU]) as events:
        found = _packed(shard, tokens, group, with_entropy=with_entropy, **KEPT)
        outputs = [torch.cat(value) for value in found.values()]
        (grad,) = torch.autograd.grad(sum(output.sum() for output in outputs), shard)
    names = [event.name for event in events.events() or [] if event.name.startswith("gloo:")]
    return names, [output.detach() for output in outputs], grad


@pytest.mark.parametrize("with_entropy", [False, True])
def test_packed_responses_on_two_ranks(ranks: Pool, with_entropy: bool) -> None:
    """One all-gather for the whole micro-batch, the same bits on both ranks, and what one rank finds."""
    (names, outputs, left), (other_names, others, right) = ranks.run(_packed_on_rank, with_entropy, size=2)
    assert names == other_names == ["gloo:all_gather"]
    logits, tokens = _micro_batch()
    alone = [torch.cat(value) for value in _packed(logits, tokens, with_entropy=with_entropy, **KEPT).values()]
    (grad,) = torch.autograd.grad(sum(output.sum() for output in alone), logits)
    for output, other, expected in zip(outputs, others, alone, strict=True):
        assert_same_bits(output, other)
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-5)  # merged in another order
    torch.testing.assert_close(torch.cat([left, right], -1), grad, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"total_lengths": [5, 3, 7]}, "logits must have a row for each of the 15 tokens in total_lengths, got 14"),
        ({"response_lengths": [2, 0, 4]}, r"response_lengths\[2\] must be in \[0, 4\), below its total, got 4"),
        ({"response_lengths": [2, 0]}, "response_lengths must be 3, as total_lengths, got 2"),
        ({"unconcat_tokens": [torch.zeros(5)]}, "unconcat_tokens must be 3, as total_lengths, got 1"),
        (
            {"unconcat_tokens": [torch.zeros(4).long()] * 3},
            r"unconcat_tokens\[0\] must have the shape \(5,\), got \(4,\)",
        ),
        ({"top_p_token_ids": IDS[:2]}, "top_p_token_ids must be 3, as total_lengths, got 2"),
        ({"top_p_token_ids": None}, "top_p_token_ids and top_p_token_offsets must be given together"),
        (
            {"top_p_token_offsets": [[0, 3, 4], [0], [0, 2]]},
            r"top_p_token_offsets\[0\] must rise from 0 .* 5, got 0 to 4",
        ),
        ({"top_p_token_offsets": [[0, 6, 5], [0], [0, 2]]}, r"top_p_token_offsets\[0\] must rise"),
        ({"top_p_token_offsets": [[0, 3, 5], [0, 0], [0, 2]]}, r"top_p_token_offsets\[1\] must be at most 1, .* got 2"),
        ({"args": SimpleNamespace(allgather_cp=True)}, "args.allgather_cp False, as it cuts samples, got 1 and True"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_packed_errors(changes: dict[str, Any], message: str) -> None:
    logits, tokens = _micro_batch()
    with pytest.raises(ValueError, match=message):
        _packed(logits, tokens, **{**KEPT, **changes})


def test_packed_logits_of_another_shape() -> None:
    with pytest.raises(
        ValueError, match=r"logits must have the shape \[1, T, V_local\] or \[T, V_local\], got \(2, 7, 20\)"
    ):
        _packed(torch.zeros(2, 7, 20), _micro_batch()[1])


def test_context_parallel_samples_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the rows suffice: with padding, a rank's parts of short samples may have as many as the samples."""
    group = SimpleNamespace(size=lambda: 2)
    state = SimpleNamespace(get_context_parallel_group=lambda check_initialized: group)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)  # type: ignore[arg-type]
    logits, tokens = _micro_batch()
    with pytest.raises(ValueError, match=r"context parallelism must be of one rank .* got 2 and False"):
        _packed(logits, tokens)
