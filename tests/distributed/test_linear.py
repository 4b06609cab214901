"""The fused output layer on real ranks: hidden replicated, the weight's rows split over the group."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import ProfilerActivity, profile

import ppo_ops
from tests import linear_tools as tools
from tests.distributed.harness import Pool
from tests.distributed.shards import bounds
from tests.linear_tools import Inputs, make
from tests.tolerances import assert_exact, assert_same_bits


class Reply(NamedTuple):
    log_prob: Tensor
    entropy: Tensor
    grads: list[Tensor]
    forward: list[str]
    backward: list[str]


CASES = [
    make("plain", bias=True),  # 129 over 2 or 4 ranks: the last shard is ragged
    make("three tokens", vocab=3),  # over 4 ranks the last one holds padding alone
    make("1023 tokens", vocab=1023),
    make("one token", rows=9, vocab=1),
    make("float64", dtype=torch.float64, bias=True, kept=True, temperature=0.7),
    make("bfloat16", dtype=torch.bfloat16),
    make("no rows", rows=0),
    tools.everything(),
]
BY_NAME = {inputs.name: inputs for inputs in CASES}


def _shard(inputs: Inputs, cut: str, rank: int, size: int) -> tuple[Inputs, dict[str, Any]]:
    """This rank's rows of the weight, with NaN in rows that pad the last shard."""
    vocab = len(inputs.weight)
    start, end = bounds(cut, vocab, size)[rank]
    weight, bias = inputs.weight[start:end], None if inputs.bias is None else inputs.bias[start:end]
    more: dict[str, Any] = {"vocab_start": start} if cut != "even" else {}
    if cut == "even" and vocab % size:
        padding = -(-vocab // size) - (end - start)
        weight = torch.cat([weight, torch.full((padding, weight.shape[1]), torch.nan, dtype=weight.dtype)])
        bias = None if bias is None else torch.cat([bias, torch.full((padding,), torch.nan, dtype=bias.dtype)])
        inputs = dataclasses.replace(inputs, vocab_size=inputs.vocab_size or vocab)
    return dataclasses.replace(inputs, weight=weight, bias=bias), more


def _collectives(events: profile) -> list[str]:
    return [event.name for event in events.events() or [] if event.name.startswith("gloo:")]


def _run(group: ProcessGroup, name: str, cut: str, **more: Any) -> Reply:
    inputs, place = _shard(BY_NAME[name], cut, group.rank(), group.size())
    hidden, weight, bias = leaves = tools.leaves_of(inputs)
    with profile(activities=[ProfilerActivity.CPU]) as forward:
        options = {**inputs.options(), **place, **more}
        outputs = ppo_ops.linear_logprob_entropy(hidden, weight, inputs.target, bias, group=group, **options)
    upstream = [grad.to(outputs[0].dtype) for grad in inputs.upstream()]
    with profile(activities=[ProfilerActivity.CPU]) as backward:
        grads = torch.autograd.grad(outputs, [leaf for leaf in leaves if leaf is not None], upstream)
    found = (_collectives(forward), _collectives(backward))
    return Reply(outputs[0].detach(), outputs[1].detach(), list(grads), *found)


def _run_partial(group: ProcessGroup, name: str) -> Reply:
    return _run(group, name, "even", reduce_grad_hidden=False)


def _whole(inputs: Inputs, cut: str, pieces: list[Tensor]) -> Tensor:
    """The gradient of the whole weight or bias from that of every rank; the padding's must be 0."""
    vocab = len(inputs.weight)
    whole = pieces[0].new_full((vocab, *pieces[0].shape[1:]), torch.nan)
    for piece, (start, end) in zip(pieces, bounds(cut, vocab, len(pieces)), strict=True):
        whole[start:end] = piece[: end - start]
        assert not piece[end - start :].any(), "gradient of padding rows"
    return whole


def _results(inputs: Inputs, cut: str, replies: list[Reply]) -> tools.Results:
    """One rank's results from those of all, which must agree."""
    for reply in replies[1:]:
        assert_same_bits(reply.log_prob, replies[0].log_prob)
        assert_same_bits(reply.entropy, replies[0].entropy)
        assert_same_bits(reply.grads[0], replies[0].grads[0])
    sliced = [
        _whole(inputs, cut, [reply.grads[place] for reply in replies]) for place in range(1, len(replies[0].grads))
    ]
    return tools.Results(replies[0].log_prob, replies[0].entropy, replies[0].grads[0], *(*sliced, None)[:2])


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", BY_NAME)
def test_as_one_rank(ranks: Pool, name: str, size: int) -> None:
    """Outputs and hidden's gradient of the same bits on every rank, and right; the weight's gradient its slice."""
    replies = ranks.run(_run, name, "even", size=size)
    tools.check(BY_NAME[name], _results(BY_NAME[name], "even", replies))
    for reply in replies:
        assert reply.forward == (["gloo:all_gather"] if size > 1 else [])
        assert reply.backward == (["gloo:all_reduce"] if size > 1 else [])


@pytest.mark.parametrize("cut", ["uneven", "reversed", "one_rank"])
def test_other_cuts(ranks: Pool, cut: str) -> None:
    """Empty shards, and shards in another order than the ranks."""
    replies = ranks.run(_run, "plain", cut, size=4)
    tools.check(BY_NAME["plain"], _results(BY_NAME["plain"], cut, replies))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["plain", "float64"])
