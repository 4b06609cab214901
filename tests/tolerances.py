"""The three tolerance rules of the tests, each with its reason. (A handed case brings its own tolerance, in its file.)

exact     Constructed inputs and things that the contract calls "the same bits": nothing is allowed.
budget    |ours - truth| <= C |plain torch - truth| + FLOOR eps scale, truth in float64. Ours may be at most C times as
          wrong as the plain unfused formula in the same precision. The floor is for elements that the plain formula
          hits by luck: FLOOR roundings (of the shift, the logarithm, the exponential and the result) of the largest
          intermediate value, `scale`.
fp64      float64 against the float64 reference: 1e-12, absolute and relative. Thousands of terms, each rounded to
          1.1e-16, leave four decimal places of reserve, and no float32 step can hide below 1e-12.
"""

from __future__ import annotations

import torch
from torch import Tensor

C = 2.0
FLOOR = 4.0


def assert_like(actual: Tensor, expected: Tensor) -> None:
    """Shape, dtype and device."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.device == expected.device, f"device {actual.device}, expected {expected.device}"


def assert_exact(actual: Tensor, expected: Tensor) -> None:
    """Rule "exact": equal values (0 equals -0), NaN in the same places, same shape and dtype."""
    assert_like(actual, expected)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Rule "exact" where the contract promises bits: the sign of a zero counts too."""
    assert_exact(actual, expected)
    finite = ~expected.isnan()
    assert torch.equal(actual.signbit()[finite], expected.signbit()[finite]), "zeros of different sign"


def assert_budget(ours: Tensor, plain: Tensor, truth: Tensor, scale: Tensor) -> None:
    """Rule "budget", element by element.

    Args:
        ours, plain: results of one dtype.
        truth: the same in float64.
        scale: float64, the largest intermediate value that was rounded in the accumulation dtype; 0 demands exactness.
    """
    assert_like(ours, plain)
    assert truth.dtype == torch.float64
    accumulation = torch.finfo(torch.float32)
    floor = FLOOR * accumulation.eps * scale
    if ours.dtype != torch.float32:  # results in a smaller dtype are rounded once more, to half a unit
        result = torch.finfo(ours.dtype)
        floor = floor + truth.abs() * (result.eps / 2) + result.smallest_normal * result.eps * (scale > 0)
    same = (ours.double() == truth) | (ours.isnan() & truth.isnan())
    error = (ours.double() - truth).abs().masked_fill(same, 0.0)
    allowed = (C * (plain.double() - truth).abs()).nan_to_num(0.0, 0.0) + floor
    ratio = (error / allowed).masked_fill(same, 0.0)
    if not bool((ratio <= 1).all()):
        worst = int(ratio.nan_to_num(torch.inf).flatten().argmax())
        got, right, near = (t.flatten()[worst].item() for t in (ours, truth, plain))
        raise AssertionError(
            f"{int((~(ratio <= 1)).sum())} of {ours.numel()} elements over budget; worst at flat index {worst}: "
            f"got {got}, truth {right}, plain torch {near}, allowed error {allowed.flatten()[worst].item():.3g}"
        )


def assert_fp64(actual: Tensor, expected: Tensor) -> None:
    """Rule "fp64"."""
    assert actual.dtype == expected.dtype == torch.float64
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
