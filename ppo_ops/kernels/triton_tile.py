"""What the Triton kernels are made of: tiles of a row, their sums, and the algebra of online softmax statistics.

Note [Fixed tree]
    A row's bits must not depend on its alignment, and the order in which `tl.reduce` adds depends on the layout that
    the compiler picks. So a tile is folded neighbour by neighbour (`_fold`), its layout is the same whatever the
    alignment (next note), and the launchers forbid the compiler to fuse multiplications with additions: where a fused
    one is wanted, `tl.fma` says so.

Note [Scalar loads in the vector layout]
    The compiler lays a tile out by what it knows of the addresses. Rows that are not aligned, or whose columns have a
    stride, are declared as if they were: the layout is that of vector loads, so no lane is spread over threads. They
    are loaded element by element all the same, because their mask ``column < limit`` has a limit of unknown
    divisibility; a test looks for vector instructions in what the compiler makes of it. An aligned limit is a
    multiple of a vector.

Note [Thread-local softmax]
    A block of a row is a tile ``[UNROLL, LANES, VECTOR]``: ``VECTOR`` neighbours fill one 128-bit load, ``LANES`` is
    the number of threads, ``UNROLL`` loads a thread are in flight together. Every lane has a maximum and sums of its
    own, so the loop needs neither shuffle nor barrier, and rescales once for ``UNROLL * VECTOR`` elements. Lanes meet
    at the end. A tile is loaded as the matrix ``[UNROLL, LANES * VECTOR]``: of a tile's own dimensions, Triton 3.6
    takes ``UNROLL`` to spread a warp over, and then moves lanes through shared memory in the loop.

Note [Units]
    ``scale = log2(e) / T``: exponents are ``(x - max) * scale``, base 2; the shift comes first, so that a common
    offset of 1e8 cancels. Shifted sums and log-probabilities are in units of ln 2 until the end.

Kernels call builtins of `triton.language` alone, none of its jitted functions (`tl.sum`, `tl.max`, `tl.zeros`): so
they can be loaded for the interpreter in a process that compiles too.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))
# 2^-1e4 is 0 in float64 too; the finite floor keeps 0 * -inf from becoming NaN.
FLOOR = tl.constexpr(-1.0e4)

# Options of `triton.jit`. An integer compiles nothing anew, be it 1 or a multiple of 16; of the alignment of pointers a
# kernel knows what its launcher says, no more.
JIT = {
    "do_not_specialize": [
        "stride_row",
        "stride_col",
        "stride_target",
        "stride_mask_row",
        "stride_mask_col",
        "stride_temperature",
        "stride_normalizers",
        "stride_grad_log_prob",
        "stride_grad_entropy",
        "stride_grad_row",
        "stride_grad_col",
        "stride_split",
        "stride_part",
        "stride_out",
        "splits",
        "spans",
        "rows",
        "columns",
        "width",
        "vocab_start",
        "ignore_index",
    ],
    "do_not_specialize_on_alignment": [
        "logits_ptr",
        "target_ptr",
        "mask_ptr",
        "temperature_ptr",
        "part_ptr",
        "out_ptr",
        "target_logit_ptr",
        "normalizers_ptr",
        "grad_log_prob_ptr",
        "grad_entropy_ptr",
        "grad_logits_ptr",
        "entries_ptr",
        "offsets_ptr",
    ],
}


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _fold(x, SIZE: tl.constexpr, LARGEST: tl.constexpr):
    """Combine neighbours of ``x [n]`` until ``SIZE`` sums (or maxima, which ignore NaN) are left."""
    for _ in tl.static_range(16):
        if x.shape[0] > SIZE:
            a, b = tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))
            if LARGEST:
                x = tl.maximum(a, b)
            else:
                x = a + b
    return x


@triton.jit
def _flat(tile):
    """``[UNROLL, LANES, VECTOR]`` as ``[LANES * UNROLL * VECTOR]``: a lane's elements side by side."""
    size: tl.constexpr = tile.shape[0] * tile.shape[1] * tile.shape[2]
    return tl.reshape(tl.permute(tile, (1, 0, 2)), (size,))


@triton.jit
def _lane_max(tile):
    return _fold(_flat(tile), tile.shape[1], True)


@triton.jit
def _lane_sum(tile):
    return _fold(_flat(tile), tile.shape[1], False)


