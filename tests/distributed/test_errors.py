"""Bad input on every rank: the same clear error on every rank, and nothing hangs; ranks with different row counts."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

import ppo_ops
from tests.distributed.harness import Pool, RankError

ROWS, WIDTH = 3, 4
# A call takes milliseconds; a rank that waits for another that raised would take for ever.
PROMPT = 20.0

Arguments = dict[str, Any]


# What to change in a good call of `WIDTH` columns a rank, the error and what its text must say.
BAD: dict[str, tuple[Callable[[ProcessGroup], Arguments], type[Exception], str]] = {
    "target_v": (
        lambda group: {"target": torch.tensor([0, WIDTH * group.size(), 1])},
        IndexError,
        r"target must be in \[0, \d+\).*got \d+ in row 1",
    ),
    "target_minus_1": (
        lambda group: {"target": torch.tensor([0, 1, -1])},
        IndexError,
        r"target must be in \[0, \d+\).*got -1 in row 2",
    ),
    "target_beyond_vocab_size": (
        lambda group: {"target": torch.tensor([3, 0, 0]), "vocab_size": 3},
        IndexError,
        r"target must be in \[0, 3\).*got 3 in row 0",
    ),
    "target_that_no_shard_holds": (
        lambda group: {"target": torch.tensor([0, 1000, 1]), "vocab_start": WIDTH * group.rank()},
        IndexError,
        "target must be on some rank's shard, got 1000 in row 1",
    ),
    "target_between_two_shards": (
        lambda group: {"target": torch.tensor([0, WIDTH, 1]), "vocab_start": (WIDTH + 1) * group.rank()},
        IndexError,
        f"target must be on some rank's shard, got {WIDTH} in row 1",
    ),
    "target_shape": (
        lambda group: {"target": torch.zeros(ROWS + 1, dtype=torch.int64)},
        ValueError,
        r"target must have the shape .*\(3,\), got \(4,\)",
    ),
    "target_dtype": (
        lambda group: {"target": torch.zeros(ROWS)},
        TypeError,
        "target must have an integer dtype, got torch.float32",
    ),
    "logits_dtype": (
        lambda group: {"logits": torch.zeros(ROWS, WIDTH, dtype=torch.int64)},
        TypeError,
        "logits must be one of .*got torch.int64",
    ),
    "logits_shape": (lambda group: {"logits": torch.tensor(0.0)}, ValueError, r"logits must have the shape"),
    "mask_width": (
        lambda group: {"keep_mask": torch.ones(ROWS, WIDTH * group.size() + 1, dtype=torch.bool)},
        ValueError,
        r"keep_mask must have the shape .*\(3, 4\), got \(3, \d+\)",
    ),
    "mask_dtype": (
        lambda group: {"keep_mask": torch.ones(ROWS, WIDTH)},
        TypeError,
        "keep_mask must be bool, got torch.float32",
    ),
    "temperature_0": (lambda group: {"temperature": 0.0}, ValueError, "temperature must be > 0, got 0"),
    "temperature_0_in_a_row": (
        lambda group: {"temperature": torch.tensor([1.0, 0.0, 1.0])},
        ValueError,
        "temperature must be > 0, got 0.0 in row 1",
    ),
    "temperature_shape": (
        lambda group: {"temperature": torch.ones(ROWS - 1)},
        ValueError,
        r"temperature must have the shape .*got \(2,\)",
    ),
    "vocab_size_0": (lambda group: {"vocab_size": 0}, ValueError, "vocab_size must be at least 1, got 0"),
    "vocab_size_beyond_the_group": (
        lambda group: {"vocab_size": WIDTH * group.size() + 1},
        ValueError,
        r"vocab_size must be at most .*got \d+",
    ),
    "vocab_start_negative": (lambda group: {"vocab_start": -1}, ValueError, "vocab_start must not be negative, got -1"),
    "vocab_start_without_group": (
        lambda group: {"vocab_start": 4, "group": None},
        ValueError,
        "vocab_start must be 0 without a group.*got 4",
    ),
    "unknown_group": (lambda group: {"group": "no such group"}, ValueError, "group_name must be .*got 'no such group'"),
    "group_2d_mesh": (
        lambda group: {"group": DeviceMesh("cpu", torch.arange(group.size()).view(2, -1))},
        ValueError,
        "group must be a 1-D DeviceMesh, got 2 dimensions",
    ),
    "group_number": (lambda group: {"group": 0}, TypeError, "group must be a ProcessGroup.*int"),
}


def _attempt(group: ProcessGroup, change: Arguments) -> str:
    """Type and text of the error of a call, or "no error"."""
    arguments: Arguments = {
        "logits": torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(group.rank())),
        "target": torch.zeros(ROWS, dtype=torch.int64),
        "group": group,
    }
    arguments.update(change)
    try:
        ppo_ops.logprob_entropy(**arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _bad(group: ProcessGroup, name: str) -> tuple[str, str]:
    """The error, and what a good call right after it gives."""
    return _attempt(group, BAD[name][0](group)), _attempt(group, {})


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_the_same_clear_error_on_every_rank(ranks: Pool, name: str) -> None:
    _, kind, pattern = BAD[name]
    replies = ranks.run(_bad, name, size=4, timeout=PROMPT)
    for error, after in replies:
        assert error.startswith(f"{kind.__name__}: "), error
        assert pytest.RaisesExc(kind, match=pattern).matches(kind(error)), f"{error!r} does not say {pattern!r}"
        assert after == "no error", after
    assert replies == replies[:1] * 4


def _as_stranger(group: ProcessGroup) -> list[str]:
    """What the ranks outside a group of the first two get, by its placeholder and by its name."""
    pair = dist.new_group([0, 1])
    name = [pair.group_name if group.rank() < 2 else ""]
    dist.broadcast_object_list(name, 0, group=group)
    if group.rank() < 2:
        return [_attempt(pair, {}), _attempt(pair, {"group": name[0]})]
    return [_attempt(group, {"group": pair}), _attempt(group, {"group": name[0]})]


def test_ranks_outside_the_group(ranks: Pool) -> None:
    *members, third, fourth = ranks.run(_as_stranger, size=4, timeout=PROMPT)
    assert members == [["no error"] * 2] * 2
    assert third == fourth
    placeholder, by_name = third
    assert placeholder.startswith("TypeError: group must be a ProcessGroup"), placeholder
    assert by_name.startswith("ValueError: group_name must be the name of an initialized process group"), by_name


def _different_rows(group: ProcessGroup, rows: tuple[int, int], limit: float | None = None) -> str:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limit is not None:
        group = dist.new_group([0, 1], timeout=timedelta(seconds=limit))
    mine = rows[group.rank()]
    return _attempt(group, {"logits": torch.zeros(mine, WIDTH), "target": torch.zeros(mine, dtype=torch.int64)})


@pytest.fixture(scope="module")
def debugged() -> Iterator[Pool]:
    with Pool(2, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}) as pool:
        yield pool


@pytest.mark.parametrize("rows", [(3, 5), (0, 3)])
def test_different_rows_with_torch_distributed_debug(debugged: Pool, rows: tuple[int, int]) -> None:
    """With `TORCH_DISTRIBUTED_DEBUG=DETAIL` every rank gets an error before anything is sent."""
    for error in debugged.run(_different_rows, rows, size=2, timeout=PROMPT):
        assert error.startswith("RuntimeError: Detected mismatch between collectives on ranks"), error


def test_different_rows_without_torch_distributed_debug() -> None:
    """Without it gloo finds out what it can. Nothing passes for a result on a rank that needed another's numbers.

    One rank without rows needs nothing from the other and returns; the other waits until the group's time limit (30
    minutes unless `new_group` is told otherwise). Where both have rows, gloo ends the process of the rank that is sent
    more than it expected (SIGABRT, "Received data size doesn't match expected size"), and the other's connection is
    reset.
    """
    with Pool(2) as pool:
        without_rows, with_rows = pool.run(_different_rows, (0, 3), 1.0, size=2, timeout=PROMPT)
        assert without_rows == "no error"
        assert with_rows.startswith(("RuntimeError", "DistBackendError")), with_rows
        with pytest.raises(RankError) as error:
            pool.run(_different_rows, (3, 5), size=2, timeout=PROMPT)
        assert not error.value.timed_out
        assert "died with exit code -6" in str(error.value)
