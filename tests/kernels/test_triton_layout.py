"""The Triton kernels in Triton's interpreter: shapes, strides and dtypes of their arguments change no bit."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.triton_stage import (
    DTYPES,
    IGNORE,
    INF,
    KINDS,
    NAN,
    START,
    make,
    normalizers_of,
)
from tests.kernels.triton_tools import INTERPRETER
from tests.tolerances import assert_same_bits

pytest.importorskip("triton")
pytestmark = INTERPRETER


def test_empty(interpreted: ModuleType) -> None:
    for kinds, masked in KINDS:
        stage = make(129, kinds, masked)
        assert stage.rows(slice(0, 0)).stats(interpreted).shape == (kinds, 0)
        for width in (0, 4):
            mask = None if stage.mask is None else stage.mask[:, :width]
            shard = dataclasses.replace(stage, logits=stage.logits[:, :width], mask=mask, columns=0)
            stats = shard.stats(interpreted)
            assert (stats[0, :5] == -INF).all()
            assert (stats[1, :5] == 0).all()
            assert stats[2, :5].isnan().all()
            assert stats[:3, 5].tolist() == [0, 1, 0]
            a = torch.ones(6)
            grad = shard.grad(interpreted, normalizers_of(stage.stats(interpreted)), a, a if kinds > 3 else None)
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
def test_layouts_have_the_same_bits(interpreted: ModuleType, layout: Any, mask_layout: Any, width: int) -> None:
    stage = make(129, 6, True, torch.bfloat16)
    if width == 136:  # whole vectors, so that an aligned row is read by them
        logits = torch.nn.functional.pad(stage.logits, (0, 4), value=NAN)
        stage = dataclasses.replace(stage, logits=logits, mask=torch.nn.functional.pad(stage.mask, (0, 4)))
    other = dataclasses.replace(stage, logits=layout(stage.logits), mask=mask_layout(stage.mask))
    stats = stage.stats(interpreted)
    assert_same_bits(other.stats(interpreted), stats)
    a = torch.ones(6)
    normalizers = normalizers_of(stats)
    grad = stage.grad(interpreted, normalizers, a, a)
    assert_same_bits(other.grad(interpreted, normalizers, a, a), grad)
    other.logits.copy_(stage.logits)
    interpreted.logits_grad(*other.inputs(), normalizers, a, a, other.logits, **other.where())
    assert_same_bits(other.logits, grad)


def test_expanded_rows_and_masks(interpreted: ModuleType) -> None:
    stage = make(129, 6, True)
    stage = dataclasses.replace(stage, logits=stage.logits[:1].expand(6, -1), mask=stage.mask[:1].expand(6, -1))
    copy = dataclasses.replace(stage, logits=stage.logits.contiguous(), mask=stage.mask.contiguous())
    stats = stage.stats(interpreted)
    assert_same_bits(stats, copy.stats(interpreted))
    columns = dataclasses.replace(copy, mask=copy.mask[:, :1].expand(-1, copy.logits.shape[1]))
    copy = dataclasses.replace(columns, mask=columns.mask.contiguous())
    assert_same_bits(columns.stats(interpreted), copy.stats(interpreted))


@pytest.mark.parametrize(("kinds", "masked"), KINDS)
def test_a_row_alone_has_the_same_bits(interpreted: ModuleType, kinds: int, masked: bool) -> None:
    stage = make(2501, kinds, masked, temperature="each")
    together = stage.stats(interpreted)
    normalizers = normalizers_of(together)
    a = torch.linspace(-1, 2, 6)
    b = a.flip(0) if kinds > 3 else None
    grad = stage.grad(interpreted, normalizers, a, b)
    for i in range(6):
        row = slice(i, i + 1)
        alone = stage.rows(row)
        assert_same_bits(alone.stats(interpreted), together[:, row])
        assert_same_bits(alone.grad(interpreted, normalizers[:, row], a[row], None if b is None else b[row]), grad[row])


@pytest.mark.parametrize(("kinds", "masked"), KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place(interpreted: ModuleType, dtype: torch.dtype, kinds: int, masked: bool) -> None:
    stage = make(2504, kinds, masked, dtype)
    normalizers = normalizers_of(stage.stats(interpreted))
    a = torch.ones(6, dtype=stage.accumulation)
    b = a if kinds > 3 else None
    grad = stage.grad(interpreted, normalizers, a, b)
    interpreted.logits_grad(*stage.inputs(), normalizers, a, b, stage.logits, **stage.where())
    assert_same_bits(stage.logits, grad)
    assert not grad.isnan().any()


def test_strides_of_small_tensors(interpreted: ModuleType) -> None:
    """Upstream gradients expanded or strided, targets off alignment, rows of `stats` apart."""
    stage = make(129, 6, True, temperature="each")
    stats = stage.stats(interpreted)
    apart = torch.full((12, 9), NAN)
    interpreted.vocab_stats(*stage.inputs(), apart[::2, 2:8], **stage.where())
    assert_same_bits(apart[::2, 2:8], stats)
    assert apart[1::2].isnan().all()
    normalizers = normalizers_of(stats)
    apart[::2, 2:8] = normalizers
    one = torch.ones(6)
    grad = stage.grad(interpreted, normalizers, 2 * one, 3 * one)
    assert_same_bits(
        stage.grad(interpreted, apart[::2, 2:8], torch.tensor(2.0).expand(6), torch.full((12,), 3.0)[::2]), grad
    )
    strided = dataclasses.replace(
        stage,
        target=stage.target.repeat_interleave(3)[1::3],
        temperature=stage.temperature.repeat_interleave(2)[1::2],
    )
    assert_same_bits(strided.stats(interpreted), stats)
    assert_same_bits(strided.grad(interpreted, normalizers, 2 * one, 3 * one), grad)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_target_dtypes(interpreted: ModuleType, dtype: torch.dtype) -> None:
    stage = make(50, 4)
    local = stage.target - START
    local[5] = 200 if dtype == torch.uint8 else IGNORE
    local[3] = 100
    wide = dataclasses.replace(stage, target=local, start=0)
    expected = wide.stats(interpreted)
    narrow = dataclasses.replace(wide, target=torch.cat((local[:1], local)).to(dtype)[1:])
    assert_same_bits(narrow.stats(interpreted)[:, :5], expected[:, :5])
    if dtype != torch.uint8:
        assert_same_bits(narrow.stats(interpreted), expected)


def test_row_without_upstream_gradient_is_not_read(interpreted: ModuleType) -> None:
    stage = make(129, 4)
    normalizers = normalizers_of(stage.stats(interpreted))
    normalizers[:, 1] = NAN
    stage.logits[1] = NAN
    a = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    grad = stage.grad(interpreted, normalizers, a, a)
    assert (grad[[1, 5]] == 0).all()
    assert not grad.isnan().any()
