"""CPU launchers: flatten any leading shape into matrices of rows, and choose the kernels.

The native kernels (`native.py`) serve float32, bfloat16 and float16 where a compiler was there at install time; the
blocked ATen kernels (`aten.py`) serve everything else, with the same semantics.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

from ppo_ops.kernels import aten


def _kernels(dtype: torch.dtype) -> ModuleType:
    return aten


def _flattens(tensor: Tensor) -> bool:
    """Whether all dimensions but the last are one dimension of rows without a copy."""
    sizes, strides = tensor.shape[:-1], tensor.stride()[:-1]
    expected = None
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if expected is not None and stride != expected:
            return False
        expected = size * stride
    return True


def _matrices(logits: Tensor, keep_mask: Tensor | None, first: int = 0) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """Yield (first row, logits ``[n, V_local]``, keep_mask ``[n, V_local]``) as views that cover all rows in order."""
    if logits.numel() == 0 and 0 in logits.shape[:-1]:
        return
    if _flattens(logits) and (keep_mask is None or _flattens(keep_mask)):
        rows = logits.shape[:-1].numel()
        matrix = logits.as_strided((rows, logits.shape[-1]), (_row_stride(logits), logits.stride(-1)))
        mask = keep_mask
        if mask is not None:
            mask = mask.as_strided(matrix.shape, (_row_stride(mask), mask.stride(-1)))
        yield first, matrix, mask
        return
    rows = logits.shape[1:-1].numel()
    for index in range(logits.shape[0]):
        mask = None if keep_mask is None else keep_mask[index]
        yield from _matrices(logits[index], mask, first + index * rows)


def _row_stride(tensor: Tensor) -> int:
    """Stride between consecutive rows of a tensor that `_flattens`."""
    strides = [s for size, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size != 1]
    return strides[-1] if strides else tensor.shape[-1]


def _rows_of(tensor: Tensor | None, first: int, rows: int) -> Tensor | None:
    return tensor if tensor is None or tensor.shape[0] == 1 else tensor[first : first + rows]


def vocab_stats(
    logits: Tensor,
    target: Tensor,
    keep_mask: Tensor | None,
    temperature: Tensor | None,
    stats: Tensor,
    ignore_index: int,
    vocab_start: int,
    columns: int,
) -> None:
    """Fill ``stats [K, N]`` from ``logits [..., V_local]`` and flat ``target [N]``, ``temperature [1] or [N]``."""
    kernels = _kernels(logits.dtype)
    for first, matrix, mask in _matrices(logits, keep_mask):
        rows = matrix.shape[0]
        kernels.vocab_stats(
            matrix,
            target[first : first + rows],
            mask,
            _rows_of(temperature, first, rows),
            stats[:, first : first + rows],
            ignore_index=ignore_index,
            vocab_start=vocab_start,
            columns=columns,
        )


def logits_grad(
    logits: Tensor,
    target: Tensor,
    keep_mask: Tensor | None,
    temperature: Tensor | None,
    normalizers: Tensor,
    grad_log_prob: Tensor | None,
    grad_entropy: Tensor | None,
    grad_logits: Tensor,
    ignore_index: int,
    vocab_start: int,
    columns: int,
) -> None:
    """Fill ``grad_logits``, contiguous or the logits' own memory, with the gradient of both outputs."""
    kernels = _kernels(logits.dtype)
    for first, matrix, mask in _matrices(logits, keep_mask):
        rows = matrix.shape[0]
        window = slice(first, first + rows)
        out = grad_logits.view(-1, logits.shape[-1])[window] if logits.shape[-1] else matrix
        kernels.logits_grad(
            matrix,
            target[window],
            mask,
            _rows_of(temperature, first, rows),
            normalizers[:, window],
            None if grad_log_prob is None else grad_log_prob[window],
            None if grad_entropy is None else grad_entropy[window],
            out,
            ignore_index=ignore_index,
            vocab_start=vocab_start,
            columns=columns,
        )
