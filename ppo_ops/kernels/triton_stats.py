"""Forward kernels: one read of the logits gives the statistics of `ppo_ops.ops.vocab_stats`.

A program takes a fixed number of columns of a row; where a row has several, a second kernel merges them in order.

Note [Two disjoint sets]
    With a kept set and entropy, each column needs its exponential relative to two maxima. Instead kept and dropped
    columns have statistics of their own, each term relative to its own set's maximum, and their union is merged at the
    end: one exponential an element, however far the two maxima lie apart.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ppo_ops.kernels.triton_tile import (
    FLOOR,
    JIT,
    LN_2,
    NEG_INF,
    _exponent_scale,
    _lane_dot,
    _lane_max,
    _lane_sum,
    _load_tile,
    _merge,
    _merge_lanes,
    _rescale,
    _shift,
)


@triton.jit
def _add_tile(x, scale, maximum, sum_exp, shifted, KINDS: tl.constexpr):
    """Take a tile into the lanes' statistics; absent columns are -inf."""
    old_max = maximum
    maximum = tl.maximum(maximum, _lane_max(x))
    shift = _shift(maximum)
    exponent = (x - shift[None, :, None]) * scale
    terms = tl.exp2(exponent)
    sum_exp, shifted = _rescale(sum_exp, shifted, (old_max - shift) * scale)
    sum_exp += _lane_sum(terms)
    if KINDS != 3:
        shifted += _lane_dot(terms, tl.maximum(exponent, FLOOR))
    return maximum, sum_exp, shifted


@triton.jit
def _add_tile_of_two(x, keep, scale, kept_max, kept_sum, kept_shifted, rest_max, rest_sum, rest_shifted):
    """Take a tile into the statistics of the kept columns and of the rest. See Note [Two disjoint sets]."""
    old_kept = kept_max
    old_rest = rest_max
    kept_max = tl.maximum(kept_max, _lane_max(tl.where(keep, x, NEG_INF)))
    rest_max = tl.maximum(rest_max, _lane_max(tl.where(keep, NEG_INF, x)))
    kept_shift = _shift(kept_max)
    rest_shift = _shift(rest_max)
    exponent = (x - tl.where(keep, kept_shift[None, :, None], rest_shift[None, :, None])) * scale
    terms = tl.exp2(exponent)
    exponent = tl.maximum(exponent, FLOOR)
    kept_terms = tl.where(keep, terms, 0.0)
    rest_terms = tl.where(keep, 0.0, terms)
    kept_sum, kept_shifted = _rescale(kept_sum, kept_shifted, (old_kept - kept_shift) * scale)
    rest_sum, rest_shifted = _rescale(rest_sum, rest_shifted, (old_rest - rest_shift) * scale)
    kept_sum += _lane_sum(kept_terms)
    rest_sum += _lane_sum(rest_terms)
    kept_shifted += _lane_dot(kept_terms, exponent)
    rest_shifted += _lane_dot(rest_terms, exponent)
    return kept_max, kept_sum, kept_shifted, rest_max, rest_sum, rest_shifted


@triton.jit
def _store_stats(
    out_ptr,
    stride_out,
    present,
    ignored,
    lp_max,
    lp_sum,
    shifted,
    full_max,
    full_sum,
    KINDS: tl.constexpr,
    FINAL: tl.constexpr,
):
    """Store all rows but the target's logit; final ones in natural units and with the special values."""
    stride_out = stride_out.to(tl.int64)
    if FINAL:
        # The maxima ignored NaN; the sums did not.
        if KINDS != 3:
            shifted *= tl.full((), LN_2, shifted.dtype)
            shifted = tl.where(ignored, 0.0, tl.where(full_sum == full_sum, shifted, float("nan")))
        lp_max = tl.where(ignored, 0.0, tl.where(lp_sum == lp_sum, lp_max, float("nan")))
        lp_sum = tl.where(ignored, 1.0, lp_sum)
        full_max = tl.where(ignored, 0.0, tl.where(full_sum == full_sum, full_max, float("nan")))
        full_sum = tl.where(ignored, 1.0, full_sum)
    tl.store(out_ptr, lp_max, mask=present)
    tl.store(out_ptr + stride_out, lp_sum, mask=present)
    if KINDS != 3:
        tl.store(out_ptr + 3 * stride_out, shifted, mask=present)
    if KINDS == 6:
        tl.store(out_ptr + 4 * stride_out, full_max, mask=present)
        tl.store(out_ptr + 5 * stride_out, full_sum, mask=present)


