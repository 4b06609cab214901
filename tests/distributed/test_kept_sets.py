"""Kept sets as ragged rows on 1, 2 and 4 real ranks: each rank uses the ids of its own shard."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import ProfilerActivity, profile

import ppo_ops
from tests import oracle
from tests.cases import Case, generator, handed, random_case, random_mask
from tests.distributed.harness import SIZES, Pool
from tests.distributed.shards import assemble, cuts, shard
from tests.tolerances import assert_budget, assert_same_bits


class Kept(NamedTuple):
    """A case with the set as a mask, and the same set as ragged rows."""

    case: Case
    ids: Tensor
    offsets: Tensor


class Found(NamedTuple):
    """Outputs and gradients with entropy, under the upstream gradients of `oracle`, and of `logprob` alone."""

    log_prob: Tensor
    entropy: Tensor
    grad_logits: Tensor
    alone: Tensor
    grad_alone: Tensor


def _of_mask(case: Case) -> Kept:
    """A row that keeps nothing keeps its target, as a mask does; an empty ragged row would be unrestricted."""
    rows = [row.nonzero().squeeze(1) for row in case.keep_mask.reshape(-1, case.keep_mask.shape[-1])]
    if case.vocab_size is not None:
        rows = [row[row < case.vocab_size] for row in rows]
    ids = [row if len(row) else t.reshape(1).clamp(min=0) for row, t in zip(rows, case.target.reshape(-1), strict=True)]
    return Kept(case, torch.cat(ids).int(), torch.tensor([0, *map(len, ids)]).cumsum(0))


def _of_rows(name: str, vocabulary: int, rows: list[list[int]], target: list[int], **more: Any) -> Kept:
    case = random_case(name, len(rows), vocabulary, **more)
    case.target.copy_(torch.tensor(target))
    ids, offsets = torch.tensor([i for row in rows for i in row]), torch.tensor([0, *map(len, rows)]).cumsum(0)
    return Kept(dataclasses.replace(case, keep_mask=ppo_ops.keep_sets_to_mask(ids, offsets, vocabulary)), ids, offsets)


@functools.cache
def _kept() -> dict[str, Kept]:
    many = torch.randperm(32_000, generator=generator("many"))[:10_000].tolist()
    rows = [
        [*range(760, 800), *range(990, 1000)],  # all on the last shard, the target on the first
        [*range(100)],  # all on the first one, with the target
        [],  # unrestricted
        [7, 999, 7, 400, 400, 7, 999],  # said twice
        [3],  # the target alone
        [500],  # one id and another target
        random_mask("ranks", 1, 1000)[0].nonzero().squeeze(1).flip(0).tolist(),
        [1, 2],  # ignored
    ]
    target = [5, 50, 600, 400, 3, 999, 250, -100]
    temperatures = torch.tensor([0.3, 0.7, 1.0, 1.5, 1.0, 2.0, 0.9, 1.0])
    return {
        **{case.name: _of_mask(case) for case in handed() if case.keep_mask is not None},
        "rows": _of_rows("kept_on_ranks", 1000, rows, target, temperature=temperatures),
        "bfloat16_rows": _of_rows("kept_on_ranks_bf16", 1000, rows, target, dtype=torch.bfloat16),
        "ten_thousand_ids": _of_rows("kept_many", 32_000, [many, []], [31_999, 5]),
    }


def _compute(kept: Kept, case: Case, ragged: bool, **options: Any) -> Found:
    sets = {"keep_ids": kept.ids, "keep_offsets": kept.offsets} if ragged else {"keep_mask": case.keep_mask}

    def both(logits: Tensor, target: Tensor, keep_mask: Tensor | None, **more: Any) -> tuple[Tensor, Tensor]:
        return ppo_ops.logprob_entropy(logits * 1, target, **sets, **more)

    results = oracle.run(both, case, **options)
    logits = case.logits.detach().requires_grad_()
    alone = ppo_ops.logprob(logits * 1, case.target, **sets, **case.options(), **options)
    upstream = oracle.upstream(kept.case)[0].to(alone.dtype)
    return Found(*results, alone.detach(), torch.autograd.grad(alone, logits, upstream)[0])


def _on_rank(group: ProcessGroup, cut: str, ragged: bool, **more: Any) -> dict[str, Found]:
    found = {}
    for name, kept in _kept().items():
        case, options = shard(kept.case, cut, group.rank(), group.size())
        found[name] = _compute(kept, case, ragged, group=group, **options, **more)
    return found


def _check(kept: Kept, cut: str, replies: list[Found]) -> Found:
    """The same bits on every rank, and within the budget of the truth. Returns the whole results."""
    for reply in replies[1:]:
        for field in ("log_prob", "entropy", "alone"):
            assert_same_bits(getattr(reply, field), getattr(replies[0], field))
    whole = replies[0]._replace(
        grad_logits=assemble(kept.case, cut, [reply.grad_logits for reply in replies]),
        grad_alone=assemble(kept.case, cut, [reply.grad_alone for reply in replies]),
    )
    results = (oracle.plain(kept.case), oracle.truth(kept.case), oracle.scales(kept.case))
    for actual, near, right, scale in zip(whole[:3], *results, strict=True):
        assert_budget(actual, near, right, scale)
    if kept.case.expected is not None:
        _check_handed(kept.case, whole)
    return whole


def _check_handed(case: Case, whole: Found) -> None:
    """The file's own numbers: the gradient is linear in the upstream gradients."""
    right = case.expected
    of_log_prob, of_entropy = (upstream.unsqueeze(-1) for upstream in oracle.upstream(case))
    grad_alone = of_log_prob * right.grad_log_prob
    grad = grad_alone + of_entropy * right.grad_entropy
    close = functools.partial(torch.testing.assert_close, rtol=right.rtol, atol=right.atol)
    for actual, expected in zip(whole, (right.log_prob, right.entropy, grad, right.log_prob, grad_alone), strict=True):
        close(actual.double(), expected)


