"""Values and gradients of every case, cut over 1, 2 and 4 real ranks in several ways."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import ppo_ops
from tests import oracle
from tests.cases import Case, by_name, generated, handed
from tests.distributed.harness import SIZES, Pool
from tests.distributed.shards import assemble, cuts, shard
from tests.oracle import Results
from tests.tolerances import assert_budget, assert_fp64, assert_same_bits


def _names(cases: tuple[Case, ...]) -> list[str]:
    return [case.name for case in cases]


class Separate(NamedTuple):
    """What a handed case prescribes, and the same from `logprob` alone."""

    log_prob: Tensor
    entropy: Tensor
    grad_log_prob: Tensor
    grad_entropy: Tensor
    logprob_alone: Tensor
    grad_logprob_alone: Tensor


def _handed(name: str) -> Case:
    return next(case for case in handed() if case.name == name)


def _separate(group: ProcessGroup, name: str, cut: str) -> Separate:
    case, options = shard(_handed(name), cut, group.rank(), group.size())
    arguments = (case.logits.requires_grad_(), case.target, case.keep_mask)
    options = {**case.options(), **options, "group": group}
    log_prob, entropy = ppo_ops.logprob_entropy(*arguments, **options)
    logprob_alone = ppo_ops.logprob(*arguments, **options)
    grads = [
        torch.autograd.grad(output.sum(), case.logits, retain_graph=True)[0]
        for output in (log_prob, entropy, logprob_alone)
    ]
    return Separate(log_prob.detach(), entropy.detach(), *grads[:2], logprob_alone.detach(), grads[2])


def _compiled(group: ProcessGroup, cut: str) -> list[Separate]:
    """All handed cases in one graph."""
    shards = [shard(case, cut, group.rank(), group.size()) for case in handed()]
    logits = [case.logits.requires_grad_() for case, _ in shards]

    # `aot_eager` takes the operator apart into its stages as Inductor would, and generates no code.
    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(logits: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        return [
            ppo_ops.logprob_entropy(x, case.target, case.keep_mask, **case.options(), **options, group=group)
            for x, (case, options) in zip(logits, shards, strict=True)
        ]

    log_probs, entropies = zip(*function(logits), strict=True)
    grads = [torch.autograd.grad(sum(x.double().sum() for x in log_probs), logits)]
    # Called anew: the compiled backward may free what it read.
    grads += [torch.autograd.grad(sum(h.double().sum() for _, h in function(logits)), logits)]
    outputs = zip(log_probs, entropies, *grads, strict=True)
    return [Separate(x.detach(), h.detach(), *g, x.detach(), g[0]) for x, h, *g in outputs]


def _together(group: ProcessGroup, name: str, cut: str) -> Results:
    case, options = shard(by_name(name), cut, group.rank(), group.size())
    return oracle.run(ppo_ops.logprob_entropy, case, group=group, **options)


def _assert_replicated(replies: list[Any], *fields: str) -> None:
    """The outputs are the same bits on every rank."""
    for reply in replies[1:]:
        for field in fields:
            assert_same_bits(getattr(reply, field), getattr(replies[0], field))


def _check_handed(case: Case, cut: str, replies: list[Separate]) -> None:
    assert case.expected is not None
    _assert_replicated(replies, "log_prob", "entropy", "logprob_alone")
    case.expected.check("log_prob", replies[0].log_prob)
    case.expected.check("entropy", replies[0].entropy)
    case.expected.check("log_prob", replies[0].logprob_alone)
    for field in ("grad_log_prob", "grad_entropy"):
        case.expected.check(field, assemble(case, cut, [getattr(reply, field) for reply in replies]))
    case.expected.check("grad_log_prob", assemble(case, cut, [reply.grad_logprob_alone for reply in replies]))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", _names(handed()))
def test_handed_case(ranks: Pool, name: str, size: int) -> None:
    for cut in cuts(size):
        _check_handed(_handed(name), cut, ranks.run(_separate, name, cut, size=size))


@pytest.mark.parametrize(("size", "cut"), [(2, "uneven"), (4, "even")])
def test_handed_cases_compiled(ranks: Pool, size: int, cut: str) -> None:
    for case, *replies in zip(handed(), *ranks.run(_compiled, cut, size=size), strict=True):
        _check_handed(case, cut, replies)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", _names(generated()))
def test_generated_case(ranks: Pool, name: str, size: int) -> None:
    case = by_name(name)
    plain, truth, scales = oracle.plain(case), oracle.truth(case), oracle.scales(case)
    for cut in cuts(size):
        replies = ranks.run(_together, name, cut, size=size)
        _assert_replicated(replies, "log_prob", "entropy")
        grad_logits = assemble(case, cut, [reply.grad_logits for reply in replies])
        ours = (replies[0].log_prob, replies[0].entropy, grad_logits)
        for actual, near, right, scale in zip(ours, plain, truth, scales, strict=True):
            if case.logits.dtype == torch.float64:
                assert_fp64(actual, right)
            else:
                assert_budget(actual, near, right, scale)


def _in_chunks(group: ProcessGroup, name: str, cut: str) -> list[Results]:
    """Results of all rows at once, a few alone, seven at a time, and in reverse order."""
    case, options = shard(by_name(name), cut, group.rank(), group.size())
    rows = torch.arange(len(case.target))
    grads = torch.stack([g.float() for g in oracle.upstream(case)])

    def evaluate(chunk: Tensor) -> tuple[Tensor, ...]:
        logits = case.logits[chunk].requires_grad_()
        more = {**case.options(), **options, "group": group}
        if isinstance(case.temperature, Tensor) and case.temperature.dim():
            more["temperature"] = case.temperature[chunk]
        mask = None if case.keep_mask is None else case.keep_mask[chunk]
        outputs = ppo_ops.logprob_entropy(logits, case.target[chunk], mask, **more)
        (grad,) = torch.autograd.grad(outputs, logits, list(grads[:, chunk]))
        return (*(output.detach() for output in outputs), grad)

    def cat(chunks: list[Tensor]) -> Results:
        return Results(*map(torch.cat, zip(*map(evaluate, chunks), strict=True)))

    backwards = evaluate(rows.flip(0))
    few = len(rows) - 3
    alone = cat([rows[:few], *rows[few:].split(1)])
    return [cat([rows]), alone, cat(list(rows.split(7))), Results(*(t.flip(0) for t in backwards))]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["mask_of_257_rows", "everything", "inf_shard", "offset_1e8_kept_set"])
def test_neither_chunks_nor_neighbours_change_bits(ranks: Pool, name: str, size: int) -> None:
    for cut in ("even", "uneven"):
        for whole, *others in ranks.run(_in_chunks, name, cut, size=size):
            for other in others:
                for actual, expected in zip(other, whole, strict=True):
                    assert_same_bits(actual, expected)


def test_the_same_bits_from_run_to_run(ranks: Pool) -> None:
    first, second = (ranks.run(_together, "mask_of_257_rows", "uneven", size=4) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        for actual, expected in zip(one, other, strict=True):
            assert_same_bits(actual, expected)
