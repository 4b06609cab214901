"""The harness notices: without these, every other distributed test could pass by mistake."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from tests.distributed.harness import Pool, RankError


@pytest.fixture(scope="module")
def pair() -> Pool:
    with Pool(world_size=2) as pool:
        yield pool


def _sum_of_ranks(group: ProcessGroup, factor: int) -> tuple[int, int, int]:
    value = torch.tensor(factor * (1 + dist.get_rank(group)))
    dist.all_reduce(value, group=group)
    return int(value), group.size(), os.getpid()


def _fail_on_rank(group: ProcessGroup, rank: int) -> None:
    if group.rank() == rank:
        raise ValueError(f"only rank {rank} fails")
    dist.barrier(group)


def _hang_on_rank(group: ProcessGroup, rank: int) -> int:
    if group.rank() == rank:
        time.sleep(1000)
    return group.rank()


def _die_on_rank(group: ProcessGroup, rank: int) -> None:
    if group.rank() == rank:
        os._exit(7)
    dist.barrier(group)


def test_each_rank_answers_and_processes_are_reused(pair: Pool) -> None:
    first = pair.run(_sum_of_ranks, 10, size=2)
    second = pair.run(_sum_of_ranks, 1, size=2)
    assert [answer[:2] for answer in first] == [(30, 2)] * 2
    assert [answer[:2] for answer in second] == [(3, 2)] * 2
    assert [answer[2] for answer in first] == [answer[2] for answer in second] == [p.pid for p in pair.processes]


def test_a_failure_on_one_rank_is_reported(pair: Pool) -> None:
    pair.start()
    processes = pair.processes
    with pytest.raises(RankError, match="only rank 1 fails") as error:
        pair.run(_fail_on_rank, 1, size=2)
    assert list(error.value.failures) == [1]
    assert "_fail_on_rank" in str(error.value), "the failing rank's traceback is missing"
    # Rank 0 waited in a barrier that rank 1 never joins.
    assert not any(process.is_alive() for process in processes)


def test_a_hanging_rank_times_out(pair: Pool) -> None:
    pair.start()
    processes = pair.processes
    begin = time.monotonic()
    with pytest.raises(RankError, match="rank 0: no answer after") as error:
        pair.run(_hang_on_rank, 0, size=2, timeout=1.0)
    assert time.monotonic() - begin < 10, "the time limit was 1 s"
    assert error.value.timed_out
    assert list(error.value.failures) == [0]
    assert not any(process.is_alive() for process in processes)


def test_a_dying_rank_is_reported_and_the_next_call_gets_new_ranks(pair: Pool) -> None:
    with pytest.raises(RankError, match="rank 1: died with exit code 7"):
        pair.run(_die_on_rank, 1, size=2)
    assert not pair.processes
    assert [answer[0] for answer in pair.run(_sum_of_ranks, 1, size=2)] == [3, 3]
