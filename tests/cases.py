"""The one source of inputs: handed cases with their right values, and generated ones that `reference` judges.

`handed()` reads `data/logits.json`: closed forms and scenarios of public bug reports. `generated()` covers sizes,
special values, masks, temperatures, dtypes and memory layouts. No right result is NaN; only rows that are ignored and
columns that are padding hold NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import zlib
from typing import Any

import torch
from torch import Tensor

DATA = pathlib.Path(__file__).parent / "data" / "logits.json"
SHARED = pathlib.Path(__file__).parents[2] / "shared" / "cases" / "logits.json"

# One element; powers of two less and plus one; past the 1024 that kernels like to take at once; a real vocabulary.
VOCABULARIES = (1, 2, 3, 7, 127, 129, 1000, 1025, 32000)
# None; one; an odd few; more than a block of rows (255 at V = 1025 in the ATen kernels).
ROWS = (0, 1, 3, 257)
# More columns than any kernel takes in one block.
WIDE = 70_001
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64)


@dataclasses.dataclass(frozen=True)
class Expected:
    """Right values of a handed case, float64, and their tolerance."""

    log_prob: Tensor
    entropy: Tensor
    grad_log_prob: Tensor  # gradient of log_prob.sum()
    grad_entropy: Tensor  # gradient of entropy.sum()
    atol: float
    rtol: float

    def check(self, name: str, actual: Tensor) -> None:
        expected = getattr(self, name)
        torch.testing.assert_close(
            actual.double(), expected, atol=self.atol, rtol=self.rtol, msg=lambda text: f"{name}: {text}"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """Arguments of one call on one rank that holds the whole vocabulary."""

    name: str
    logits: Tensor
    target: Tensor
    keep_mask: Tensor | None = None
    temperature: float | Tensor = 1.0
    ignore_index: int = -100
    vocab_size: int | None = None
    expected: Expected | None = None

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the Python functions and of `reference`."""
        return {
            "temperature": self.temperature,
            "ignore_index": self.ignore_index,
            "vocab_size": self.vocab_size,
        }

    def temperature_tensor(self) -> Tensor | None:
        """Temperature as the operators take it."""
        if isinstance(self.temperature, Tensor):
            return self.temperature
        dtype = torch.float64 if self.logits.dtype == torch.float64 else torch.float32
        return None if self.temperature == 1.0 else torch.tensor(self.temperature, dtype=dtype)

    def op_options(self) -> dict[str, Any]:
        """Keyword arguments of the public operators."""
        return {**self.options(), "temperature": self.temperature_tensor()}

    def stage_args(self) -> tuple[Any, ...]:
        """Leading positional arguments of the private operators, up to group_name."""
        where = (self.ignore_index, self.vocab_size, None, "")
        return (self.logits, self.target, self.keep_mask, self.temperature_tensor(), *where)

    def __str__(self) -> str:
        return self.name


def _number(value: Any) -> float:
    return float(value)


def _matrix(values: list[list[Any]], dtype: torch.dtype) -> Tensor:
    return torch.tensor([[_number(v) for v in row] for row in values], dtype=torch.float64).to(dtype)


