"""CPU launchers: which kernels serve which dtype.

The native kernels (`native.py`) serve float32, bfloat16 and float16 where a compiler was there at install time; the
blocked ATen kernels (`aten.py`) serve everything else, with the same semantics.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ppo_ops.kernels import aten, kept, launch, native

# Entries of ragged kept sets that the ATen kernels lay out at a time: each takes some 100 bytes.
ENTRIES = 1 << 17

_warned = False


def _kernels(dtype: torch.dtype) -> ModuleType:
    if native.supports(dtype):
        return native
    if not native.available() and os.environ.get("PPO_OPS_NATIVE") != "0":
        _warn_once()
    return aten


def _warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"ppo_ops uses its ATen kernels on the CPU, which are several times slower than the native ones: "
            f"{native.why_unavailable()}",
            stacklevel=2,
        )


def first_bad_target(target: Tensor, ignore_index: int, end: int | None) -> int:
    """First row of ``target [N]`` int64 that is neither ignored nor in ``[0, end)``; -1 where there is none."""
    if native.available():
        return native.first_bad_target(target, ignore_index, end)
    bad = (target < 0) if end is None else (target < 0) | (target >= end)
    bad &= target != ignore_index
    return int(bad.nonzero()[0]) if bad.any() else -1


def right_sets(keep_ids: Tensor, keep_offsets: Tensor, end: int | None) -> bool:
    """Whether a kept set is right (see `native.right_sets`); False where only a closer look can tell."""
    return native.available() and native.right_sets(keep_ids, keep_offsets, end)


def vocab_stats(logits: Tensor, *args: Any) -> None:
    """See `launch.vocab_stats`."""
    launch.vocab_stats(_kernels(logits.dtype), logits, *args)


def logits_grad(logits: Tensor, *args: Any) -> None:
    """See `launch.logits_grad`."""
    launch.logits_grad(_kernels(logits.dtype), logits, *args)


def _native_serves(logits: Tensor) -> bool:
    """Whether the native kernels take these logits with a ragged kept set: they want adjacent columns."""
    return _kernels(logits.dtype) is native and logits.stride(-1) == 1


def finishes(logits: Tensor, keep_offsets: Tensor | None) -> bool:
    """Whether `finished` takes these logits."""
    return _kernels(logits.dtype) is native if keep_offsets is None else _native_serves(logits)


def finished(
    logits: Tensor,
    target: Tensor,
    keep_mask: Tensor | None,
    keep_ids: Tensor | None,
    keep_offsets: Tensor | None,
    temperature: Tensor | None,
    stats: Tensor,
    outputs: native.Outputs,
    **where: int,
) -> int:
    """Fill the outputs of one rank, and ``stats [K, N]`` with its normalizers; the first bad target's row, or -1."""
    if logits.dim() == 2 and keep_offsets is None and logits.shape[0]:
        return native.vocab_stats(logits, target, keep_mask, temperature, stats, **where, outputs=outputs)
    for rows, matrix, mask in launch.matrices(logits, keep_mask):
        numbers = (launch.rows_of(temperature, rows), stats[:, rows])
        part = outputs.of(rows)
        if keep_ids is None or keep_offsets is None:
            bad = native.vocab_stats(matrix, target[rows], mask, *numbers, **where, outputs=part)
        else:
            sets = (keep_ids, keep_offsets[rows.start : rows.stop + 1])
            bad = native.kept_vocab_stats(matrix, target[rows], *sets, *numbers, **where, outputs=part)
        if bad >= 0:
            return rows.start + bad
    return -1


def _blocks(logits: Tensor, keep_offsets: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(Rows, their logits ``[n, V_local]``): all rows in order, at most `ENTRIES` kept ids or one row at a time."""
    for rows, matrix, _ in launch.matrices(logits, None):
        # A row has its kept ids and its target.
        entries = keep_offsets[rows.start : rows.stop + 1] + torch.arange(len(matrix) + 1, device="cpu")
        first = 0
        while first < len(matrix):
            stop = int(torch.searchsorted(entries, entries[first] + ENTRIES, right=True)) - 1
            stop = min(max(stop, first + 1), len(matrix))
            yield slice(rows.start + first, rows.start + stop), matrix[first:stop]
            first = stop


def kept_vocab_stats(
    logits: Tensor,
    target: Tensor,
    keep_ids: Tensor,
    keep_offsets: Tensor,
    temperature: Tensor | None,
    stats: Tensor,
    vocab_end: int | None,
    ignore_index: int,
    vocab_start: int,
    columns: int,
) -> None:
    """Statistics with a ragged kept set; see `kept.vocab_stats`."""
    where = {"ignore_index": ignore_index, "vocab_start": vocab_start, "columns": columns}
    if not _native_serves(logits):
        for rows, matrix in _blocks(logits, keep_offsets):
            sets = kept.sets_of(rows, keep_ids, keep_offsets)
            numbers = (launch.rows_of(temperature, rows), stats[:, rows])
            kept.vocab_stats(vocab_stats, matrix, target[rows], *sets, *numbers, vocab_end, *where.values())
        return
    for rows, matrix, _ in launch.matrices(logits, None):
        sets = (keep_ids, keep_offsets[rows.start : rows.stop + 1])
        row_temperature = launch.rows_of(temperature, rows)
        native.kept_vocab_stats(matrix, target[rows], *sets, row_temperature, stats[:, rows], **where)


def kept_logits_grad(
    logits: Tensor,
    target: Tensor,
    keep_ids: Tensor,
    keep_offsets: Tensor,
    temperature: Tensor | None,
    normalizers: Tensor,
    grad_log_prob: Tensor | None,
    grad_entropy: Tensor | None,
    grad_logits: Tensor,
    ignore_index: int,
    vocab_start: int,
    columns: int,
) -> None:
    """Gradient with a ragged kept set; see `kept.logits_grad`."""
    where = {"ignore_index": ignore_index, "vocab_start": vocab_start, "columns": columns}
    upstream = (grad_log_prob, grad_entropy)
    gradients = launch.as_matrix(grad_logits)
    if not _native_serves(logits):
        for rows, matrix in _blocks(logits, keep_offsets):
            sets = kept.sets_of(rows, keep_ids, keep_offsets)
            row_upstream = [None if grad is None else grad[rows] for grad in upstream]
            numbers = (launch.rows_of(temperature, rows), normalizers[:, rows], *row_upstream)
            kept.logits_grad(logits_grad, matrix, target[rows], *sets, *numbers, gradients[rows], *where.values())
        return
    for rows, matrix, _ in launch.matrices(logits, None):
        sets = (keep_ids, keep_offsets[rows.start : rows.stop + 1])
        numbers = (launch.rows_of(temperature, rows), normalizers[:, rows])
        row_upstream = [None if grad is None else grad[rows] for grad in upstream]
        native.kept_logits_grad(matrix, target[rows], *sets, *numbers, *row_upstream, gradients[rows], **where)