@pytest.mark.parametrize(("size", "cut"), [(size, cut) for size in SIZES for cut in cuts(size)])
def test_masks_and_ragged_sets(ranks: Pool, size: int, cut: str) -> None:
    masked, ragged = (ranks.run(_on_rank, cut, ragged, size=size) for ragged in (False, True))
    for name, kept in _kept().items():
        expected, actual = (_check(kept, cut, [reply[name] for reply in replies]) for replies in (masked, ragged))
        # The same sums in another order: some roundings of float32, then one of the gradient's dtype.
        eps = torch.finfo(torch.float32).eps
        for field in Found._fields:
            rtol = max(16 * eps, torch.finfo(kept.case.logits.dtype).eps) if field.startswith("grad") else 16 * eps
            torch.testing.assert_close(
                getattr(actual, field),
                getattr(expected, field),
                rtol=rtol,
                atol=16 * eps,
                msg=lambda text, what=f"{name} {field}": f"{what}: {text}",
            )


def _in_place(group: ProcessGroup, cut: str) -> list[tuple[Tensor, Tensor]]:
    """Gradients of both outputs into new memory and over the logits."""
    pairs = []
    for kept in _kept().values():
        case, options = shard(kept.case, cut, group.rank(), group.size())
        sets = {"keep_ids": kept.ids, "keep_offsets": kept.offsets}
        grads = []
        for inplace in (False, True):
            leaf = case.logits.detach().requires_grad_()
            logits = (leaf * 1).contiguous()
            more = {**case.options(), **options, **sets, "group": group, "inplace_backward": inplace}
            outputs = ppo_ops.logprob_entropy(logits, case.target, **more)
            upstream = [g.to(outputs[0].dtype) for g in oracle.upstream(kept.case)]
            grads.append(torch.autograd.grad(outputs, logits, upstream)[0].clone())
            assert torch.equal(logits.detach(), grads[-1]) or not inplace
        pairs.append((grads[0], grads[1]))
    return pairs


@pytest.mark.parametrize("cut", ["even", "uneven"])
def test_in_place(ranks: Pool, cut: str) -> None:
    for pairs in ranks.run(_in_place, cut, size=2):
        for into_new_memory, over_logits in pairs:
            assert_same_bits(over_logits, into_new_memory)


def _count(group: ProcessGroup, with_entropy: bool) -> tuple[list[str], int, list[str]]:
    kept = _kept()["rows"]
    case, options = shard(kept.case, "uneven", group.rank(), group.size())
    logits = case.logits.detach().requires_grad_()
    function = ppo_ops.logprob_entropy if with_entropy else ppo_ops.logprob
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as forward:
        outputs = function(logits, case.target, keep_ids=kept.ids, keep_offsets=kept.offsets, group=group, **options)
    with profile(activities=[ProfilerActivity.CPU]) as backward:
        sum(output.sum() for output in (outputs if with_entropy else (outputs,))).backward()
    sent = [event for event in forward.events() or [] if event.name.startswith("gloo:")]
    elements = sum(torch.Size(shape).numel() for event in sent for shape in event.input_shapes)
    names = [event.name for event in backward.events() or [] if event.name.startswith("gloo:")]
    return [event.name for event in sent], elements, names


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("with_entropy", "numbers_a_row"), [(False, 3), (True, 6)])
def test_one_all_gather_forward_none_backward(ranks: Pool, size: int, with_entropy: bool, numbers_a_row: int) -> None:
    expected = (["gloo:all_gather"], numbers_a_row * 8, []) if size > 1 else ([], 0, [])
    assert ranks.run(_count, with_entropy, size=size) == [expected] * size
