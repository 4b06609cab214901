"""The Triton kernels in Triton's interpreter: logits, targets and temperatures that are not ordinary numbers."""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType

import pytest
import torch

from tests.kernels.triton_stage import (
    INF,
    KINDS,
    NAN,
    START,
    check_grad,
    check_stats,
    make,
    normalizers_of,
)
from tests.kernels.triton_tools import INTERPRETER
from tests.tolerances import assert_exact, assert_same_bits

pytest.importorskip("triton")
pytestmark = INTERPRETER


@pytest.mark.parametrize(("kinds", "masked"), KINDS)
def test_blocks_of_minus_inf_come_first(interpreted: ModuleType, kinds: int, masked: bool) -> None:
    stage = make(2501, kinds, masked)
    stage.logits[0, :600] = -INF  # a block
    stage.logits[1, :1100] = -INF  # a split
    stage.logits[2, 500:] = -INF
    check_grad(interpreted, stage, check_stats(interpreted, stage))


@pytest.mark.parametrize(("kinds", "masked"), KINDS)
def test_nothing_finite(interpreted: ModuleType, kinds: int, masked: bool) -> None:
    stage = make(1500, kinds, masked)
    stage.logits[:5] = -INF
    stats = stage.stats(interpreted)
    assert (stats[0, :5] == -INF).all()
    assert (stats[[1, 3] if kinds > 3 else [1], :5] == 0).all()
    normalizers = normalizers_of(stats)
    one = torch.ones(6)
    grad = stage.grad(interpreted, normalizers, one, one if kinds > 3 else None)
    kept = torch.ones(5, 1500, dtype=torch.bool) if kinds != 3 or not masked else stage.mask[:5, :1500]
    assert grad[:5, :1500][kept].isnan().all()


@pytest.mark.parametrize(("kinds", "masked"), KINDS)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_logit_stays_in_its_row(interpreted: ModuleType, bad: float, kinds: int, masked: bool) -> None:
    """At the start of row 2 and at the end of row 4."""
    stage = make(1500, kinds, masked)
    places, rows, others = ([2, 4], [3, 1499]), [2, 4], [0, 1, 3, 5]
    if masked:
        stage.mask[places] = True
    good = stage.stats(interpreted)
    stage.logits[places] = bad
    stats = stage.stats(interpreted)
    assert stats[1, rows].isnan().all()
    if kinds == 6:
        assert stats[5, rows].isnan().all()
    if math.isnan(bad):
        assert stats[0, rows].isnan().all()
    assert_same_bits(stats[:, others], good[:, others])
    normalizers = normalizers_of(stats)
    a = torch.ones(6)
    a[rows] = 0.0
    grad = stage.grad(interpreted, normalizers, a, a if kinds > 3 else None)
    assert (grad[rows] == 0).all()
    assert not grad.isnan().any()
    a[rows] = 1.0
    assert stage.grad(interpreted, normalizers, a, a if kinds > 3 else None)[rows].isnan().any(1).all()


@pytest.mark.parametrize("bad", [NAN, INF])
def test_bad_logit_that_the_mask_drops(interpreted: ModuleType, bad: float) -> None:
    """Log-prob does not see it; entropy does."""
    stage = make(1000, 3, True)
    stage.mask[2, 17] = False
    good = stage.stats(interpreted)
    stage.logits[2, 17] = bad
    assert_same_bits(stage.stats(interpreted), good)
    stage.kinds = 6
    stats = stage.stats(interpreted)
    torch.testing.assert_close(stats[:3], good, rtol=1e-6, atol=0, equal_nan=True)
    assert stats[5, 2].isnan()
    # Without an upstream gradient of the entropy, its NaN does not show.
    a, b = torch.ones(6), torch.ones(6)
    b[2] = 0
    normalizers = normalizers_of(stats)
    grad = stage.grad(interpreted, normalizers, a, b)
    assert not grad.isnan().any()
    expected = dataclasses.replace(stage, kinds=3).grad(interpreted, normalizers[:3].contiguous(), a, None)
    torch.testing.assert_close(grad[2], expected[2], rtol=1e-6, atol=1e-9)


