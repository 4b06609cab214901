"""One all-gather of K numbers a row forward, none for one rank, none backward: counted by the profiler, which sees
inside the operator. (The graphs that Inductor receives are counted in `tests/compiler`.)"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch.distributed import ProcessGroup
from torch.profiler import ProfilerActivity, profile

import ppo_ops
from tests.distributed.harness import Pool

ROWS = 5


class Count(NamedTuple):
    forward: list[str]
    backward: list[str]
    elements: int


def _collectives(events: profile) -> list[str]:
    """What the backend sent, in order."""
    return [event.name for event in events.events() or [] if event.name.startswith("gloo:")]


def _count(group: ProcessGroup, with_entropy: bool, with_mask: bool) -> Count:
    torch.manual_seed(0)
    logits = torch.randn(ROWS, 4, requires_grad=True)
    target = torch.zeros(ROWS, dtype=torch.int64)
    mask = torch.rand(ROWS, 4) < 0.5 if with_mask else None
    function = ppo_ops.logprob_entropy if with_entropy else ppo_ops.logprob
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as forward:
        outputs = function(logits, target, mask, group=group)
    outputs = outputs if with_entropy else (outputs,)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as backward:
        torch.autograd.grad(outputs, logits, [torch.ones(ROWS)] * len(outputs))
    shapes = [event.input_shapes for event in forward.events() or [] if event.name.startswith("gloo:")]
    elements = sum(torch.Size(shape).numel() for inputs in shapes for shape in inputs)
    return Count(_collectives(forward), _collectives(backward), elements)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("with_entropy", "with_mask", "numbers_a_row"),
    [(False, False, 3), (False, True, 3), (True, False, 4), (True, True, 6)],
    ids=["logprob", "logprob_kept_set", "entropy", "entropy_kept_set"],
)
def test_one_all_gather_forward_none_backward(
    ranks: Pool, size: int, with_entropy: bool, with_mask: bool, numbers_a_row: int
) -> None:
    for count in ranks.run(_count, with_entropy, with_mask, size=size):
        if size == 1:
            assert count == Count([], [], 0)
        else:
            assert count == Count(["gloo:all_gather"], [], numbers_a_row * ROWS)


def _count_without_rows(group: ProcessGroup) -> list[str]:
    logits = torch.empty(0, 4, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as events:
        log_prob, entropy = ppo_ops.logprob_entropy(logits, torch.empty(0, dtype=torch.int64), group=group)
        (log_prob.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    assert logits.grad.shape == (0, 4)
    return _collectives(events)


def test_no_rows_still_join_the_all_gather(ranks: Pool) -> None:
    assert ranks.run(_count_without_rows, size=2) == [["gloo:all_gather"]] * 2


def _count_others(group: ProcessGroup) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as events:
        torch.distributed.all_reduce(torch.ones(1), group=group)
        torch.distributed.broadcast(torch.ones(1), 0, group=group)
    return _collectives(events)


def test_the_count_sees_other_collectives(ranks: Pool) -> None:
    """Negative control: a collective of another kind would be counted."""
    assert ranks.run(_count_others, size=2) == [["gloo:all_reduce", "gloo:broadcast"]] * 2
