"""Every way to name a group, groups that are not the world, and the order of ranks inside a group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ppo_ops
from tests import oracle
from tests.cases import Case, by_name, random_case
from tests.distributed.harness import Pool
from tests.oracle import Results
from tests.tolerances import assert_budget, assert_same_bits

COLUMNS = 32


def _case(number: int = 0) -> Case:
    """Four equal shards of `COLUMNS` columns for the whole world, or two for a pair."""
    return random_case(f"group {number}", 5, 4 * COLUMNS)


def _piece(case: Case, index: int, pieces: int) -> Tensor:
    return case.logits.chunk(pieces, -1)[index]


def _evaluate(case: Case, index: int, group: Any, pieces: int) -> Results:
    return oracle.run(ppo_ops.logprob_entropy, case, _piece(case, index, pieces), group=group)


def _assert_right(case: Case, replies: list[Results]) -> None:
    """The outputs on every rank and the gradients, put together in group order, are those of the whole vocabulary."""
    for reply in replies[1:]:
        assert_same_bits(reply.log_prob, replies[0].log_prob)
        assert_same_bits(reply.entropy, replies[0].entropy)
    grad_logits = torch.cat([reply.grad_logits for reply in replies], -1)
    ours = (replies[0].log_prob, replies[0].entropy, grad_logits)
    expected = (oracle.plain(case), oracle.truth(case), oracle.scales(case))
    for arguments in zip(ours, *expected, strict=True):
        assert_budget(*arguments)


def _named(group: ProcessGroup, how: str) -> Results:
    mesh = DeviceMesh.from_group(group, "cpu")
    given = {"process_group": group, "mesh": mesh, "name": group.group_name, "world": dist.group.WORLD}[how]
    return _evaluate(_case(), group.rank(), given, group.size())


def test_process_group_mesh_and_name_are_the_same_group(ranks: Pool) -> None:
    by_group, *others = (ranks.run(_named, how, size=4) for how in ("process_group", "mesh", "name", "world"))
    _assert_right(_case(), by_group)
    for other in others:
        for actual, expected in zip(other, by_group, strict=True):
            for a, e in zip(actual, expected, strict=True):
                assert_same_bits(a, e)


def _alone(group: ProcessGroup) -> Results:
    assert dist.get_world_size() == 4
    return oracle.run(ppo_ops.logprob_entropy, by_name("3x129"), group=None)


def test_no_group_never_becomes_the_world_group(ranks: Pool) -> None:
    """One rank calls, the other three do not: with the world group it would wait for them."""
    (reply,) = ranks.run(_alone, size=1, timeout=20.0)
    for actual, expected in zip(reply, oracle.run(ppo_ops.logprob_entropy, by_name("3x129")), strict=True):
        assert_same_bits(actual, expected)


def _in_pairs(group: ProcessGroup) -> Results:
    """Two pairs side by side, each with a vocabulary of its own, as tensor- beside data-parallel ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp = mesh["tp"]
    return _evaluate(_case(group.rank() // 2), tp.get_local_rank(), tp, 2)


def test_pairs_of_a_mesh_do_not_see_each_other(ranks: Pool) -> None:
    replies = ranks.run(_in_pairs, size=4)
    _assert_right(_case(0), replies[:2])
    _assert_right(_case(1), replies[2:])


def _across(group: ProcessGroup, members: list[int]) -> Results | None:
    """A group whose ranks are not the global ranks; the others stay away."""
    made = dist.new_group(members, sort_ranks=False)
    if group.rank() not in members:
        return None
    assert made.rank() == members.index(group.rank())
    return _evaluate(_case(), made.rank(), made, len(members))


@pytest.mark.parametrize("members", [[1, 3], [3, 1], [2, 0, 3, 1]])
def test_shards_go_by_the_rank_in_the_group(ranks: Pool, members: list[int]) -> None:
    """Also where the group's order is not the global one: the member that comes first holds the first columns."""
    replies = ranks.run(_across, members, size=4)
    assert [reply is not None for reply in replies] == [rank in members for rank in range(4)]
    _assert_right(_case(), [replies[rank] for rank in members])
