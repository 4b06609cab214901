"""A row's bits depend on nothing but the row: not on others, chunks, threads, runs, memory layouts or dtypes of ids."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests import cases
from tests.cases import Case
from tests.ops.numerics_tools import assert_part, part_of, run, run_unit
from tests.tolerances import assert_exact, assert_same_bits

NAN = math.nan
SAME = ("257x127", "257x1025", "257x3", "mask_of_257_rows")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", SAME)
def test_bits_do_not_depend_on_other_rows_or_chunks(kernels: str, name: str, dtype: torch.dtype) -> None:
    case = cases.by_name(name)
    case = dataclasses.replace(case, logits=case.logits.to(dtype), temperature=0.7)
    whole = run_unit(case)
    for chunk in (1, 2, 7, 64, 256):
        for start in (0, 1, 100, 256) if chunk < 64 else range(0, 257, chunk):
            rows = slice(start, start + chunk)
            assert_part(whole, run_unit(part_of(case, rows)), rows)
    order = torch.randperm(257, generator=cases.generator("order"))
    shuffled = run_unit(
        dataclasses.replace(
            case,
            logits=case.logits[order],
            target=case.target[order],
            keep_mask=None if case.keep_mask is None else case.keep_mask[order],
        )
    )
    for all_rows, some in zip(whole, shuffled, strict=True):
        assert_same_bits(all_rows[order], some)


def test_bits_do_not_depend_on_neighbours_that_are_ignored(kernels: str) -> None:
    """A kernel may take another path when some rows need no work."""
    case = dataclasses.replace(cases.by_name("257x129"), target=cases.by_name("257x129").target.clone())
    whole = run_unit(case)
    case.target[::3] = -100
    some = run_unit(case)
    for rows in (slice(1, None, 3), slice(2, None, 3)):
        for expected, actual in zip(whole, some, strict=True):
            assert_same_bits(actual[rows], expected[rows])
    for result in some:
        assert not result[::3].any()


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["257x1025", "mask_of_257_rows", "mask_drops_a_block", "3x32000", "1x32000"])
def test_bits_do_not_depend_on_the_number_of_threads(kernels: str, threads: Callable[[int], None], name: str) -> None:
    case = cases.by_name(name)
    results = []
    for number in (1, 2, 3, 8):
        threads(number)
        results.append(run_unit(case))
    for other in results[1:]:
        for actual, expected in zip(other, results[0], strict=True):
            assert_same_bits(actual, expected)


def test_bits_do_not_depend_on_the_run(kernels: str) -> None:
    case = cases.by_name("everything")
    first = run(case)
    for _ in range(5):
        for actual, expected in zip(run(case), first, strict=True):
            assert_same_bits(actual, expected)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.t().contiguous().t(),
    "column_stride_2": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "column_stride_3": lambda t: t.repeat_interleave(3, 1)[:, 1::3],
    "rows_apart": lambda t: torch.nn.functional.pad(t, (0, 7), value=NAN)[:, :-7],
    "misaligned": lambda t: torch.nn.functional.pad(t, (3, 2), value=NAN)[:, 3:-2],
    "chunk_of_more_rows": lambda t: torch.cat((t * NAN, t, t * NAN))[len(t) : 2 * len(t)],
    "one_element_in": lambda t: torch.cat((t.new_tensor([NAN]), t.flatten()))[1:].view_as(t),
    "every_second_row": lambda t: torch.stack((t, t * NAN), 1).flatten(0, 1)[::2],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_do_not_depend_on_the_memory_layout(kernels: str, layout: str, dtype: torch.dtype) -> None:
    for name in ("5 rows", "1 row"):
        rows = int(name[0])
        case = cases.random_case("layout" + name, rows, 1025, dtype)
        mask = cases.random_mask("layout", rows, 1025)
        for keep in (None, mask):
            straight = dataclasses.replace(case, keep_mask=keep)
            laid = dataclasses.replace(straight, logits=LAYOUTS[layout](case.logits))
            assert torch.equal(laid.logits, case.logits)
            expected = run_unit(straight)
            for actual, right in zip(run_unit(laid), expected, strict=True):
                assert_same_bits(actual, right)
            if keep is not None and layout in ("transposed", "column_stride_2"):
                masked = dataclasses.replace(straight, keep_mask=LAYOUTS[layout](keep))
                for actual, right in zip(run_unit(masked), expected, strict=True):
                    assert_same_bits(actual, right)


def test_bits_do_not_depend_on_the_leading_shape(kernels: str) -> None:
    case = cases.random_case("shapes", 24, 129, keep_mask=cases.random_mask("shapes", 24, 129))
    case = dataclasses.replace(case, temperature=torch.linspace(0.5, 2.0, 24))
    expected = run_unit(case)
    for shape in ((24,), (2, 12), (2, 3, 4), (1, 24), (24, 1), (2, 1, 3, 4)):
        shaped = dataclasses.replace(
            case,
            logits=case.logits.view(*shape, 129),
            target=case.target.view(shape),
            keep_mask=case.keep_mask.view(*shape, 129),
            temperature=case.temperature.view(shape),
        )
        for actual, right in zip(run_unit(shaped), expected, strict=True):
            assert_same_bits(actual.reshape(right.shape), right)
    # Sequence first, as Megatron has it: rows of one sequence are not neighbours in memory.
    swapped = dataclasses.replace(
        case,
        logits=case.logits.view(4, 6, 129).transpose(0, 1),
        target=case.target.view(4, 6).t(),
        keep_mask=case.keep_mask.view(4, 6, 129).transpose(0, 1),
        temperature=case.temperature.view(4, 6).t(),
    )
    results = run_unit(swapped)
    for actual, right in zip(results, expected, strict=True):
        assert_same_bits(actual.transpose(0, 1).reshape(right.shape), right)


def test_expanded_logits(kernels: str) -> None:
    """Stride 0 between rows, and between columns; the gradient has memory of its own."""
    row = torch.randn(1, 1025, generator=cases.generator("expanded"))
    for expanded in (row.expand(257, 1025), row[:, :1].expand(257, 129), row[0, 0].expand(3, 7)):
        target = torch.arange(expanded.shape[0]) % expanded.shape[1]
        laid, straight = (Case("expanded", x, target) for x in (expanded, expanded.contiguous()))
        for actual, right in zip(run_unit(laid), run_unit(straight), strict=True):
            assert_same_bits(actual, right)


@pytest.mark.parametrize("number", [0.3, 1.0, 1.7])
def test_bits_of_one_temperature_said_in_three_ways(kernels: str, number: float) -> None:
    case = cases.by_name("mask_of_257_rows")
    expected = run_unit(dataclasses.replace(case, temperature=torch.tensor(number)))
    for temperature in (number, torch.full((257,), number), torch.tensor(number).expand(257)):
        for actual, right in zip(run_unit(dataclasses.replace(case, temperature=temperature)), expected, strict=True):
            assert_exact(actual, right)


@pytest.mark.parametrize("dtype", cases.INTEGERS, ids=str)
def test_bits_do_not_depend_on_the_target_dtype(kernels: str, dtype: torch.dtype) -> None:
    case = cases.random_case("target dtypes", 5, 100)
    expected = run(case)
    for actual, right in zip(run(dataclasses.replace(case, target=case.target.to(dtype))), expected, strict=True):
        assert_same_bits(actual, right)


def test_rows_more_than_2_31_elements_apart(kernels: str) -> None:
    """Rows 2^31 elements apart, in memory that is reserved and hardly touched."""
    stride = 2**31 + 1
    try:
        storage = torch.UntypedStorage(2 * (2 * stride + 200))
    except RuntimeError:
        pytest.skip("no 8.6 GB of address space")
    flat = torch.tensor([], dtype=torch.bfloat16).set_(storage)
    logits = flat.as_strided((3, 129), (stride, 1))
    case = cases.random_case("far apart", 3, 129, torch.bfloat16)
    logits.copy_(case.logits)
    for actual, right in zip(run_unit(dataclasses.replace(case, logits=logits)), run_unit(case), strict=True):
        assert_same_bits(actual, right)