@triton.jit
def _lane_dot(p, q):
    """``sum p * q`` a lane."""
    size: tl.constexpr = p.shape[0] * p.shape[1] * p.shape[2] // 2
    p_even, p_odd = tl.split(tl.reshape(_flat(p), (size, 2)))
    q_even, q_odd = tl.split(tl.reshape(_flat(q), (size, 2)))
    return _fold(tl.fma(p_even, q_even, p_odd * q_odd), p.shape[1], False)


@triton.jit
def _shift(maximum):
    """The maximum as something to subtract: of nothing but -inf, 0 is as good, and -inf - -inf would be NaN."""
    return tl.where(maximum == NEG_INF, 0.0, maximum)


@triton.jit
def _rescale(sum_exp, shifted, distance):
    """Move sums to another maximum; ``distance`` is the exponent of the old one."""
    factor = tl.exp2(distance)
    return sum_exp * factor, tl.fma(tl.maximum(distance, FLOOR), sum_exp, shifted) * factor


@triton.jit
def _merge(max_a, sum_a, shifted_a, max_b, sum_b, shifted_b, scale):
    """Statistics of the union of two disjoint sets of columns."""
    maximum = tl.maximum(max_a, max_b)
    shift = _shift(maximum)
    sum_a, shifted_a = _rescale(sum_a, shifted_a, (max_a - shift) * scale)
    sum_b, shifted_b = _rescale(sum_b, shifted_b, (max_b - shift) * scale)
    return maximum, sum_a + sum_b, shifted_a + shifted_b


@triton.jit
def _merge_lanes(maximum, sum_exp, shifted, scale):
    """Statistics of all lanes as scalars."""
    row_max = tl.reduce(maximum, 0, _larger)
    sum_exp, shifted = _rescale(sum_exp, shifted, (maximum - _shift(row_max)) * scale)
    sum_exp, shifted = tl.reduce((sum_exp, shifted), 0, _add_pairs)
    return row_max, sum_exp, shifted


@triton.jit
def _over_temperature(numerator, temperature_ptr, offset):
    """``numerator / T``, correctly rounded; NaN unless T > 0."""
    if temperature_ptr is None:
        return numerator
    else:
        temperature = tl.load(temperature_ptr + offset).to(numerator.dtype)
        if numerator.dtype == tl.float32:
            quotient = tl.div_rn(numerator, temperature)
        else:
            quotient = numerator / temperature
        return tl.where(temperature > 0, quotient, float("nan"))


@triton.jit
def _exponent_scale(temperature_ptr, offset, ACC: tl.constexpr):
    """``log2(e) / T``, NaN unless T > 0. Not quite 0 for an infinite T: a term of -inf must stay -inf."""
    log2_e = tl.full((), LOG2_E, ACC)
    if temperature_ptr is None:
        return log2_e
    else:
        scale = _over_temperature(log2_e, temperature_ptr, offset)
        return tl.where(scale == 0, 1.0e-37, scale)


@triton.jit
def _load_part(row_ptr, cols, stride_col, limit, TAIL: tl.constexpr, CONTIGUOUS: tl.constexpr):
    """Elements of a row; in a tail those from ``limit`` on are not read and come as 0."""
    if CONTIGUOUS:
        pointers = row_ptr + cols
    else:
        pointers = row_ptr + cols.to(tl.int64) * stride_col
    if TAIL:
        return tl.load(pointers, mask=cols < limit, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def _load_tile(
    row_ptr,
    start,
    stride_col,
    limit,
    UNROLL: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    TAIL: tl.constexpr,
    ALIGNED: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
):
    """The tile of a row from column ``start`` on. See Note [Scalar loads in the vector layout]."""
    offsets = start + tl.arange(0, UNROLL)[:, None] * (LANES * VECTOR) + tl.arange(0, LANES * VECTOR)[None, :]
    present = offsets < limit
    if not CONTIGUOUS:
        offsets = offsets.to(tl.int64) * stride_col
        offsets = tl.max_contiguous(tl.multiple_of(offsets, (1, VECTOR)), (1, VECTOR))
    pointers = row_ptr + offsets
    if TAIL or not ALIGNED:
        tile = tl.load(pointers, mask=present, other=0)
    else:
        tile = tl.load(pointers)
    return tl.reshape(tile, (UNROLL, LANES, VECTOR))
