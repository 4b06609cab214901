"""Triton launchers for CUDA: `vocab_stats` reads the logits once, `logits_grad` reads them once and writes once.

No atomics and no host synchronisation. ``ignore_index``, ``vocab_start`` and sizes are plain integer arguments, so that
their values compile nothing anew; the forward's split depends on the vocabulary alone. See the notes in `triton_tile`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ppo_ops.kernels.triton_entries import entries_kernel
from ppo_ops.kernels.triton_grad import logits_grad_kernel
from ppo_ops.kernels.triton_stats import merge_splits_kernel, vocab_stats_kernel


class Tile(NamedTuple):
    """Elements that fill a 128-bit load, and how many such loads a thread has in flight."""

    vector: int
    forward: int
    forward_masked: int
    backward: int
    backward_masked: int


# The place to tune; powers of two. LANES threads a program, one lane each. More loads in flight cost registers, and
# fewer programs fit on an SM: 132 SMs need 25 KiB in flight each to keep 4.8 TB/s busy over 0.7 us of latency.
LANES = 128
TILES = {
    torch.bfloat16: Tile(8, 4, 2, 2, 2),
    torch.float16: Tile(8, 4, 2, 2, 2),
    torch.float32: Tile(4, 4, 4, 4, 4),
    torch.float64: Tile(2, 4, 2, 4, 4),
}
# Columns that a forward program reads, a multiple of every tile. Long, so that the meeting of lanes is a small part of
# the work; short, so that 8192 rows of 151,936 make 40,960 programs, 45 rounds on 132 SMs that hold 7 each. Reasoned
# from what the kernels compile to, like the tiles; not yet timed on a device.
SPLIT_COLUMNS = 32768
# Columns that a backward program takes: what it reads of its row, 10 numbers, is nothing to them.
SPAN_COLUMNS = 8192
MERGE_ROWS = 128
# Kept ids that a program takes at a time, one program a row; top-p leaves tens to hundreds.
ENTRIES = 512


def _vectors(tensors: list[Tensor], vector: int) -> bool:
    """Whether every row of the tensors starts at a multiple of ``vector`` elements, and its elements are neighbours."""
    return all(
        t.stride(1) == 1
        and t.data_ptr() % (vector * t.element_size()) == 0
        and (t.stride(0) % vector == 0 or t.shape[0] == 1)
        for t in tensors
    )


def _stride(per_row: Tensor | None) -> int:
    """Stride of ``[N]`` or ``[1]``: one number serves all rows."""
    return 0 if per_row is None or per_row.shape[0] == 1 else per_row.stride(0)


def _strides(matrix: Tensor | None) -> tuple[int, int]:
    return (0, 1) if matrix is None else (matrix.stride(0), matrix.stride(1))


def vocab_stats(
    logits: Tensor,
    target: Tensor,
    keep_mask: Tensor | None,
    temperature: Tensor | None,
    stats: Tensor,
    *,
    ignore_index: int,
    vocab_start: int,
    columns: int,
) -> None:
    """Fill ``stats [K, N]`` (see `ppo_ops.ops.vocab_stats`) from ``logits [N, V_local]``."""
    rows, kinds = target.shape[0], stats.shape[0]
    if rows == 0:
        return
    tile = TILES[logits.dtype]
    splits = max(1, -(-columns // SPLIT_COLUMNS))
    out = stats if splits == 1 else stats.new_empty((splits, kinds, rows))
    mask = None if keep_mask is None else keep_mask.view(torch.uint8)
    # Vectors that cover the valid columns must not reach beyond the row.
    aligned = -(-columns // tile.vector) * tile.vector <= logits.shape[1] and _vectors([logits], tile.vector)
    strides, mask_strides = _strides(logits), _strides(mask)
    with torch.cuda.device_of(logits):
        vocab_stats_kernel[(rows * splits,)](
            logits,
            target,
            mask,
            temperature,
            out,
            stats[2],
            *strides,
            _stride(target),
            *mask_strides,
            _stride(temperature),
            out.stride(0),
            out.stride(-2),
            splits,
            columns,
            vocab_start,
            ignore_index,
            KINDS=kinds,
            UNROLL=tile.forward if mask is None else tile.forward_masked,
            LANES=LANES,
            VECTOR=tile.vector,
            SPLIT=SPLIT_COLUMNS,
            FINAL=splits == 1,
            ALIGNED=aligned,
            MASK_ALIGNED=aligned and mask is not None and _vectors([mask], tile.vector),
            CONTIGUOUS=strides[1] == mask_strides[1] == 1,
            num_warps=LANES // 32,
            enable_fp_fusion=False,
        )
        if splits > 1:
            merge_splits_kernel[(-(-rows // MERGE_ROWS),)](
                out,
                target,
                temperature,
                stats,
                _stride(target),
                _stride(temperature),
                out.stride(0),
                out.stride(1),
                stats.stride(0),
                splits,
                rows,
                ignore_index,
                KINDS=kinds,
                ROWS=MERGE_ROWS,
                num_warps=MERGE_ROWS // 32,
                enable_fp_fusion=False,
            )


def softmax_of_entries(x: Tensor, offsets: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of the entries ``x [offsets[i] : offsets[i + 1]]`` of each row: maximum, and sum of ``e^((x - maximum) / T)``.

    As `kept.softmax_of_entries`, in an order that does not depend on where a row's entries lie.
    """
    rows = offsets.shape[0] - 1
    out = x.new_empty((2, rows))
    if rows:
        with torch.cuda.device_of(x):
            entries_kernel[(rows,)](
                x,
                offsets,
                temperature,
                out,
                _stride(temperature),
                out.stride(0),
                UNROLL=ENTRIES // LANES,
                LANES=LANES,
                num_warps=LANES // 32,
                enable_fp_fusion=False,
            )
    return out[0], out[1]


