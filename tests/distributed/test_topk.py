"""Top-k, K targets a position and the sum of squared probabilities on 1, 2 and 4 ranks: values, gradients, one
all-gather, ranks alike."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import ProfilerActivity, profile

import ppo_ops
from tests.distributed.harness import SIZES, Pool
from tests.distributed.shards import bounds, cuts
from tests.tolerances import assert_exact, assert_fp64, assert_same_bits

COLUMNS, K = 21, 9
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Reply(NamedTuple):
    ids: Tensor
    outputs: list[Tensor]  # of top-k, K targets, squares
    grads: list[Tensor]


def _inputs(dtype: torch.dtype, rows: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Logits with many ties and with fewer than k finite ones in a row; targets; temperatures."""
    source = torch.Generator().manual_seed(3)
    logits = torch.randn(rows, COLUMNS, generator=source).mul(2).round()
    if rows:
        logits[0, 4:] = -torch.inf
    target = torch.randint(COLUMNS, (rows, 4), generator=source)
    target[:, 2:3] = target[:, :1]
    target[1:2, 1] = -100
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return logits.to(dtype), target, 0.5 + torch.rand(rows, generator=source, dtype=wide)


def _outputs(logits: Tensor, target: Tensor, temperature: Any, **options: Any) -> tuple[Tensor, list[Tensor]]:
    ids, best = ppo_ops.vocab_parallel_topk(logits, K, temperature=temperature, **options)
    many = ppo_ops.logprob(logits, target, temperature=temperature, **options)
    return ids, [best, many, ppo_ops.sum_squared_probs(logits, temperature=temperature, **options)]


def _weights(outputs: list[Tensor]) -> list[Tensor]:
    source = torch.Generator().manual_seed(4)
    return [torch.randn(o.shape, generator=source, dtype=torch.float64).to(o.dtype) for o in outputs]


def _run(group: ProcessGroup, dtype: torch.dtype, cut: str, compiled: bool, rows: int = 5) -> Reply:
    logits, target, temperature = _inputs(dtype, rows)
    start, end = bounds(cut, COLUMNS, group.size())[group.rank()]
    options: dict[str, Any] = {"group": group, "vocab_start": start}
    if cut != "uneven":
        options["vocab_size"] = COLUMNS
    shard = logits[:, start:end].clone().requires_grad_()
    torch._dynamo.reset()
    function = torch.compile(_outputs, backend="aot_eager", fullgraph=True) if compiled else _outputs
    ids, outputs = function(shard, target, temperature, **options)
    grads = []
    for output, weight in zip(outputs, _weights(outputs), strict=True):
        grads.append(torch.autograd.grad(output, shard, weight, retain_graph=True)[0])
    return Reply(ids, [output.detach() for output in outputs], grads)


