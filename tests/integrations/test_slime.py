"""slime's function of rows: its return shapes, its semantics, and no trace of `chunk_size` in any bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import ProfilerActivity, profile

from ppo_ops.integrations.slime import calculate_log_probs_and_entropy
from tests import oracle
from tests.cases import by_name
from tests.distributed.harness import Pool
from tests.distributed.shards import assemble, shard
from tests.oracle import Results
from tests.tolerances import assert_budget, assert_same_bits

PLAIN, MASKED = "257x129", "mask_of_257_rows"


def _as_op(group: Any, **more: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """slime's function with the arguments and the shapes of `ppo_ops.logprob_entropy`, where it has them."""

    def function(
        logits: Tensor,
        target: Tensor,
        keep_mask: Tensor | None,
        temperature: float,
        ignore_index: int,
        vocab_size: None,
    ) -> tuple[Tensor, Tensor]:
        assert (temperature, ignore_index, vocab_size) == (1.0, -100, None)
        log_prob, entropy = calculate_log_probs_and_entropy(
            logits, target, group, with_entropy=True, log_prob_keep_mask=keep_mask, **more
        )
        assert entropy is not None
        assert log_prob.shape == (len(target), 1)
        assert entropy.shape == (len(target),)
        return log_prob.squeeze(1), entropy

    return function


@pytest.mark.parametrize("name", [PLAIN, MASKED, "mask_drops_target", "bfloat16_3x1025"])
def test_values_and_gradients(name: str) -> None:
    oracle.check(by_name(name), _as_op(None))


def _on_rank(group: ProcessGroup, name: str, **more: Any) -> Results:
    case, _ = shard(by_name(name), "even", group.rank(), group.size())
    return oracle.run(_as_op(group, **more), case)


@pytest.mark.parametrize("name", ["3x1000", "mask_drops_the_largest"])
def test_values_and_gradients_on_two_ranks(ranks: Pool, name: str) -> None:
    case, replies = by_name(name), ranks.run(_on_rank, name, size=2)
    assert_same_bits(replies[1].log_prob, replies[0].log_prob)
    assert_same_bits(replies[1].entropy, replies[0].entropy)
    grad_logits = assemble(case, "even", [reply.grad_logits for reply in replies])
    ours = (replies[0].log_prob, replies[0].entropy, grad_logits)
    for arguments in zip(ours, oracle.plain(case), oracle.truth(case), oracle.scales(case), strict=True):
        assert_budget(*arguments)


@pytest.mark.parametrize("chunk_size", [0, 1, 7, 256, 257, 1000])
@pytest.mark.parametrize("name", [PLAIN, MASKED])
def test_chunks_change_no_bit(name: str, chunk_size: int) -> None:
    whole, chunked = (oracle.run(_as_op(None, chunk_size=size), by_name(name)) for size in (-1, chunk_size))
    for actual, expected in zip(chunked, whole, strict=True):
        assert_same_bits(actual, expected)


def _collectives(group: ProcessGroup, with_entropy: bool) -> list[str]:
    logits = torch.zeros(5, 4, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as events:
        log_prob, _ = calculate_log_probs_and_entropy(logits, torch.zeros(5, dtype=torch.int64), group, with_entropy, 1)
        log_prob.sum().backward()
    return [event.name for event in events.events() or [] if event.name.startswith("gloo:")]


@pytest.mark.parametrize("with_entropy", [False, True])
def test_chunks_cost_no_collective(ranks: Pool, with_entropy: bool) -> None:
    assert ranks.run(_collectives, with_entropy, size=2) == [["gloo:all_gather"]] * 2


def test_without_entropy() -> None:
    case = by_name(MASKED)
    with_entropy, _ = calculate_log_probs_and_entropy(case.logits, case.target, None, True, -1, case.keep_mask)
    log_prob, entropy = calculate_log_probs_and_entropy(
        case.logits, case.target, None, log_prob_keep_mask=case.keep_mask
    )
    assert entropy is None
    assert log_prob.shape == (257, 1)
    torch.testing.assert_close(log_prob, with_entropy)


def test_entropy_without_gradient() -> None:
    """The entropy then is a number to report: it needs no gradient and adds none."""
    case = by_name(PLAIN)
    logits = case.logits.clone().requires_grad_()
    function = functools.partial(calculate_log_probs_and_entropy, logits, case.target, None)
    log_prob, entropy = function(with_entropy=True, with_entropy_grad=False)
    reference, with_gradient = function(with_entropy=True)
    assert entropy is not None
    assert with_gradient is not None
    assert not entropy.requires_grad
    assert with_gradient.requires_grad
    assert_same_bits(entropy, with_gradient.detach())
    (grad,) = torch.autograd.grad(log_prob.sum() + entropy.sum(), logits)
    (expected,) = torch.autograd.grad(reference.sum(), logits)
    assert_same_bits(grad, expected)


def _no_rows(group: Any) -> Tensor:
    logits = torch.empty(0, 4, requires_grad=True)
    tokens = torch.empty(0, dtype=torch.int64)
    log_prob, entropy = calculate_log_probs_and_entropy(logits, tokens, group, with_entropy=True)
    assert entropy is not None
    assert log_prob.shape == entropy.shape == (0,)
    assert log_prob.grad_fn is not None
    assert entropy.grad_fn is not None
    _, detached = calculate_log_probs_and_entropy(logits, tokens, group, with_entropy=True, with_entropy_grad=False)
    assert detached is not None
    assert not detached.requires_grad
    log_prob, entropy = calculate_log_probs_and_entropy(logits, tokens, group)
    assert entropy is None
    assert log_prob.shape == (0,)
    (log_prob.sum() * 2).backward()
    assert logits.grad is not None
    return logits.grad


def test_no_rows() -> None:
    assert _no_rows(None).shape == (0, 4)


def test_no_rows_on_two_ranks(ranks: Pool) -> None:
    assert [grad.shape for grad in ranks.run(_no_rows, size=2)] == [(0, 4)] * 2


def test_logits_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"logits must have the shape \[N, V_local\], got \(1, 3, 4\)"):
        calculate_log_probs_and_entropy(torch.zeros(1, 3, 4), torch.zeros(1, 3, dtype=torch.int64), None)
