"""Launcher of the native CPU kernels (`native.c`): float32, bfloat16, float16, one pass over the logits.

The library is compiled when the package is installed and loaded with ctypes; it knows neither torch nor Python. Where
it is missing, `available` is False, `why_unavailable` says why, and the ATen kernels serve instead. Two environment
variables, read at import: ``PPO_OPS_NATIVE=0`` turns it off, ``PPO_OPS_NATIVE_ISA=avx512|avx2|baseline`` chooses the
instruction set instead of the best one.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

LIBRARY = Path(__file__).with_name("_native.so")
# Bytes of logits copied at a time where columns are not adjacent in memory.
COPY_BYTES = 4 << 20

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CALL = struct.Struct("32q")  # the fields of `Call` in native.c, in order


def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library and the name of its instruction set, or None and the reason."""
    if os.environ.get("PPO_OPS_NATIVE") == "0":
        return None, "turned off by PPO_OPS_NATIVE=0"
    if not LIBRARY.exists():
        return None, f"{LIBRARY} does not exist: no C compiler worked when ppo_ops was installed"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        library.ppo_vocab_stats.argtypes, library.ppo_vocab_stats.restype = [ctypes.c_char_p], ctypes.c_int64
        library.ppo_logits_grad.argtypes, library.ppo_logits_grad.restype = [ctypes.c_char_p], None
        library.ppo_first_bad_target.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 4]
        library.ppo_first_bad_target.restype = ctypes.c_int64
        library.ppo_right_sets.argtypes = [
            ctypes.c_void_p,
            *[ctypes.c_int64] * 2,
            ctypes.c_void_p,
            *[ctypes.c_int64] * 2,
        ]
        library.ppo_right_sets.restype = ctypes.c_int64
        library.ppo_set_parallel.argtypes, library.ppo_set_parallel.restype = [ctypes.c_void_p], None
        library.ppo_choose.argtypes, library.ppo_choose.restype = [ctypes.c_char_p], ctypes.c_char_p
        library.ppo_call_bytes.restype = ctypes.c_int64
    except (OSError, AttributeError) as error:
        return None, str(error)
    if library.ppo_call_bytes() != _CALL.size:
        return None, f"{LIBRARY} was built from other sources: install ppo_ops again"
    wanted = os.environ.get("PPO_OPS_NATIVE_ISA")
    chosen = library.ppo_choose(wanted.encode() if wanted else None)
    if chosen is None:
        return None, f"this CPU does not run PPO_OPS_NATIVE_ISA={wanted}"
    _share_thread_pool(library)
    return library, chosen.decode()


def _share_thread_pool(library: ctypes.CDLL) -> None:
    """Let the kernels run on the thread pool of torch's OpenMP runtime; without one they make threads themselves."""
    try:
        parallel = ctypes.CDLL(None).GOMP_parallel
    except AttributeError:
        return
    library.ppo_set_parallel(ctypes.cast(parallel, ctypes.c_void_p))
    # The pool does not survive a fork; a child that used it would wait for ever.
    os.register_at_fork(after_in_child=lambda: library.ppo_set_parallel(None))


_library, _reason = _load()


def available() -> bool:
    """Whether the library was built, can be loaded and is not turned off."""
    return _library is not None


def why_unavailable() -> str:
    """The reason why `available` is False; empty if it is True."""
    return "" if available() else _reason


def instruction_set() -> str:
    """``avx512``, ``avx2`` or ``baseline``; empty where the library is not available."""
    return _reason if available() else ""


def supports(dtype: torch.dtype) -> bool:
    """Whether logits of this dtype are served."""
    return available() and dtype in _DTYPES


# `tensor.stride()[0]` takes a third of the time of `tensor.stride(0)`, 0.1 us (torch 2.13).


def _adjacent(tensor: Tensor | None) -> bool:
    """Whether neighbouring columns are neighbours in memory; rows may lie anywhere."""
    return tensor is None or tensor.stride()[1] == 1 or tensor.shape[1] <= 1