def _check(dtype: torch.dtype, cut: str, replies: list[Reply], rows: int = 5) -> None:
    logits, target, temperature = _inputs(dtype, rows)
    leaf = logits.double().requires_grad_()
    z = leaf / temperature.double().unsqueeze(1)
    log_p = z.log_softmax(-1)
    ids = logits.sort(dim=-1, descending=True, stable=True)[1][:, :K]
    many = log_p.gather(1, target.clamp(min=0)).masked_fill(target == -100, 0.0)
    expected = [log_p.gather(1, ids), many, z.softmax(-1).square().sum(-1)]
    for reply in replies:
        assert_exact(reply.ids, ids)
        for ours, first in zip(reply.outputs, replies[0].outputs, strict=True):
            assert_same_bits(ours, first)
    order = sorted(range(len(replies)), key=lambda rank: bounds(cut, COLUMNS, len(replies))[rank])
    for number, (right, weight) in enumerate(zip(expected, _weights(replies[0].outputs), strict=True)):
        grad = torch.cat([replies[rank].grads[number] for rank in order], -1)
        (right_grad,) = torch.autograd.grad(right, leaf, weight.double(), retain_graph=True)
        actual = replies[0].outputs[number]
        if dtype == torch.float64:
            assert_fp64(actual, right.detach())
            assert_fp64(grad, right_grad)
        else:
            # Ten float32 roundings of values up to 16; the gradient is then rounded once to its dtype.
            torch.testing.assert_close(actual.double(), right.detach(), rtol=4e-6, atol=1e-5)
            rtol = 4e-6 + 0.51 * torch.finfo(dtype).eps
            torch.testing.assert_close(grad.double(), right_grad, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(ranks: Pool, dtype: torch.dtype, size: int) -> None:
    """k exceeds a rank's columns, and at 4 ranks some rank has none."""
    for cut in cuts(size):
        if cut != "even":  # whose last rank may be padded: `bounds` are then not the shards
            _check(dtype, cut, ranks.run(_run, dtype, cut, False, size=size))


@pytest.mark.parametrize("size", [2, 4])
def test_compiled(ranks: Pool, size: int) -> None:
    _check(torch.float32, "reversed", ranks.run(_run, torch.float32, "reversed", True, size=size))


def test_no_rows(ranks: Pool) -> None:
    _check(torch.float32, "reversed", ranks.run(_run, torch.float32, "reversed", False, 0, size=2), 0)


def _even(group: ProcessGroup) -> list[Tensor]:
    """Where each rank's shard begins is left to the operators; the last column is padding."""
    width = -(-COLUMNS // group.size())
    logits = torch.nn.functional.pad(_inputs(torch.float32)[0], (0, width * group.size() - COLUMNS), value=torch.nan)
    shard = logits.split(width, 1)[group.rank()].clone()
    options: dict[str, Any] = {"group": group, "vocab_size": COLUMNS}
    return [*ppo_ops.vocab_parallel_topk(shard, K, **options), ppo_ops.sum_squared_probs(shard, **options)]


@pytest.mark.parametrize("size", SIZES)
def test_padding_is_absent(ranks: Pool, size: int) -> None:
    logits = _inputs(torch.float32)[0]
    for ids, log_probs, squares in ranks.run(_even, size=size):
        assert_exact(ids, logits.sort(dim=-1, descending=True, stable=True)[1][:, :K])
        # Ten float32 roundings of values up to 16.
        torch.testing.assert_close(log_probs, logits.log_softmax(-1).gather(1, ids), rtol=4e-6, atol=1e-5)
        torch.testing.assert_close(squares, logits.softmax(-1).square().sum(-1), rtol=4e-6, atol=1e-5)


def _count(group: ProcessGroup, number: int) -> tuple[list[str], list[str]]:
    logits = torch.randn(3, 6, requires_grad=True)

    def call() -> Tensor:
        if number == 0:
            return ppo_ops.vocab_parallel_topk(logits, 2, group=group)[1]
        if number == 1:
            return ppo_ops.logprob(logits, torch.zeros(3, 5, dtype=torch.int64), group=group)
        return ppo_ops.sum_squared_probs(logits, group=group)

    def collectives(events: profile) -> list[str]:
        return [event.name for event in events.events() or [] if event.name.startswith("gloo:")]

    with profile(activities=[ProfilerActivity.CPU]) as forward:
        output = call()
    with profile(activities=[ProfilerActivity.CPU]) as backward:
        output.sum().backward()
    return collectives(forward), collectives(backward)


@pytest.mark.parametrize("number", range(3), ids=["topk", "targets", "squares"])
def test_one_all_gather_forward_none_backward(ranks: Pool, number: int) -> None:
    assert ranks.run(_count, number, size=1) == [([], [])]
    assert ranks.run(_count, number, size=2) == [(["gloo:all_gather"], [])] * 2


def _errors(group: ProcessGroup) -> list[str]:
    logits = torch.zeros(2, 3)
    place: dict[str, Any] = {"group": group, "vocab_start": 3 * group.rank()}
    calls = [
        lambda: ppo_ops.vocab_parallel_topk(logits, 7, group=group),
        lambda: ppo_ops.vocab_parallel_topk(logits, 7, **place),
        lambda: ppo_ops.logprob(logits, torch.tensor([[0, 1], [6, 0]]), group=group),
        lambda: ppo_ops.logprob(logits, torch.tensor([[0, 1], [0, 6]]), **place),
    ]
    texts = []
    for call in calls:
        try:
            call()
            texts.append("no error")
        except (ValueError, IndexError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def test_errors_on_every_rank(ranks: Pool) -> None:
    first, second = ranks.run(_errors, size=2)
    assert (
        first
        == second
        == [
            "ValueError: k must be at most the vocabulary size 6, got 7",
            "ValueError: k must be at most the number of columns that all ranks hold together, got 7",
            "IndexError: target must be in [0, 6) or equal ignore_index (-100), got 6 in row 1, place 0",
            "IndexError: target must be on some rank's shard, got 6 in row 1",
        ]
    )
