"""Arguments of the two Triton kernels, and the comparison of what they give with the formulas in float64.

Tolerance of a stage: 2^-20 (eight float32 roundings) of the sum of the absolute values of the terms, where a term e^z
counts 1 + |z| times, since z is rounded before the exponential. 2^-48 in float64.
"""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests import cases, plain_kernels
from tests.tolerances import assert_exact

INF, NAN = math.inf, math.nan
IGNORE = -100
START = 700  # of the shard
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
KINDS = ((3, False), (3, True), (4, False), (6, True))
ORACLE = plain_kernels.make()


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
