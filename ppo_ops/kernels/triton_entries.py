"""Forward kernel of ragged kept sets: the sums over each row's kept ids, whose logits `kept` has put side by side."""

from __future__ import annotations

import triton
import triton.language as tl

from ppo_ops.kernels.triton_stats import _add_tile
from ppo_ops.kernels.triton_tile import JIT, NEG_INF, _exponent_scale, _load_tile, _merge_lanes


@triton.jit(**JIT)
def entries_kernel(
    entries_ptr,
    offsets_ptr,
    temperature_ptr,
    out_ptr,
    stride_temperature,
    stride_out,
    UNROLL: tl.constexpr,
    LANES: tl.constexpr,
):
    """Maximum and sum of exponentials of one row's entries, which lie side by side at any alignment."""
    ACC: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(offsets_ptr + row)
    count = (tl.load(offsets_ptr + (row + 1)) - first).to(tl.int32)
    scale = _exponent_scale(temperature_ptr, row * stride_temperature, ACC)
    maximum = tl.full((LANES,), NEG_INF, ACC)
    sum_exp = tl.full((LANES,), 0.0, ACC)
    place = tl.arange(0, UNROLL)[:, None, None] * LANES + tl.arange(0, LANES)[None, :, None]
    for block in range(0, count, UNROLL * LANES):
        x = _load_tile(entries_ptr + first, block, 1, count, UNROLL, LANES, 1, True, False, True)
        x = tl.where(place < count - block, x, NEG_INF)
        maximum, sum_exp, _ = _add_tile(x, scale, maximum, sum_exp, sum_exp, 3)
    maximum, sum_exp, _ = _merge_lanes(maximum, sum_exp, sum_exp, scale)
    # The maximum ignored NaN; the sum did not.
    tl.store(out_ptr + row, tl.where(sum_exp == sum_exp, maximum, float("nan")))
    tl.store(out_ptr + stride_out.to(tl.int64) + row, sum_exp)