def _handed_case(entry: dict[str, Any]) -> Case:
    dtype = getattr(torch, entry["dtype"])
    temperature = entry.get("temperature", 1.0)
    if isinstance(temperature, list):
        temperature = torch.tensor(temperature, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    mask = entry.get("keep_mask")
    vector = functools.partial(torch.tensor, dtype=torch.float64)
    return Case(
        name=entry["name"],
        logits=_matrix(entry["logits"], dtype),
        target=torch.tensor(entry["target"]),
        keep_mask=None if mask is None else torch.tensor(mask, dtype=torch.bool),
        temperature=temperature,
        ignore_index=entry.get("ignore_index", -100),
        vocab_size=entry.get("vocab_size"),
        expected=Expected(
            log_prob=vector(entry["log_prob"]),
            entropy=vector(entry["entropy"]),
            grad_log_prob=_matrix(entry["grad_log_prob"], torch.float64),
            grad_entropy=_matrix(entry["grad_entropy"], torch.float64),
            atol=entry["atol"],
            rtol=entry["rtol"],
        ),
    )


@functools.cache
def handed() -> tuple[Case, ...]:
    """The handed cases, in the order of the file."""
    return tuple(_handed_case(entry) for entry in json.loads(DATA.read_text()))


def generator(name: str) -> torch.Generator:
    """Random numbers that depend on a name alone, so that adding a case changes no other."""
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def random_case(name: str, rows: int, vocabulary: int, dtype: torch.dtype = torch.float32, **more: Any) -> Case:
    """Logits of standard deviation 4: some rows are confident, some are not."""
    source = generator(name)
    logits = (4 * torch.randn(rows, vocabulary, generator=source, dtype=torch.float64)).to(dtype)
    target = torch.randint(vocabulary, (rows,), generator=source)
    return Case(name, logits, target, **more)


def random_mask(name: str, rows: int, vocabulary: int, keep: float = 0.3) -> Tensor:
    return torch.rand(rows, vocabulary, generator=generator(name)) < keep


def _grid() -> list[Case]:
    sizes = [(n, v) for v in VOCABULARIES for n in ROWS]
    # 257 x 32000 would cost a second a test and has no block boundary that 257 x 1025 and 3 x 32000 lack.
    return [random_case(f"{n}x{v}", n, v) for n, v in sizes if n * v <= 2**19]


def _special_values() -> list[Case]:
    def change(name: str, rows: int, vocabulary: int, **more: Any) -> Case:
        return random_case(name, rows, vocabulary, **more)

    first = change("target_first", 3, 129)
    first.target.fill_(0)
    last = change("target_last", 3, 129)
    last.target.fill_(128)
    equal = Case("equal_logits", torch.full((2, 1000), -3.25), torch.tensor([0, 999]))
    lonely = Case("one_finite_logit", torch.full((2, 129), -torch.inf), torch.tensor([77, 77]))
    lonely.logits[:, 77] = 5.0
    impossible = change("target_at_minus_inf", 2, 129)
    impossible.logits[0, impossible.target[0]] = -torch.inf
    banned = change("half_minus_inf", 3, 1000)
    banned.logits[:, ::2] = -torch.inf
    banned.target.copy_(torch.tensor([1, 501, 999]))
    late = change("inf_blocks_first", 2, WIDE)
    late.logits[:, :40_000] = -torch.inf
    late.target.copy_(torch.tensor([40_000, WIDE - 1]))
    shard = change("inf_shard", 3, 1000)
    shard.logits[:, 250:500] = -torch.inf
    shard.target.copy_(torch.tensor([0, 600, 999]))
    underflow = change("far_below", 2, 7)
    underflow.logits[:, 1:] -= 3.0e4
    underflow.target.copy_(torch.tensor([0, 4]))
    return [first, last, equal, lonely, impossible, banned, late, shard, underflow, *_offsets()]


def _offsets() -> list[Case]:
    """Common offsets; the logits are exact in float32, whose spacing is 1/16 at 1e6 and 8 at 1e8."""
    cases = []
    for name, offset, step in (("1e6", 1e6, 0.0625), ("minus_1e6", -1e6, 0.0625), ("1e8", 1e8, 8.0)):
        source = generator(f"offset_{name}")
        logits = offset + step * torch.randint(-40, 40, (3, 129), generator=source, dtype=torch.float64)
        logits = logits.float()
        logits[2, ::3] = -torch.inf
        target = torch.tensor([0, 64, 127])
        mask = random_mask(f"offset_{name}", 3, 129)
        cases.append(Case(f"offset_{name}", logits, target))
        cases.append(Case(f"offset_{name}_kept_set", logits, target, mask, temperature=8 * step))
    return cases


def _masks() -> list[Case]:
    survivor = random_case("mask_keeps_target_only", 3, 129)
    keep = torch.zeros(3, 129, dtype=torch.bool).scatter(1, survivor.target.unsqueeze(1), True)
    survivor = dataclasses.replace(survivor, keep_mask=keep)
    dropped = random_case("mask_drops_target", 3, 129, keep_mask=random_mask("mask_drops_target", 3, 129))
    dropped.keep_mask.scatter_(1, dropped.target.unsqueeze(1), False)
    far = random_case("mask_drops_the_largest", 2, 1000, keep_mask=random_mask("mask_drops_the_largest", 2, 1000))
    far.logits[0, 3:9] = 90.0
    far.logits[1, 500] = 3000.0
    far.keep_mask[0, 3:9] = False
    far.keep_mask[1, 500] = False
    wide = random_case("mask_drops_a_block", 2, WIDE, keep_mask=random_mask("mask_drops_a_block", 2, WIDE))
    wide.keep_mask[:, :40_000] = False
    wide.keep_mask[1] = False
    kept_inf = random_case("mask_keeps_minus_inf", 2, 7, keep_mask=torch.ones(2, 7, dtype=torch.bool))
    kept_inf.logits[:, 2:4] = -torch.inf
    kept_inf.keep_mask[:, 4:] = False
    kept_inf.target.copy_(torch.tensor([0, 6]))
    return [
        survivor,
        dropped,
        far,
        wide,
        kept_inf,
        random_case("mask_keeps_nothing", 3, 129, keep_mask=torch.zeros(3, 129, dtype=torch.bool)),
        random_case("mask_keeps_all", 3, 129, keep_mask=torch.ones(3, 129, dtype=torch.bool)),
        random_case("mask_of_257_rows", 257, 129, keep_mask=random_mask("mask_of_257_rows", 257, 129)),
        random_case("mask_same_in_each_row", 3, 129, keep_mask=random_mask("m", 1, 129).expand(3, 129)),
        random_case("mask_whole_rows", 3, 129, keep_mask=torch.tensor([[True], [False], [True]]).expand(3, 129)),
    ]


def _options() -> list[Case]:
    def per_row(*values: float) -> Tensor:
        return torch.tensor(values)

    padded = random_case("padded", 3, 137, vocab_size=129)
    padded.target.remainder_(129)
    padded.logits[:, 129:] = torch.tensor([math.inf, math.nan, 1e30, 0.0, -math.inf, 9.0, math.inf, math.nan])
    ignored = random_case("ignored_rows", 5, 129)
    ignored.target[1::2] = -100
    ignored.logits[1] = math.nan
    all_ignored = random_case("all_ignored", 3, 7)
    all_ignored.target.fill_(-100)
    first_id_ignored = random_case("ignore_index_0", 5, 7, ignore_index=0)
    first_id_ignored.target.copy_(torch.tensor([0, 1, 0, 6, 0]))
    return [
        random_case("temperature_0.7", 3, 129, temperature=0.7),
        random_case("temperature_tensor", 3, 129, temperature=torch.tensor(1.3)),
        random_case("temperature_one_a_row", 3, 129, temperature=per_row(0.5, 1.0, 2.0)),
        random_case("temperature_1e-3", 3, 129, temperature=1e-3),
        random_case("temperature_1e3", 3, 129, temperature=1e3),
        padded,
        ignored,
        all_ignored,
        first_id_ignored,
        _everything("everything", 137, 129, banned=slice(5, 40)),
        _everything("small_everything", 9, 7, banned=slice(1, 3)),
    ]


def _everything(name: str, columns: int, vocab_size: int, banned: slice) -> Case:
    """All options at once, on five rows."""
    case = random_case(
        name,
        5,
        columns,
        keep_mask=random_mask(name, 5, columns),
        temperature=torch.tensor([0.3, 0.7, 1.0, 1.5, 40.0]),
        ignore_index=-1,
        vocab_size=vocab_size,
    )
    case.target.remainder_(vocab_size)
    case.target[0] = vocab_size - 1
    case.target[2] = -1
    case.logits[0, banned] = -torch.inf
    return case


def _dtypes() -> list[Case]:
    cases = []
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        name = str(dtype).removeprefix("torch.")
        cases.append(random_case(f"{name}_3x1025", 3, 1025, dtype))
        mask = random_mask(name, 3, 129)
        cases.append(random_case(f"{name}_kept_set", 3, 129, dtype, keep_mask=mask, temperature=0.7))
        cases.append(random_case(f"{name}_empty", 0, 7, dtype))
    cases.append(random_case("float64_float32_temperature", 3, 129, torch.float64, temperature=torch.tensor(0.7)))
    for dtype in INTEGERS:
        case = random_case(f"target_{str(dtype).removeprefix('torch.')}", 3, 100)
        cases.append(dataclasses.replace(case, target=case.target.to(dtype)))
    return cases


def _layouts() -> list[Case]:
    """The same kinds of numbers in memory that is not one contiguous matrix."""

    def laid(name: str, logits: Tensor, keep_mask: Tensor | None = None) -> Case:
        target = torch.randint(logits.shape[-1], logits.shape[:-1], generator=generator(name))
        return Case(name, logits, target, keep_mask)

    def numbers(name: str, *shape: int) -> Tensor:
        return 4 * torch.randn(shape, generator=generator(name))

    strided_target = laid("target_strided", numbers("target_strided", 5, 129))
    strided_target = dataclasses.replace(strided_target, target=strided_target.target.repeat_interleave(2)[1::2])
    return [
        laid("one_dimension", numbers("one_dimension", 129)),
        laid("three_dimensions", numbers("three_dimensions", 2, 3, 129)),
        laid("no_rows_in_the_middle", numbers("no_rows", 2, 0, 129)),
        laid("transposed", numbers("transposed", 129, 5).t()),
        laid("sequence_first", numbers("sequence_first", 4, 3, 129).transpose(0, 1)),
        laid("four_dimensions_permuted", numbers("permuted", 3, 2, 129, 2).permute(3, 0, 1, 2)),
        laid("column_stride_2", numbers("column_stride_2", 3, 258)[:, ::2]),
        laid("expanded_rows", numbers("expanded_rows", 1, 129).expand(5, 129)),
        laid("expanded_columns", numbers("expanded_columns", 5, 1).expand(5, 129)),
        laid("rows_of_a_bigger_matrix", numbers("bigger", 50, 129)[37:41]),
        laid("columns_of_a_bigger_matrix", numbers("bigger", 5, 300)[:, 17:146]),
        laid("shifted_tokens", numbers("shifted", 2, 6, 129)[:, :-1]),
        laid("mask_transposed", numbers("mask_t", 5, 129), random_mask("mask_t", 129, 5).t()),
        laid("mask_over_batch", numbers("mask_b", 2, 3, 129), random_mask("mask_b", 3, 129).expand(2, 3, 129)),
        strided_target,
    ]


@functools.cache
def generated() -> tuple[Case, ...]:
    """All generated cases; names are unique."""
    cases = (*_grid(), *_special_values(), *_masks(), *_options(), *_dtypes(), *_layouts())
    assert len({case.name for case in cases}) == len(cases)
    return cases


def by_name(name: str) -> Case:
    return next(case for case in (*generated(), *handed()) if case.name == name)
