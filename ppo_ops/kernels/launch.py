"""From tensors of any leading shape to kernels on matrices of rows; the same for every backend."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor


def _flattens(tensor: Tensor) -> bool:
    """Whether all dimensions but the last are one dimension of rows without a copy."""
    expected = None
    for size, stride in zip(reversed(tensor.shape[:-1]), reversed(tensor.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if expected is not None and stride != expected:
            return False
        expected = size * stride
    return True


def as_matrix(tensor: Tensor) -> Tensor:
    """``[N, V_local]`` view of a tensor that `_flattens`."""
    if tensor.dim() == 2:
        return tensor
    strides = [s for size, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size != 1]
    width = tensor.shape[-1]
    return tensor.as_strided((tensor.shape[:-1].numel(), width), (strides[-1] if strides else width, tensor.stride(-1)))


def matrices(logits: Tensor, keep_mask: Tensor | None, first: int = 0) -> list[tuple[slice, Tensor, Tensor | None]]:
    """(Rows, their logits ``[n, V_local]``, their keep_mask ``[n, V_local]``) as views that cover all rows in order."""
    if logits.dim() == 2 or (_flattens(logits) and (keep_mask is None or _flattens(keep_mask))):
        matrix = as_matrix(logits)
        mask = None if keep_mask is None else as_matrix(keep_mask)
        return [(slice(first, first + len(matrix)), matrix, mask)] if len(matrix) else []
    found = []
    for index in range(logits.shape[0]):
        mask = None if keep_mask is None else keep_mask[index]
        found += matrices(logits[index], mask, first + index * logits.shape[1:-1].numel())
    return found


def rows_of(tensor: Tensor | None, rows: slice) -> Tensor | None:
    return tensor if tensor is None or tensor.shape[0] == 1 else tensor[rows]


def vocab_stats(
    kernels: ModuleType,
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
    where = {"ignore_index": ignore_index, "vocab_start": vocab_start, "columns": columns}
    if logits.dim() == 2:
        if logits.shape[0]:
            kernels.vocab_stats(logits, target, keep_mask, temperature, stats, **where)
        return
    views = matrices(logits, keep_mask)
    if len(views) == 1:
        kernels.vocab_stats(views[0][1], target, views[0][2], temperature, stats, **where)
        return
    for rows, matrix, mask in views:
        kernels.vocab_stats(matrix, target[rows], mask, rows_of(temperature, rows), stats[:, rows], **where)


def logits_grad(
    kernels: ModuleType,
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
    gradients = as_matrix(grad_logits)
    for rows, matrix, mask in matrices(logits, keep_mask):
        kernels.logits_grad(
            matrix,
            target[rows],
            mask,
            rows_of(temperature, rows),
            normalizers[:, rows],
            None if grad_log_prob is None else grad_log_prob[rows],
            None if grad_entropy is None else grad_entropy[rows],
            gradients[rows],
            ignore_index=ignore_index,
            vocab_start=vocab_start,
            columns=columns,
        )
