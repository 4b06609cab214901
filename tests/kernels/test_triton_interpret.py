"""The Triton kernels in Triton's interpreter, on CPU tensors: the CPU suite's cases, and each stage by itself.

Tolerance of a stage: 2^-20 (eight float32 roundings) of the sum of the absolute values of the terms, where a term e^z
counts 1 + |z| times, since z is rounded before the exponential. 2^-48 in float64.
"""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import ppo_ops
from ppo_ops.kernels import cpu
from tests import cases, oracle, plain_kernels
from tests.tolerances import assert_exact, assert_same_bits

pytest.importorskip("triton")
from tests.kernels.triton_tools import interpreted_kernels

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    # The interpreter computes on special values with numpy.
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning"),
]

INF, NAN = math.inf, math.nan
IGNORE = -100
START = 700  # of the shard
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
KINDS = ((3, False), (3, True), (4, False), (6, True))
# One warp a program: the interpreter meets lanes one by one, which is most of its time. A block is then 1024 columns
# (bfloat16) or fewer, so that the last sizes take several splits.
LANES = 32
SPLIT = 1024
COLUMNS = (1, 2, 3, 7, 127, 129, 1000, 1025, 2501)
ORACLE = plain_kernels.make()


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return interpreted_kernels()


@pytest.fixture(autouse=True)
def small_programs(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LANES", LANES)
    monkeypatch.setattr(kernels, "SPLIT_COLUMNS", SPLIT)
    monkeypatch.setattr(kernels, "SPAN_COLUMNS", 2 * SPLIT)


@dataclasses.dataclass
class Stage:
    """Arguments of both kernels. What must not be read is NaN: padding, slack between rows, ignored rows."""

    logits: Tensor
    target: Tensor
    mask: Tensor | None
    temperature: Tensor | None
    kinds: int
    columns: int
    start: int = START

    def where(self) -> dict[str, int]:
        return {"ignore_index": IGNORE, "vocab_start": self.start, "columns": self.columns}

    def inputs(self) -> tuple[Any, ...]:
        return self.logits, self.target, self.mask, self.temperature

    @property
    def accumulation(self) -> torch.dtype:
        return torch.float64 if self.logits.dtype == torch.float64 else torch.float32

    def stats(self, kernels: Any) -> Tensor:
        out = torch.full((self.kinds, len(self.target)), NAN, dtype=self.accumulation)
        kernels.vocab_stats(*self.inputs(), out, **self.where())
        return out

    def grad(self, kernels: Any, normalizers: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor:
        out = torch.full_like(self.logits, NAN, memory_format=torch.contiguous_format)
        kernels.logits_grad(*self.inputs(), normalizers, a, b, out, **self.where())
        return out

    def double(self) -> Stage:
        temperature = None if self.temperature is None else self.temperature.double()
        return dataclasses.replace(self, logits=self.logits.double(), temperature=temperature)

    def rows(self, rows: slice) -> Stage:
        def cut(tensor: Tensor | None) -> Tensor | None:
            return tensor if tensor is None or len(tensor) == 1 else tensor[rows]

        return dataclasses.replace(
            self,
            logits=self.logits[rows],
            target=self.target[rows],
            mask=cut(self.mask),
            temperature=cut(self.temperature),
        )


def make(
    columns: int,
    kinds: int = 4,
    masked: bool = False,
    dtype: torch.dtype = torch.float32,
    temperature: str = "none",
    scale: float = 4.0,
) -> Stage:
    """Six rows: target first, last, in between, on a shard below, on one above, ignored."""
    source = cases.generator(f"{columns} {kinds} {dtype}")
    padding, slack = 3, 5
    storage = torch.full((6, columns + padding + slack), NAN, dtype=dtype)
    logits = storage[:, : columns + padding]
    logits[:, :columns] = (scale * torch.randn(6, columns, generator=source, dtype=torch.float64)).to(dtype)
    logits[5] = NAN
    target = torch.tensor([0, columns - 1, columns // 2, -1, columns, IGNORE - START]) + START
    mask = torch.rand(6, columns + padding, generator=source) < 0.4 if masked else None
    accumulation = torch.float64 if dtype == torch.float64 else torch.float32
    temperatures = {
        "none": None,
        "one": torch.tensor([0.7], dtype=accumulation),
        "each": torch.tensor([0.5, 0.9, 1.0, 1.7, 30.0, 1.0], dtype=accumulation),
    }
    return Stage(logits, target, mask, temperatures[temperature], kinds, columns)


def normalizers_of(stats: Tensor) -> Tensor:
    """What the merge over one rank gives; NaN of the target's logit stands for a target of nobody, so 0 instead."""
    kinds = len(stats)
    lp_max, lp_sum, target_logit = stats[:3]
    out = [lp_max, lp_sum.log(), target_logit.nan_to_num(0.0, INF, -INF)]
    if kinds > 3:
        row_max, total = (stats[4], stats[5]) if kinds == 6 else (lp_max, lp_sum)
        out += [total.log() - stats[3] / total]
    if kinds == 6:
        out += [row_max, total.log()]
    return torch.stack(out)


def close(actual: Tensor, expected: Tensor, scale: Tensor, accumulation: torch.dtype) -> None:
    eps = 2.0**-48 if accumulation == torch.float64 else 2.0**-20
    allowed = eps * scale
    if actual.dtype != accumulation:
        result = torch.finfo(actual.dtype)
        allowed = allowed + expected.abs() * (result.eps / 2) + result.smallest_normal * result.eps
    actual = actual.double()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    wrong = ~same & ~((actual - expected).abs() <= allowed)
    assert not wrong.any(), f"{actual[wrong][:5]} for {expected[wrong][:5]} at {wrong.nonzero()[:5].tolist()}"


def term_scale(stage: Stage, maximum: Tensor, power: int) -> Tensor:
    """sum e^z (1 + |z|)^power, float64."""
    inverse = 1 / stage.temperature.unsqueeze(1) if stage.temperature is not None else 1.0
    x = stage.logits[:, : stage.columns].nan_to_num(0.0)
    z = ((x - maximum.unsqueeze(1)) * inverse).clamp(min=-1e4)
    return (z.exp() * (1 + z.abs()) ** power).sum(1)


def check_stats(kernels: ModuleType, stage: Stage) -> Tensor:
    """Compare; returns the right statistics."""
    ours, right = stage.stats(kernels), stage.double().stats(ORACLE)
    double = stage.double()
    assert_exact(ours[0].double(), right[0])
    assert_exact(ours[2].double(), right[2])
    close(ours[1], right[1], right[1] * 40, ours.dtype)
    if stage.kinds > 3:
        row_max = right[4] if stage.kinds == 6 else right[0]
        close(ours[3], right[3], term_scale(double, row_max, 2), ours.dtype)
    if stage.kinds == 6:
        assert_exact(ours[4].double(), right[4])
        close(ours[5], right[5], term_scale(double, right[4], 1), ours.dtype)
    return right


def check_grad(kernels: ModuleType, stage: Stage, right: Tensor, upstream: str = "both") -> Tensor:
    source = cases.generator("upstream")
    a, b = torch.randn(2, len(stage.target), generator=source, dtype=torch.float64).to(stage.accumulation)
    a = None if upstream == "entropy" else a
    b = None if upstream == "log_prob" or stage.kinds == 3 else b
    normalizers = normalizers_of(right).to(stage.accumulation)
    ours = stage.grad(kernels, normalizers, a, b)
    double = stage.double()
    wide = [None if g is None else g.double() for g in (a, b)]
    expected = double.grad(ORACLE, normalizers.double(), *wide)
    # |a| (1[target] + p_kept (1 + |z|)) + |b| p (1 + |z|) (1 + |log p| + H), all over T
    x = double.logits[:, : stage.columns].nan_to_num(0.0)
    inverse = 1 / double.temperature.unsqueeze(1) if stage.temperature is not None else torch.ones(1, 1)
    scale = torch.zeros_like(x)
    terms = [(wide[0], 0, 1), (wide[1], 4, 5) if stage.kinds == 6 else (wide[1], 0, 1)]
    for number, (grad, maximum, log_sum) in enumerate(terms):
        if grad is None:
            continue
        z = (x - normalizers[maximum].double().unsqueeze(1)) * inverse
        log_p = (z - normalizers[log_sum].double().unsqueeze(1)).clamp(min=-1e4)
        size = log_p.clamp(max=0.0).exp() * (1 + log_p.abs() + normalizers[log_sum].double().abs().unsqueeze(1))
        if number == 1:
            size = size * (1 + log_p.abs() + normalizers[3].double().abs().unsqueeze(1))
        scale += grad.abs().unsqueeze(1) * (size + 1e-30 + (number == 0) * 0.1)
    scale = torch.nn.functional.pad(scale * inverse, (0, stage.logits.shape[1] - stage.columns))
    close(ours, expected, scale, stage.accumulation)
    return ours


# --- the CPU suite's cases, through the operators -------------------------------------------------------------------


@pytest.fixture
def through_triton(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_kernels", lambda dtype: kernels)


@pytest.mark.usefixtures("through_triton")
@pytest.mark.parametrize("case", cases.handed(), ids=str)
def test_handed_case(case: cases.Case) -> None:
    logits = case.logits.clone().requires_grad_()
    log_prob, entropy = ppo_ops.logprob_entropy(logits, case.target, case.keep_mask, **case.options())
    case.expected.check("log_prob", log_prob.detach())
    case.expected.check("entropy", entropy.detach())
    for name, result in (("grad_log_prob", log_prob), ("grad_entropy", entropy)):
        case.expected.check(name, torch.autograd.grad(result.sum(), logits, retain_graph=True)[0])
    assert_exact(ppo_ops.logprob(case.logits, case.target, case.keep_mask, **case.options()), log_prob.detach())


@pytest.mark.usefixtures("through_triton")
@pytest.mark.parametrize("case", [c for c in cases.generated() if c.target.numel() <= 16], ids=str)
def test_case_of_the_cpu_suite(case: cases.Case, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.logits.shape[-1] > 20_000:
        monkeypatch.setattr(kernels, "LANES", 128)
        monkeypatch.setattr(kernels, "SPLIT_COLUMNS", 8 * SPLIT)
        monkeypatch.setattr(kernels, "SPAN_COLUMNS", 8 * SPLIT)
    oracle.check(case)


# --- each stage against its formula -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("kinds", "masked"), KINDS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_sizes(kernels: ModuleType, columns: int, kinds: int, masked: bool) -> None:
    temperature = ("none", "one", "each")[(columns + kinds) % 3]
    stage = make(columns, kinds, masked, temperature=temperature)
    check_grad(kernels, stage, check_stats(kernels, stage))


@pytest.mark.parametrize(("kinds", "masked"), KINDS)
@pytest.mark.parametrize("temperature", ["none", "one", "each"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(kernels: ModuleType, dtype: torch.dtype, temperature: str, kinds: int, masked: bool) -> None:
    stage = make(261, kinds, masked, dtype, temperature)
    check_grad(kernels, stage, check_stats(kernels, stage))


@pytest.mark.parametrize(("kinds", "masked"), [(4, False), (6, True)])
@pytest.mark.parametrize("upstream", ["log_prob", "entropy"])
def test_one_gradient(kernels: ModuleType, upstream: str, kinds: int, masked: bool) -> None:
    stage = make(129, kinds, masked)
    check_grad(kernels, stage, stage.double().stats(ORACLE), upstream)


@pytest.mark.parametrize(("kinds", "masked"), KINDS)
def test_programs_as_on_a_device(
    monkeypatch: pytest.MonkeyPatch, kernels: ModuleType, kinds: int, masked: bool
) -> None:
    monkeypatch.undo()
    stage = make(kernels.SPLIT_COLUMNS + 5000, kinds, masked).rows(slice(0, 3))
    check_grad(kernels, stage, check_stats(kernels, stage))


@pytest.mark.parametrize(("kinds", "masked"), KINDS)
def test_wide_float64_splits(kernels: ModuleType, kinds: int, masked: bool) -> None:
    stage = make(2501, kinds, masked, torch.float64, "each")
    check_grad(kernels, stage, check_stats(kernels, stage))


# --- special values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kinds", "masked"), KINDS)
def test_blocks_of_minus_inf_come_first(kernels: ModuleType, kinds: int, masked: bool) -> None:
    stage = make(2501, kinds, masked)
    stage.logits[0, :600] = -INF  # a block
    stage.logits[1, :1100] = -INF  # a split
    stage.logits[2, 500:] = -INF
    check_grad(kernels, stage, check_stats(kernels, stage))


@pytest.mark.parametrize(("kinds", "masked"), KINDS)
def test_nothing_finite(kernels: ModuleType, kinds: int, masked: bool) -> None:
    stage = make(1500, kinds, masked)
    stage.logits[:5] = -INF
    stats = stage.stats(kernels)
    assert (stats[0, :5] == -INF).all()
    assert (stats[[1, 3] if kinds > 3 else [1], :5] == 0).all()
    normalizers = normalizers_of(stats)
    one = torch.ones(6)
    grad = stage.grad(kernels, normalizers, one, one if kinds > 3 else None)
    kept = torch.ones(5, 1500, dtype=torch.bool) if kinds != 3 or not masked else stage.mask[:5, :1500]
    assert grad[:5, :1500][kept].isnan().all()


@pytest.mark.parametrize(("kinds", "masked"), KINDS)
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("column", [3, 1499])
def test_one_bad_logit(kernels: ModuleType, column: int, bad: float, kinds: int, masked: bool) -> None:
    stage = make(1500, kinds, masked)
    if masked:
        stage.mask[2, column] = True
    good = stage.stats(kernels)
    stage.logits[2, column] = bad
    stats = stage.stats(kernels)
    assert stats[1, 2].isnan()
    if kinds == 6:
        assert stats[5, 2].isnan()
    if math.isnan(bad):
        assert stats[0, 2].isnan()
    others = [0, 1, 3, 4, 5]
    assert_same_bits(stats[:, others], good[:, others])
    normalizers = normalizers_of(stats)
    a = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    grad = stage.grad(kernels, normalizers, a, a if kinds > 3 else None)
    assert (grad[2] == 0).all()
    assert not grad.isnan().any()
    a[2] = 1.0
    assert stage.grad(kernels, normalizers, a, a if kinds > 3 else None)[2].isnan().any()


@pytest.mark.parametrize("bad", [NAN, INF])
def test_bad_logit_that_the_mask_drops(kernels: ModuleType, bad: float) -> None:
    """Log-prob does not see it; entropy does."""
    stage = make(1000, 3, True)
    stage.mask[2, 17] = False
    good = stage.stats(kernels)
    stage.logits[2, 17] = bad
    assert_same_bits(stage.stats(kernels), good)
    stage.kinds = 6
    stats = stage.stats(kernels)
    torch.testing.assert_close(stats[:3], good, rtol=1e-6, atol=0, equal_nan=True)
    assert stats[5, 2].isnan()
    # Without an upstream gradient of the entropy, its NaN does not show.
    a, b = torch.ones(6), torch.ones(6)
    b[2] = 0
    normalizers = normalizers_of(stats)
    grad = stage.grad(kernels, normalizers, a, b)
    assert not grad.isnan().any()
    expected = dataclasses.replace(stage, kinds=3).grad(kernels, normalizers[:3].contiguous(), a, None)
    torch.testing.assert_close(grad[2], expected[2], rtol=1e-6, atol=1e-9)


def test_kept_set_of_minus_inf_and_no_upstream_for_it(kernels: ModuleType) -> None:
    stage = make(129, 6, True)
    stage.logits[0, :129][stage.mask[0, :129]] = -INF
    stage.logits[0, 0] = -INF
    right = check_stats(kernels, stage)
    assert right[1, 0] == 0
    a, b = torch.zeros(6), torch.ones(6)
    grad = stage.grad(kernels, normalizers_of(right).float(), a, b)
    alone = stage.grad(kernels, normalizers_of(right).float(), None, b)
    assert_exact(grad, alone)
    assert not grad.isnan().any()


@pytest.mark.parametrize("offset", [1e6, -1e6, 1e8])
@pytest.mark.parametrize(("kinds", "masked"), KINDS)
def test_common_offset_changes_nothing(kernels: ModuleType, kinds: int, masked: bool, offset: float) -> None:
    stage = make(1025, kinds, masked)
    stage.logits[:5, :1025] = (stage.logits[:5, :1025]).round() * 8
    plain = stage.stats(kernels)
    stage.logits[:5, :1025] += offset
    shifted = stage.stats(kernels)
    assert_same_bits(shifted[[1, *range(3, kinds)]][:1], plain[[1, *range(3, kinds)]][:1])
    for row in {3, 5} & set(range(kinds)):
        assert_same_bits(shifted[row], plain[row])


@pytest.mark.parametrize("gap", [30.0, 90.0, 500.0, 3e4])
@pytest.mark.parametrize("kinds", [3, 6])
def test_dropped_logits_far_above_the_kept_ones(kernels: ModuleType, gap: float, kinds: int) -> None:
    stage = make(1025, kinds, True)
    stage.mask[:, 40:50] = False
    stage.logits[:5, 40:50] += gap
    stage.mask[1] = False  # nothing but the target is kept
    stage.mask[torch.arange(3), stage.target[:3] - START] = False
    check_grad(kernels, stage, check_stats(kernels, stage))


def test_target_of_nobody(kernels: ModuleType) -> None:
    for kinds, masked in KINDS:
        stage = make(129, kinds, masked)
        stats = stage.stats(kernels)
        assert stats[2].isnan().tolist() == [False, False, False, True, True, False]
        normalizers = normalizers_of(stats)
        normalizers[2, 3:5] = NAN
        a = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0])
        grad = stage.grad(kernels, normalizers, a, a if kinds > 3 else None)
        valid = grad[:, :129]
        expected = stage.mask[3, :129] if masked and kinds == 3 else torch.ones(129, dtype=torch.bool)
        if masked and kinds == 6:
            expected = stage.mask[3, :129]
        assert valid[3][expected].isnan().all()
        assert not grad[[0, 1, 2, 4, 5]].isnan().any()
        assert (grad[:, 129:] == 0).all()


@pytest.mark.parametrize("bad", [0.0, -1.0, NAN])
def test_temperature_that_is_not_positive(kernels: ModuleType, bad: float) -> None:
    stage = make(129, 4, temperature="each")
    stage.temperature[1] = bad
    stats = stage.stats(kernels)
    assert stats[1].isnan().tolist() == [False, True, False, False, False, False]
    a = torch.ones(6)
    assert stage.grad(kernels, normalizers_of(stats), a, a)[1, :129].isnan().all()
    a[1] = 0
    assert not stage.grad(kernels, normalizers_of(stats), a, a).isnan().any()


def test_infinite_temperature(kernels: ModuleType) -> None:
    stage = make(129, 4, temperature="each")
    stage.temperature[0] = INF
    stage.logits[0, 5] = -INF
    stats = stage.stats(kernels)
    assert stats[1, 0] == 128
    assert stats[3, 0].abs() < 1e-30


# --- shapes and layouts -----------------------------------------------------------------------------------------------


def test_empty(kernels: ModuleType) -> None:
    for kinds, masked in KINDS:
        stage = make(129, kinds, masked)
        assert stage.rows(slice(0, 0)).stats(kernels).shape == (kinds, 0)
        for width in (0, 4):
            mask = None if stage.mask is None else stage.mask[:, :width]
            shard = dataclasses.replace(stage, logits=stage.logits[:, :width], mask=mask, columns=0)
            stats = shard.stats(kernels)
            assert (stats[0, :5] == -INF).all()
            assert (stats[1, :5] == 0).all()
            assert stats[2, :5].isnan().all()
            assert stats[:3, 5].tolist() == [0, 1, 0]
            a = torch.ones(6)
            grad = shard.grad(kernels, normalizers_of(stage.stats(kernels)), a, a if kinds > 3 else None)
            assert (grad == 0).all()
            assert grad.shape == (6, width)


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


def every_second_column(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2, 1)[:, ::2]


def aligned(tensor: Tensor) -> Tensor:
    rows, width = tensor.shape
    return tensor.new_empty(rows, width // 16 * 16 + 32)[:, :width].copy_(tensor)


def one_off(tensor: Tensor) -> Tensor:
    rows, width = tensor.shape
    return tensor.new_empty(rows, width // 16 * 16 + 32)[:, 1 : width + 1].copy_(tensor)


@pytest.mark.parametrize("layout", [transposed, every_second_column, aligned, one_off])
@pytest.mark.parametrize(
    ("width", "mask_layout"), [(129, as_it_is), (136, as_it_is), (136, transposed), (136, aligned)]
)
def test_layouts_have_the_same_bits(kernels: ModuleType, layout: Any, mask_layout: Any, width: int) -> None:
    stage = make(129, 6, True, torch.bfloat16)
    if width == 136:  # whole vectors, so that an aligned row is read by them
        logits = torch.nn.functional.pad(stage.logits, (0, 4), value=NAN)
        stage = dataclasses.replace(stage, logits=logits, mask=torch.nn.functional.pad(stage.mask, (0, 4)))
    other = dataclasses.replace(stage, logits=layout(stage.logits), mask=mask_layout(stage.mask))
    stats = stage.stats(kernels)
    assert_same_bits(other.stats(kernels), stats)
    a = torch.ones(6)
    normalizers = normalizers_of(stats)
    grad = stage.grad(kernels, normalizers, a, a)
    assert_same_bits(other.grad(kernels, normalizers, a, a), grad)
    other.logits.copy_(stage.logits)
    kernels.logits_grad(*other.inputs(), normalizers, a, a, other.logits, **other.where())
    assert_same_bits(other.logits, grad)


def test_expanded_rows_and_masks(kernels: ModuleType) -> None:
    stage = make(129, 6, True)
    stage = dataclasses.replace(stage, logits=stage.logits[:1].expand(6, -1), mask=stage.mask[:1].expand(6, -1))
    copy = dataclasses.replace(stage, logits=stage.logits.contiguous(), mask=stage.mask.contiguous())
    stats = stage.stats(kernels)
    assert_same_bits(stats, copy.stats(kernels))
    columns = dataclasses.replace(copy, mask=copy.mask[:, :1].expand(-1, copy.logits.shape[1]))
    copy = dataclasses.replace(columns, mask=columns.mask.contiguous())
    assert_same_bits(columns.stats(kernels), copy.stats(kernels))


@pytest.mark.parametrize(("kinds", "masked"), KINDS)
def test_a_row_alone_has_the_same_bits(kernels: ModuleType, kinds: int, masked: bool) -> None:
    stage = make(2501, kinds, masked, temperature="each")
    together = stage.stats(kernels)
    normalizers = normalizers_of(together)
    a = torch.linspace(-1, 2, 6)
    b = a.flip(0) if kinds > 3 else None
    grad = stage.grad(kernels, normalizers, a, b)
    for i in range(6):
        row = slice(i, i + 1)
        alone = stage.rows(row)
        assert_same_bits(alone.stats(kernels), together[:, row])
        assert_same_bits(alone.grad(kernels, normalizers[:, row], a[row], None if b is None else b[row]), grad[row])


@pytest.mark.parametrize(("kinds", "masked"), KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place(kernels: ModuleType, dtype: torch.dtype, kinds: int, masked: bool) -> None:
    stage = make(2504, kinds, masked, dtype)
    normalizers = normalizers_of(stage.stats(kernels))
    a = torch.ones(6, dtype=stage.accumulation)
    b = a if kinds > 3 else None
    grad = stage.grad(kernels, normalizers, a, b)
    kernels.logits_grad(*stage.inputs(), normalizers, a, b, stage.logits, **stage.where())
    assert_same_bits(stage.logits, grad)
    assert not grad.isnan().any()


def test_strides_of_small_tensors(kernels: ModuleType) -> None:
    """Upstream gradients expanded or strided, targets off alignment, rows of `stats` apart."""
    stage = make(129, 6, True, temperature="each")
    stats = stage.stats(kernels)
    apart = torch.full((12, 9), NAN)
    kernels.vocab_stats(*stage.inputs(), apart[::2, 2:8], **stage.where())
    assert_same_bits(apart[::2, 2:8], stats)
    assert apart[1::2].isnan().all()
    normalizers = normalizers_of(stats)
    apart[::2, 2:8] = normalizers
    one = torch.ones(6)
    grad = stage.grad(kernels, normalizers, 2 * one, 3 * one)
    assert_same_bits(
        stage.grad(kernels, apart[::2, 2:8], torch.tensor(2.0).expand(6), torch.full((12,), 3.0)[::2]), grad
    )
    strided = dataclasses.replace(
        stage,
        target=stage.target.repeat_interleave(3)[1::3],
        temperature=stage.temperature.repeat_interleave(2)[1::2],
    )
    assert_same_bits(strided.stats(kernels), stats)
    assert_same_bits(strided.grad(kernels, normalizers, 2 * one, 3 * one), grad)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_target_dtypes(kernels: ModuleType, dtype: torch.dtype) -> None:
    stage = make(50, 4)
    local = stage.target - START
    local[5] = 200 if dtype == torch.uint8 else IGNORE
    local[3] = 100
    wide = dataclasses.replace(stage, target=local, start=0)
    expected = wide.stats(kernels)
    narrow = dataclasses.replace(wide, target=torch.cat((local[:1], local)).to(dtype)[1:])
    assert_same_bits(narrow.stats(kernels)[:, :5], expected[:, :5])
    if dtype != torch.uint8:
        assert_same_bits(narrow.stats(kernels), expected)


def test_row_without_upstream_gradient_is_not_read(kernels: ModuleType) -> None:
    stage = make(129, 4)
    normalizers = normalizers_of(stage.stats(kernels))
    normalizers[:, 1] = NAN
    stage.logits[1] = NAN
    a = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    grad = stage.grad(kernels, normalizers, a, a)
    assert (grad[[1, 5]] == 0).all()
    assert not grad.isnan().any()