def _row_blocks(logits: Tensor) -> Iterator[slice]:
    rows, columns = logits.shape
    step = max(1, COPY_BYTES // max(1, columns * logits.element_size()))
    return (slice(row, min(row + step, rows)) for row in range(0, rows, step))


def _block(tensor: Tensor | None, rows: slice) -> Tensor | None:
    """Those rows with adjacent columns; a copy only where they are not."""
    return tensor if tensor is None else tensor[rows] if _adjacent(tensor) else tensor[rows].contiguous()


def _per_row(tensor: Tensor | None, rows: slice) -> Tensor | None:
    """Those rows of a tensor ``[N]`` or ``[1]``, the one number of all rows."""
    return tensor if tensor is None or tensor.shape[0] == 1 else tensor[rows]


def _vector(tensor: Tensor | None) -> tuple[int, int]:
    """Address and stride of a tensor ``[N]``, or ``[1]`` for all rows."""
    if tensor is None:
        return 0, 0
    return tensor.data_ptr(), tensor.stride()[0] if tensor.shape[0] > 1 else 0


def _matrix(tensor: Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.data_ptr(), tensor.stride()[0])


def _sets(keep_ids: Tensor, keep_offsets: Tensor, dense: Tensor) -> tuple[int, ...]:
    return (keep_ids.data_ptr(), keep_ids.dtype == torch.int64, keep_offsets.data_ptr(), *_matrix(dense))


class Outputs(NamedTuple):
    """What one rank returns, ``[N]`` contiguous; `entropy` is empty where it is not wanted; `end` is V, if known."""

    log_prob: Tensor
    entropy: Tensor
    end: int | None

    def pointers(self) -> tuple[int, int, int]:
        return self.log_prob.data_ptr(), self.entropy.data_ptr(), -1 if self.end is None else self.end

    def of(self, rows: slice) -> Outputs:
        return Outputs(self.log_prob[rows], self.entropy[rows], self.end)


def _call(
    function: Callable[[bytes], Any],
    logits: Tensor,
    target: Tensor,
    keep_mask: Tensor | None,
    temperature: Tensor | None,
    stats: Tensor,
    sizes: tuple[int, int, int],
    grad_log_prob: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    grad_logits: Tensor | None = None,
    sets: tuple[Tensor, Tensor, Tensor] | None = None,
    outputs: Outputs | None = None,
) -> Any:
    if target.dtype != torch.int64:
        target = target.long()
    return function(
        _CALL.pack(
            *_matrix(logits),
            _DTYPES[logits.dtype],
            *logits.shape,
            *sizes,
            *_vector(target),
            *_matrix(keep_mask),
            *_vector(temperature),
            *_matrix(stats),
            stats.shape[0],
            torch.get_num_threads(),
            *_vector(grad_log_prob),
            *_vector(grad_entropy),
            *_matrix(grad_logits),
            *((0,) * 5 if sets is None else _sets(*sets)),
            *((0,) * 3 if outputs is None else outputs.pointers()),
        )
    )


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
    outputs: Outputs | None = None,
) -> int:
    """Fill ``stats [K, N]`` (see `ppo_ops.ops.vocab_stats`) from ``logits [N, V_local]``; -1.

    With `outputs` fill these too, and let ``stats`` become the normalizers, as `merge_stats` does for one rank; unless
    a target is outside the vocabulary: the first such row is returned, and nothing is right.
    """
    assert _library is not None
    function, sizes = _library.ppo_vocab_stats, (columns, vocab_start, ignore_index)
    if _adjacent(logits) and _adjacent(keep_mask):
        return int(_call(function, logits, target, keep_mask, temperature, stats, sizes, outputs=outputs))
    for rows in _row_blocks(logits):
        block, mask = _block(logits, rows), _block(keep_mask, rows)
        numbers = (_per_row(temperature, rows), stats[:, rows], sizes)
        part = None if outputs is None else outputs.of(rows)
        bad = int(_call(function, block, target[rows], mask, *numbers, outputs=part))
        if bad >= 0:
            return rows.start + bad
    return -1


def first_bad_target(target: Tensor, ignore_index: int, end: int | None) -> int:
    """First row of ``target [N]`` int64 that is neither ignored nor in ``[0, end)``; -1 where there is none."""
    assert _library is not None
    place = (target.data_ptr(), target.stride()[0], target.shape[0])
    return int(_library.ppo_first_bad_target(*place, ignore_index, -1 if end is None else end))


def right_sets(keep_ids: Tensor, keep_offsets: Tensor, end: int | None) -> bool:
    """Whether ``keep_offsets [N + 1]`` are those of rows of ``keep_ids [M]``, and all ids in ``[0, end)``."""
    assert _library is not None
    ids, offsets = keep_ids.contiguous(), keep_offsets.to(torch.int64).contiguous()
    place = (ids.data_ptr(), ids.dtype == torch.int64, ids.shape[0], offsets.data_ptr(), offsets.shape[0] - 1)
    return bool(_library.ppo_right_sets(*place, -1 if end is None else end))


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
    """Fill ``grad_logits [N, V_local]``, which may be the logits' own memory."""
    assert _library is not None
    function, sizes = _library.ppo_logits_grad, (columns, vocab_start, ignore_index)
    upstream = (grad_log_prob, grad_entropy)
    if _adjacent(logits) and _adjacent(keep_mask) and _adjacent(grad_logits):
        _call(function, logits, target, keep_mask, temperature, normalizers, sizes, *upstream, grad_logits)
        return
    for rows in _row_blocks(logits):
        block, mask = _block(logits, rows), _block(keep_mask, rows)
        grad = grad_logits[rows] if _adjacent(grad_logits) else torch.empty_like(block)
        row_upstream = [_per_row(g, rows) for g in upstream]
        numbers = _per_row(temperature, rows), normalizers[:, rows], sizes, *row_upstream
        _call(function, block, target[rows], mask, *numbers, grad)
        if not _adjacent(grad_logits):
            grad_logits[rows].copy_(grad)


def kept_vocab_stats(
    logits: Tensor,
    target: Tensor,
    keep_ids: Tensor,
    keep_offsets: Tensor,
    temperature: Tensor | None,
    stats: Tensor,
    *,
    ignore_index: int,
    vocab_start: int,
    columns: int,
    outputs: Outputs | None = None,
) -> int:
    """`vocab_stats` for ``stats [K, N]``, K = 3 or 6, with a ragged kept set; columns of logits are adjacent."""
    assert _library is not None
    dense = stats.new_empty((4 if len(stats) == 6 else 3, stats.shape[1]))
    sets = (keep_ids.contiguous(), keep_offsets.to(torch.int64).contiguous(), dense)
    sizes = (columns, vocab_start, ignore_index)
    function = _library.ppo_vocab_stats
    return int(_call(function, logits, target, None, temperature, stats, sizes, sets=sets, outputs=outputs))


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
    *,
    ignore_index: int,
    vocab_start: int,
    columns: int,
) -> None:
    """Fill ``grad_logits [N, V_local]``, which may be the logits' own memory, with a ragged kept set."""
    assert _library is not None
    dense = normalizers[[4, 5, 2, 3]] if len(normalizers) == 6 else normalizers
    sets = (keep_ids.contiguous(), keep_offsets.to(torch.int64).contiguous(), dense)
    sizes, upstream = (columns, vocab_start, ignore_index), (grad_log_prob, grad_entropy)
    _call(_library.ppo_logits_grad, logits, target, None, temperature, normalizers, sizes, *upstream, grad_logits, sets)