def test_kept_set_of_minus_inf_and_no_upstream_for_it(interpreted: ModuleType) -> None:
    stage = make(129, 6, True)
    stage.logits[0, :129][stage.mask[0, :129]] = -INF
    stage.logits[0, 0] = -INF
    right = check_stats(interpreted, stage)
    assert right[1, 0] == 0
    a, b = torch.zeros(6), torch.ones(6)
    grad = stage.grad(interpreted, normalizers_of(right).float(), a, b)
    alone = stage.grad(interpreted, normalizers_of(right).float(), None, b)
    assert_exact(grad, alone)
    assert not grad.isnan().any()


@pytest.mark.parametrize(("kinds", "masked"), KINDS)
def test_common_offset_changes_nothing(interpreted: ModuleType, kinds: int, masked: bool) -> None:
    stage = make(1025, kinds, masked)
    stage.logits[:5, :1025] = (stage.logits[:5, :1025]).round() * 8
    straight, plain = stage.logits.clone(), stage.stats(interpreted)
    for offset in (1e6, -1e6, 1e8):
        stage.logits[:5, :1025] = straight[:5, :1025] + offset
        shifted = stage.stats(interpreted)
        for row in {1, 3, 5} & set(range(kinds)):
            assert_same_bits(shifted[row], plain[row])


@pytest.mark.parametrize("gap", [30.0, 90.0, 500.0, 3e4])
@pytest.mark.parametrize("kinds", [3, 6])
def test_dropped_logits_far_above_the_kept_ones(interpreted: ModuleType, gap: float, kinds: int) -> None:
    stage = make(1025, kinds, True)
    stage.mask[:, 40:50] = False
    stage.logits[:5, 40:50] += gap
    stage.mask[1] = False  # nothing but the target is kept
    stage.mask[torch.arange(3), stage.target[:3] - START] = False
    check_grad(interpreted, stage, check_stats(interpreted, stage))


def test_target_of_nobody(interpreted: ModuleType) -> None:
    for kinds, masked in KINDS:
        stage = make(129, kinds, masked)
        stats = stage.stats(interpreted)
        assert stats[2].isnan().tolist() == [False, False, False, True, True, False]
        normalizers = normalizers_of(stats)
        normalizers[2, 3:5] = NAN
        a = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0])
        grad = stage.grad(interpreted, normalizers, a, a if kinds > 3 else None)
        valid = grad[:, :129]
        expected = stage.mask[3, :129] if masked and kinds == 3 else torch.ones(129, dtype=torch.bool)
        if masked and kinds == 6:
            expected = stage.mask[3, :129]
        assert valid[3][expected].isnan().all()
        assert not grad[[0, 1, 2, 4, 5]].isnan().any()
        assert (grad[:, 129:] == 0).all()


@pytest.mark.parametrize("bad", [0.0, -1.0, NAN])
def test_temperature_that_is_not_positive(interpreted: ModuleType, bad: float) -> None:
    stage = make(129, 4, temperature="each")
    stage.temperature[1] = bad
    stats = stage.stats(interpreted)
    assert stats[1].isnan().tolist() == [False, True, False, False, False, False]
    a = torch.ones(6)
    assert stage.grad(interpreted, normalizers_of(stats), a, a)[1, :129].isnan().all()
    a[1] = 0
    assert not stage.grad(interpreted, normalizers_of(stats), a, a).isnan().any()


def test_infinite_temperature(interpreted: ModuleType) -> None:
    stage = make(129, 4, temperature="each")
    stage.temperature[0] = INF
    stage.logits[0, 5] = -INF
    stats = stage.stats(interpreted)
    assert stats[1, 0] == 128
    assert stats[3, 0].abs() < 1e-30
