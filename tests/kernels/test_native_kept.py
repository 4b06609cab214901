"""The native kernels of ragged kept sets: every instruction set against float64, threads, and the check of the sets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ppo_ops.kernels import native

if not native.available():
    pytest.skip(f"native kernels: {native.why_unavailable()}", allow_module_level=True)

COLUMNS = 5003


@pytest.fixture(params=["avx512", "avx2", "baseline"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if native._library.ppo_choose(request.param.encode()) is None:
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    native._library.ppo_choose(native.instruction_set().encode())


def _sets(sizes: list[int], dtype: torch.dtype = torch.int32) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    ids = [torch.randint(COLUMNS, (size,), generator=source) for size in sizes]  # with ids said twice
    return torch.cat(ids).to(dtype), torch.tensor([0, *sizes]).cumsum(0)


def _stats(logits: Tensor, target: Tensor, ids: Tensor, offsets: Tensor, start: int, columns: int) -> Tensor:
    stats = torch.full((3, len(target)), torch.nan)
    where = {"ignore_index": -100, "vocab_start": start, "columns": columns}
    native.kept_vocab_stats(logits, target, ids, offsets, torch.tensor([0.7]), stats, **where)
    return stats


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stats_against_float64(isa: str, dtype: torch.dtype, ids_dtype: torch.dtype) -> None:
    """Around every length where something changes: a vector, a block, the stack's memory."""
    sizes = [1, 2, 15, 16, 17, 63, 64, 65, 1022, 1023, 1024, 2047, 2048, 2049, 4999]
    start, columns = 400, 4000  # a shard: ids before, on and after it
    ids, offsets = _sets(sizes, ids_dtype)
    logits = (4 * torch.randn(len(sizes), columns)).to(dtype)
    logits[3, 5:] = -torch.inf
    target = torch.arange(len(sizes)) * 300 + 350
    stats = _stats(logits, target, ids, offsets, start, columns)
    for row in range(len(sizes)):
        kept = torch.cat([ids[offsets[row] : offsets[row + 1]].long(), target[row : row + 1]]).unique() - start
        x = logits[row, kept[(kept >= 0) & (kept < columns)]].double()
        largest = x.max() if len(x) else torch.tensor(-torch.inf)
        expected = ((x - largest) / 0.7).nan_to_num(neginf=-1e4, nan=-1e4).exp().sum()
        assert stats[0, row] == largest
        # Exponents are rounded to 2^-24 of up to 40, terms to a few roundings; sums of a block are in float32 lanes.
        torch.testing.assert_close(stats[1, row].double(), expected, rtol=4e-6, atol=1e-30)
        local = int(target[row]) - start
        owned = 0 <= local < columns
        assert stats[2, row].isnan() != owned
        assert not owned or stats[2, row] == logits[row, local]


def test_threads_change_no_bit() -> None:
    """Also where work is unevenly spread: some rows are read whole."""
    sizes = [0 if row % 7 == 3 else row for row in range(300)]
    ids, offsets = _sets(sizes)
    logits, target = torch.randn(300, COLUMNS), torch.arange(300) * 16
    threads, found = torch.get_num_threads(), []
    for number in (1, 2, 5):
        torch.set_num_threads(number)
        found.append(_stats(logits, target, ids, offsets, 0, COLUMNS))
    torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
def test_right_sets(ids_dtype: torch.dtype, offsets_dtype: torch.dtype) -> None:
    limits = torch.iinfo(ids_dtype)

    def right(ids: list[int], offsets: list[int], end: int | None) -> bool:
        return native.right_sets(torch.tensor(ids, dtype=ids_dtype), torch.tensor(offsets, dtype=offsets_dtype), end)

    many = list(range(100))
    assert right([0, 6, 6], [0, 1, 1, 3], 7)
    assert right([], [0], 7)
    assert right([], [0, 0, 0], 7)
    assert right([0, limits.max], [0, 2], None)
    assert right([0, limits.max], [0, 2], 2**62) == (ids_dtype == torch.int32)
    for offsets in ([1, 3], [0, 2], [0, 4], [0, 3, 2, 3], [-1, 3], [0, -1, 3]):
        assert not right([0, 1, 2], offsets, 7), offsets
    most = torch.iinfo(offsets_dtype).max
    assert not right([0, 1, 2], [0, most, -2, 3], 7)  # in 64 bits each difference wraps to a positive number
    for place in (0, 1, 50, 98, 99):  # in the vector loop and in its tail
        for wrong in (-1, 100, limits.min, limits.max):
            assert not right([*many[:place], wrong, *many[place + 1 :]], [0, 100], 100), (place, wrong)
    assert not right([3, -1], [0, 2], None)
