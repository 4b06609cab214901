"""AReaL's functions: the adapters against values everywhere, and against AReaL itself where it is installed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup

from ppo_ops.integrations import patch
from ppo_ops.integrations.areal import gather_logprobs, gather_logprobs_entropy
from tests.distributed.harness import Pool
from tests.integrations import hosts
from tests.integrations.hosts import Evaluated, case_of
from tests.tolerances import assert_exact, assert_same_bits

WHICH = ("log_prob", "entropy")
INSTALLED = importlib.util.find_spec("areal") is not None
needs_areal = pytest.mark.skipif(not INSTALLED, reason="areal is not installed: docs/areal.md says how to run this")


def _log_prob(group: Any) -> hosts.Function:
    return lambda logits, labels: (gather_logprobs(logits, labels, tp_group=group),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values(dtype: torch.dtype) -> None:
    """float32 for bfloat16 logits, as AReaL."""
    case = case_of("areal", dtype)
    for function, which in ((_log_prob(None), WHICH[:1]), (gather_logprobs_entropy, WHICH)):
        near = hosts.plainly(case, which, torch.float32)
        hosts.judge(hosts.evaluate(function, case, which), near, case, which)


def _on_rank(group: ProcessGroup, both: bool) -> Evaluated:
    case = case_of("areal")
    function = functools.partial(gather_logprobs_entropy, tp_group=group) if both else _log_prob(group)
    return hosts.evaluate(function, case, WHICH if both else WHICH[:1], hosts.columns(case, group))


@pytest.mark.parametrize("both", [False, True])
def test_values_on_two_ranks(ranks: Pool, both: bool) -> None:
    case, which = case_of("areal"), WHICH if both else WHICH[:1]
    found = hosts.join(ranks.run(_on_rank, both, size=2))
    hosts.judge(found, hosts.plainly(case, which, torch.float32), case, which)


def _theirs(group: Any, both: bool) -> hosts.Function:
    home = importlib.import_module("areal.utils.functional.vocab_parallel")
    if both:
        return functools.partial(home.gather_logprobs_entropy, tp_group=group)
    return lambda logits, labels: (home.gather_logprobs(logits, labels, tp_group=group),)


@needs_areal
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("both", [False, True])
def test_against_areal(both: bool, dtype: torch.dtype) -> None:
    ours = gather_logprobs_entropy if both else _log_prob(None)
    hosts.check(ours, _theirs(None, both), case_of("areal", dtype), *(WHICH if both else WHICH[:1]))


def _theirs_on_rank(group: ProcessGroup, both: bool) -> Evaluated:
    case = case_of("areal")
    return hosts.evaluate(_theirs(group, both), case, WHICH if both else WHICH[:1], hosts.columns(case, group))


@needs_areal
@pytest.mark.parametrize("both", [False, True])
def test_against_areal_on_two_ranks(ranks: Pool, both: bool) -> None:
    case, which = case_of("areal"), WHICH if both else WHICH[:1]
    ours, theirs = (hosts.join(ranks.run(function, both, size=2)) for function in (_on_rank, _theirs_on_rank))
    hosts.judge(ours, theirs, case, which)


@needs_areal
def test_banned_tokens_have_an_entropy() -> None:
    """AReaL's is NaN: 0 * -inf."""
    logits, labels = torch.tensor([[0.0, 0.0, -torch.inf]]), torch.tensor([0])
    assert _theirs(None, True)(logits, labels)[1].isnan().all()
    torch.testing.assert_close(gather_logprobs_entropy(logits, labels)[1], torch.tensor([2.0]).log())


@needs_areal
def test_the_fsdp_engine_runs_patched() -> None:
    """From logits to the loss, by AReaL's own methods: the same loss and gradient within float32 roundings."""
    module = importlib.import_module("areal.engine.fsdp_engine")
    engine = object.__new__(module.FSDPEngine)
    engine.config = SimpleNamespace(is_critic=False, temperature=0.7)
    engine.enable_tree_training = False
    engine.parallel_helper = SimpleNamespace(tp_size=1, sp_size=1)
    case = case_of("areal engine")
    context = module.FSDPTrainContext(
        model_inputs={"input_ids": case.target.reshape(1, -1)},
        mb_input={"advantages": torch.linspace(-1, 1, case.target.numel())},
        pad_length=0,
        ulysses_pad_size=0,
        trie_node=None,
    )

    def loss_of(log_prob: torch.Tensor, entropy: torch.Tensor, batch: dict[str, Any], **_: Any) -> torch.Tensor:
        return -(batch["advantages"] * log_prob).mean() - 0.01 * entropy.mean()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        logits = case.logits.flatten(0, 1).clone().requires_grad_()
        one = torch.ones(())
        loss = engine._compute_logprobs_and_loss(logits, context, loss_of, lambda _: one, one)
        return loss.detach(), torch.autograd.grad(loss, logits)[0]

    own = step()
    with patch("areal") as done:
        assert "areal.engine.fsdp_engine.gather_logprobs_entropy" in done.patched
        torch.testing.assert_close(step(), own, rtol=1e-5, atol=1e-6)
    for mine, other in zip(step(), own, strict=True):
        assert_same_bits(mine, other)


def test_temperature_divides_the_logits() -> None:
    case = case_of("areal")
    log_prob, entropy = gather_logprobs_entropy(case.logits, case.target, 0.5)
    # Dividing by a power of two is exact.
    for found, expected in zip((log_prob, entropy), gather_logprobs_entropy(case.logits * 2, case.target), strict=True):
        assert_exact(found, expected)
    assert_exact(gather_logprobs(case.logits, case.target, 0.5), log_prob)


@pytest.mark.parametrize("function", [gather_logprobs, gather_logprobs_entropy])
def test_chunks_change_no_bit(function: Any) -> None:
    case = case_of("areal")
    whole = torch.stack(tuple(function(case.logits, case.target)))
    for chunk_size in (1, 5, 10_000):
        assert_same_bits(torch.stack(tuple(function(case.logits, case.target, chunk_size=chunk_size))), whole)
    for bad in (0, -1, 2.0):
        with pytest.raises(ValueError, match="chunk_size must be a positive integer, got"):
            function(case.logits, case.target, chunk_size=bad)


def test_no_rows() -> None:
    log_prob, entropy = gather_logprobs_entropy(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
    assert log_prob.shape == entropy.shape == (0,)


def test_reused_logits_hold_the_gradient() -> None:
    """`reuse_logits`: the same bits, in the logits' own memory; the logits stay what they are until then."""
    case = case_of("areal")
    found, pointers = [], []
    for reuse in (False, True):
        leaf = case.logits.clone().requires_grad_()
        logits = leaf.clone()
        outputs = gather_logprobs_entropy(logits, case.target, 0.5, reuse_logits=reuse)
        assert_same_bits(logits.detach(), case.logits)
        (grad,) = torch.autograd.grad([output.sum() for output in outputs], logits)
        found.append([*(output.detach() for output in outputs), grad])
        pointers.append(grad.data_ptr() == logits.data_ptr())
    assert pointers == [False, True]
    for mine, other in zip(*found, strict=True):
        assert_same_bits(mine, other)
    # A leaf cannot be overwritten, and without a gradient there is nothing to write.
    gather_logprobs_entropy(leaf, case.target, reuse_logits=True)[0].sum().backward()
    gather_logprobs_entropy(case.logits, case.target, reuse_logits=True)
    assert_same_bits(leaf.detach(), case.logits)