@triton.jit(**JIT)
def vocab_stats_kernel(
    logits_ptr,
    target_ptr,
    mask_ptr,
    temperature_ptr,
    out_ptr,
    target_logit_ptr,
    stride_row,
    stride_col,
    stride_target,
    stride_mask_row,
    stride_mask_col,
    stride_temperature,
    stride_split,
    stride_out,
    splits,
    columns,
    vocab_start,
    ignore_index,
    KINDS: tl.constexpr,
    UNROLL: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    SPLIT: tl.constexpr,
    FINAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    MASK_ALIGNED: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
):
    """Statistics of one split of one row."""
    ACC: tl.constexpr = out_ptr.dtype.element_ty
    BLOCK: tl.constexpr = UNROLL * LANES * VECTOR
    program = tl.program_id(0)
    split = program % splits
    row = (program // splits).to(tl.int64)

    target = tl.load(target_ptr + row * stride_target).to(tl.int64)
    ignored = target == ignore_index
    local = target - vocab_start
    scale = _exponent_scale(temperature_ptr, row * stride_temperature, ACC)
    # Not a promise: see Note [Scalar loads in the vector layout].
    logits_row = tl.multiple_of(logits_ptr + row * stride_row, 16)
    limit = columns
    if ALIGNED:
        limit = (columns + VECTOR - 1) // VECTOR * VECTOR
    mask_limit = columns
    if MASK_ALIGNED:
        mask_limit = limit
    if mask_ptr is not None:
        mask_row = tl.multiple_of(mask_ptr + row * stride_mask_row, VECTOR)

    # With 6 kinds lp_* are the kept columns and rest_* the others; else lp_* are all columns that count.
    lp_max = tl.full((LANES,), NEG_INF, ACC)
    lp_sum = tl.full((LANES,), 0.0, ACC)
    shifted = lp_sum
    rest_max = lp_max
    rest_sum = lp_sum
    rest_shifted = lp_sum
    start = split * SPLIT
    end = tl.minimum(start + SPLIT, tl.where(ignored, 0, columns))
    whole = start + tl.maximum(end - start, 0) // BLOCK * BLOCK
    for block in range(start, whole, BLOCK):
        x = _load_tile(logits_row, block, stride_col, limit, UNROLL, LANES, VECTOR, False, ALIGNED, CONTIGUOUS).to(ACC)
        if mask_ptr is not None:
            kept = _load_tile(
                mask_row, block, stride_mask_col, mask_limit, UNROLL, LANES, VECTOR, False, MASK_ALIGNED, CONTIGUOUS
            )
            keep = kept != 0
            if KINDS == 3:
                x = tl.where(keep, x, NEG_INF)
        if KINDS == 6:
            lp_max, lp_sum, shifted, rest_max, rest_sum, rest_shifted = _add_tile_of_two(
                x, keep, scale, lp_max, lp_sum, shifted, rest_max, rest_sum, rest_shifted
            )
        else:
            lp_max, lp_sum, shifted = _add_tile(x, scale, lp_max, lp_sum, shifted, KINDS)
    if whole < end:
        place = tl.arange(0, UNROLL)[:, None, None] * LANES + tl.arange(0, LANES)[None, :, None]
        present = place * VECTOR + tl.arange(0, VECTOR)[None, None, :] < end - whole
        x = _load_tile(logits_row, whole, stride_col, limit, UNROLL, LANES, VECTOR, True, ALIGNED, CONTIGUOUS).to(ACC)
        if mask_ptr is not None:
            kept = _load_tile(
                mask_row, whole, stride_mask_col, mask_limit, UNROLL, LANES, VECTOR, True, MASK_ALIGNED, CONTIGUOUS
            )
            keep = kept != 0
            if KINDS == 3:
                present = present & keep
        x = tl.where(present, x, NEG_INF)
        if KINDS == 6:
            lp_max, lp_sum, shifted, rest_max, rest_sum, rest_shifted = _add_tile_of_two(
                x, keep, scale, lp_max, lp_sum, shifted, rest_max, rest_sum, rest_shifted
            )
        else:
            lp_max, lp_sum, shifted = _add_tile(x, scale, lp_max, lp_sum, shifted, KINDS)
    lp_max, lp_sum, shifted = _merge_lanes(lp_max, lp_sum, shifted, scale)
    full_max = lp_max
    full_sum = lp_sum
    if KINDS == 6:
        rest_max, rest_sum, rest_shifted = _merge_lanes(rest_max, rest_sum, rest_shifted, scale)
        full_max, full_sum, shifted = _merge(lp_max, lp_sum, shifted, rest_max, rest_sum, rest_shifted, scale)

    owned = (local >= 0) & (local < columns) & (ignored == 0)
    if CONTIGUOUS:
        target_ptrs = logits_row + local
    else:
        target_ptrs = logits_row + local * stride_col
    if mask_ptr is not None:
        # The target is always kept: where the mask dropped it, the split that has it adds the one term.
        here = owned & (local >= start) & (local < end)
        dropped = here & (tl.load(mask_row + local * stride_mask_col, mask=here, other=1) == 0)
        x = tl.where(dropped, tl.load(target_ptrs, mask=dropped, other=0).to(ACC), NEG_INF)
        one = tl.where(dropped, 1.0, 0.0).to(ACC)
        lp_max, lp_sum, _ = _merge(lp_max, lp_sum, lp_sum, x, one, one, scale)
    if split == 0:
        x = tl.load(target_ptrs, mask=owned, other=0).to(ACC)
        tl.store(target_logit_ptr + row, tl.where(ignored, 0.0, tl.where(owned, x, float("nan"))))
    out_ptr += split.to(tl.int64) * stride_split + row
    _store_stats(out_ptr, stride_out, True, ignored, lp_max, lp_sum, shifted, full_max, full_sum, KINDS, FINAL)


@triton.jit(**JIT)
def merge_splits_kernel(
    part_ptr,
    target_ptr,
    temperature_ptr,
    out_ptr,
    stride_target,
    stride_temperature,
    stride_split,
    stride_part,
    stride_out,
    splits,
    rows,
    ignore_index,
    KINDS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merge the splits of ``ROWS`` rows, first to last."""
    ACC: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = row < rows
    # Rows past the end repeat the last one.
    row = tl.minimum(row, rows - 1)
    ignored = tl.load(target_ptr + row * stride_target).to(tl.int64) == ignore_index
    scale = _exponent_scale(temperature_ptr, row * stride_temperature, ACC)
    stride_part = stride_part.to(tl.int64)
    lp_max = tl.full((ROWS,), NEG_INF, ACC)
    lp_sum = tl.full((ROWS,), 0.0, ACC)
    shifted = lp_sum
    full_max = lp_max
    full_sum = lp_sum
    for split in range(splits):
        ptrs = part_ptr + split * stride_split.to(tl.int64) + row
        part_max = tl.load(ptrs)
        part_sum = tl.load(ptrs + stride_part)
        part_shifted = part_sum
        if KINDS != 3:
            part_shifted = tl.load(ptrs + 3 * stride_part)
        if KINDS == 6:
            lp_max, lp_sum, _ = _merge(lp_max, lp_sum, lp_sum, part_max, part_sum, part_sum, scale)
            part_max = tl.load(ptrs + 4 * stride_part)
            part_sum = tl.load(ptrs + 5 * stride_part)
        full_max, full_sum, shifted = _merge(full_max, full_sum, shifted, part_max, part_sum, part_shifted, scale)
    if KINDS != 6:
        lp_max = full_max
        lp_sum = full_sum
    _store_stats(out_ptr + row, stride_out, present, ignored, lp_max, lp_sum, shifted, full_max, full_sum, KINDS, True)