def test_hidden_gradient_left_to_the_caller(ranks: Pool, name: str, size: int) -> None:
    """Without a collective in backward; the parts add up to what the op would have summed."""
    parts = ranks.run(_run_partial, name, size=size)
    whole = ranks.run(_run, name, "even", size=size)
    assert all(part.backward == [] for part in parts)
    assert not torch.equal(parts[0].grads[0], whole[0].grads[0])
    total = sum(part.grads[0].double() for part in parts)
    # A sum of 2 or 4 numbers in another order.
    tolerance = 1e-13 if name == "float64" else 1e-5
    torch.testing.assert_close(total, whole[0].grads[0].double(), rtol=tolerance, atol=tolerance)
    for part, reply in zip(parts, whole, strict=True):
        for actual, expected in zip(part.grads[1:], reply.grads[1:], strict=True):
            assert_exact(actual, expected)


def _all_minus_20(group: ProcessGroup, vocab: int) -> tuple[Tensor, Tensor]:
    width = -(-vocab // group.size())
    hidden, weight = torch.full((2, 4), -5.0), torch.ones(width, 4)
    target = torch.tensor([0, vocab - 1])
    return ppo_ops.linear_logprob_entropy(hidden, weight, target, vocab_size=vocab, group=group)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("vocab", [3, 129, 1023])
def test_equal_logits_of_minus_20(ranks: Pool, vocab: int, size: int) -> None:
    """Columns past the end would count as 0 and take all of the probability."""
    expected = torch.tensor(float(vocab)).log().expand(2)
    for log_prob, entropy in ranks.run(_all_minus_20, vocab, size=size):
        # One rounding of the logarithm and one of the sum of ones.
        torch.testing.assert_close(log_prob, -expected, rtol=2e-7, atol=0)
        torch.testing.assert_close(entropy, expected, rtol=2e-7, atol=0)


def _frozen_hidden(group: ProcessGroup) -> list[str]:
    inputs, _ = _shard(BY_NAME["bfloat16"], "even", group.rank(), group.size())
    weight = inputs.weight.requires_grad_()
    log_prob, _ = ppo_ops.linear_logprob_entropy(inputs.hidden, weight, inputs.target, vocab_size=129, group=group)
    with profile(activities=[ProfilerActivity.CPU]) as backward:
        log_prob.sum().backward()
    return _collectives(backward)


def test_no_collective_where_hidden_needs_no_gradient(ranks: Pool) -> None:
    assert ranks.run(_frozen_hidden, size=2) == [[], []]


def _bad_target(group: ProcessGroup) -> str:
    hidden, weight = torch.zeros(2, 3), torch.zeros(4, 3)
    try:
        ppo_ops.linear_logprob_entropy(hidden, weight, torch.tensor([1, 4 * group.size()]), group=group)
    except IndexError as error:
        return str(error)
    return ""


def test_a_target_outside_the_vocabulary_raises_on_every_rank(ranks: Pool) -> None:
    expected = "target must be in [0, 8) or equal ignore_index (-100), got 8 in row 1"
    assert ranks.run(_bad_target, size=2) == [expected] * 2


def _sharded_weight(group: ProcessGroup) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    weight = distribute_tensor(torch.zeros(8, 3), mesh, [Shard(0)])
    try:
        ppo_ops.linear_logprob_entropy(torch.zeros(2, 3), weight, torch.zeros(2, dtype=torch.int64), group=group)
    except TypeError as error:
        return str(error)
    return ""


def test_a_sharded_tensor_is_refused(ranks: Pool) -> None:
    expected = "weight must be a plain tensor, this rank's part, got a DTensor; pass weight.to_local() and the group"
    assert ranks.run(_sharded_weight, size=4) == [expected] * 4
