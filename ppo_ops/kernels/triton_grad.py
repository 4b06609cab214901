"""Backward kernel: the gradient of `ppo_ops.ops.logits_grad`, elementwise, one read and one write.

Note [One exponential for two softmaxes]
    With a kept set and entropy, a kept column needs q = p_kept and p, a dropped one p alone. They differ by a factor
    that is the same for the whole row: p = q 2^-gap and log2 p = log2 q - gap, with gap >= 0. So a kept column takes
    the exponential of log2 q, a dropped one that of log2 p. Nothing overflows, and what underflows is negligible.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ppo_ops.kernels.triton_tile import FLOOR, JIT, LN_2, LOG2_E, _exponent_scale, _load_part, _over_temperature


@triton.jit
def _log2_p(x, maximum, log_sum, scale):
    """Floored, so that an x of -inf has p = 0 and a finite logarithm, and their product is 0. NaN stays NaN."""
    return tl.maximum(tl.fma(x - maximum, scale, -log_sum), FLOOR, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(**JIT)
def logits_grad_kernel(
    logits_ptr,
    target_ptr,
    mask_ptr,
    temperature_ptr,
    normalizers_ptr,
    grad_log_prob_ptr,
    grad_entropy_ptr,
    grad_logits_ptr,
    stride_row,
    stride_col,
    stride_target,
    stride_mask_row,
    stride_mask_col,
    stride_temperature,
    stride_normalizers,
    stride_grad_log_prob,
    stride_grad_entropy,
    stride_grad_row,
    stride_grad_col,
    spans,
    columns,
    width,
    vocab_start,
    ignore_index,
    KINDS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    VECTOR: tl.constexpr,
    ALIGNED: tl.constexpr,
    MASK_ALIGNED: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
):
    """Gradient of one span of one row, block by block; where aligned, ``width`` is a multiple of a vector.

    ``grad_logits`` may be the logits: a block is read before it is written, and nobody else reads it.
    """
    ACC: tl.constexpr = normalizers_ptr.dtype.element_ty
    program = tl.program_id(0)
    row = (program // spans).to(tl.int64)
    start = program % spans * SPAN

    target = tl.load(target_ptr + row * stride_target).to(tl.int64)
    local = target - vocab_start
    scale = _exponent_scale(temperature_ptr, row * stride_temperature, ACC)
    a = tl.full((), 0.0, ACC)
    b = a
    if grad_log_prob_ptr is not None:
        a = tl.load(grad_log_prob_ptr + row * stride_grad_log_prob).to(ACC)
    if grad_entropy_ptr is not None:
        b = tl.load(grad_entropy_ptr + row * stride_grad_entropy).to(ACC)
    active = (target != ignore_index) & ((a != 0) | (b != 0))

    log2_e = tl.full((), LOG2_E, ACC)
    normalizers_ptr += row
    stride_normalizers = stride_normalizers.to(tl.int64)
    lp_max = tl.load(normalizers_ptr)
    lp_log_sum = tl.load(normalizers_ptr + stride_normalizers) * log2_e
    target_logit = tl.load(normalizers_ptr + 2 * stride_normalizers)
    # Nobody owns the target: the log-prob is NaN, and so is its gradient.
    a = tl.where((a != 0) & (target_logit != target_logit), float("nan"), a)
    # A term without an upstream gradient is 0 even where T or H is not a number.
    a = tl.where(a == 0, 0.0, _over_temperature(a, temperature_ptr, row * stride_temperature))
    b = tl.where(b == 0, 0.0, _over_temperature(b, temperature_ptr, row * stride_temperature))
    if grad_entropy_ptr is not None:
        # b (log p + H) is slope * log2 p + intercept.
        slope = b * tl.full((), LN_2, ACC)
        intercept = tl.where(b == 0, 0.0, b * tl.load(normalizers_ptr + 3 * stride_normalizers))
        if KINDS == 6:
            row_max = tl.load(normalizers_ptr + 4 * stride_normalizers)
            log_sum = tl.load(normalizers_ptr + 5 * stride_normalizers) * log2_e
            # See Note [One exponential for two softmaxes].
            gap = tl.fma(row_max - lp_max, scale, log_sum - lp_log_sum)
            factor = tl.exp2(-gap)
            kept_slope = tl.where(b == 0, 0.0, factor * slope)
            kept_intercept = a + tl.where(b == 0, 0.0, factor * tl.fma(-gap, slope, intercept))

    logits_row = logits_ptr + row * stride_row
    grad_row = grad_logits_ptr + row * stride_grad_row
    # Readable columns, and those to write.
    limit = columns
    end = width
    if ALIGNED:
        logits_row = tl.multiple_of(logits_row, 16)
        grad_row = tl.multiple_of(grad_row, 16)
        limit = (columns + VECTOR - 1) // VECTOR * VECTOR
        end = width // VECTOR * VECTOR
    if mask_ptr is not None:
        mask_row = mask_ptr + row * stride_mask_row
        if MASK_ALIGNED:
            mask_row = tl.multiple_of(mask_row, VECTOR)

    for block in range(start, tl.minimum(start + SPAN, end), BLOCK):
        cols = block + tl.arange(0, BLOCK)
        grad = tl.full((BLOCK,), 0.0, ACC)
        if active:
            x = _load_part(logits_row, cols, stride_col, limit, True, CONTIGUOUS).to(ACC)
            present = cols < columns
            is_target = cols == local
            if mask_ptr is not None and grad_log_prob_ptr is not None:
                keep = is_target | (_load_part(mask_row, cols, stride_mask_col, limit, True, CONTIGUOUS) != 0)
            if grad_entropy_ptr is None:
                grad = tl.exp2(_log2_p(x, lp_max, lp_log_sum, scale)) * -a
                if mask_ptr is not None:
                    present = present & keep
            elif KINDS == 4:
                log_p = _log2_p(x, lp_max, lp_log_sum, scale)
                grad = tl.exp2(log_p) * -tl.fma(log_p, slope, intercept + a)
            elif grad_log_prob_ptr is None:
                log_p = _log2_p(x, row_max, log_sum, scale)
                grad = tl.exp2(log_p) * -tl.fma(log_p, slope, intercept)
            else:
                keep = tl.where(a != 0, keep, False)
                present = present & tl.where(b != 0, True, keep)
                log_p = _log2_p(x, tl.where(keep, lp_max, row_max), tl.where(keep, lp_log_sum, log_sum), scale)
                slopes = tl.where(keep, kept_slope, slope)
                grad = tl.exp2(log_p) * -tl.fma(log_p, slopes, tl.where(keep, kept_intercept, intercept))
            if grad_log_prob_ptr is not None:
                grad += tl.where(is_target, a, 0.0)
            grad = tl.where(present, grad, 0.0)
        grad = grad.to(grad_logits_ptr.dtype.element_ty)
        if CONTIGUOUS:
            tl.store(grad_row + cols, grad, mask=cols < end)
        else:
            tl.store(grad_row + cols.to(tl.int64) * stride_grad_col, grad, mask=cols < end)