def logits_grad(
    logits: Tensor,
    target: Tensor,
    keep_mask: Tensor | None,
    temperature: Tensor | None,
    normalizers: Tensor,
    grad_log_prob: Tensor | None,
    grad_entropy: Tensor | None,
    grad_logits: Tensor,
    *,
    ignore_index: int,
    vocab_start: int,
    columns: int,
    vocab_size: int | None = None,
) -> None:
    """Fill ``grad_logits [N, V_local]`` (see `ppo_ops.ops.logits_grad`); it may be the logits' own memory.

    A target outside the vocabulary shows in its normalizers, so ``vocab_size`` is not needed here.
    """
    rows, width = logits.shape
    if rows == 0 or width == 0:
        return
    tile = TILES[logits.dtype]
    spans = -(-width // SPAN_COLUMNS)
    mask = None if keep_mask is None else keep_mask.view(torch.uint8)
    aligned = width % tile.vector == 0 and _vectors([logits, grad_logits], tile.vector)
    strides, mask_strides, grad_strides = _strides(logits), _strides(mask), _strides(grad_logits)
    with torch.cuda.device_of(logits):
        logits_grad_kernel[(rows * spans,)](
            logits,
            target,
            mask,
            temperature,
            normalizers,
            grad_log_prob,
            grad_entropy,
            grad_logits,
            *strides,
            _stride(target),
            *mask_strides,
            _stride(temperature),
            normalizers.stride(0),
            _stride(grad_log_prob),
            _stride(grad_entropy),
            *grad_strides,
            spans,
            columns,
            width,
            vocab_start,
            ignore_index,
            KINDS=normalizers.shape[0],
            BLOCK=LANES * tile.vector * (tile.backward if mask is None else tile.backward_masked),
            SPAN=SPAN_COLUMNS,
            VECTOR=tile.vector,
            ALIGNED=aligned,
            MASK_ALIGNED=aligned and mask is not None and _vectors([mask], tile.vector),
            CONTIGUOUS=strides[1] == mask_strides[1] == grad_strides[1] == 1,
            num_warps=LANES // 32,
            enable_fp_fusion=False,
        )
