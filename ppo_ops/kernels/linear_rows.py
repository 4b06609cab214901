"""The row kernels on the logits of one chunk of rows.

Note [Rows that do not count]
    Ignored rows, and in backward rows without an upstream gradient, stay out of the chunks on the CPU. To find them on
    CUDA the host would have to wait for the device; there they are computed, as rows of zeros, and cost their share.

Note [Framed sets]
    A chunk's part of the ragged kept sets begins and ends where `keep_offsets` says, which the host cannot read on CUDA
    without waiting. There a chunk takes all sets, with one more row before and one behind it that own what is not the
    chunk's. Both are ignored rows: their logits, two spare rows of the workspace, have no meaning and no effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ppo_ops.kernels import kept

Chunk = slice | Tensor


class Rows(NamedTuple):
    """What the row kernels need beside logits; `start` is the global id of the first column, `end` is V or None."""

    target: Tensor  # [N] int64
    temperature: Tensor | None  # [1] or [N]
    keep_ids: Tensor | None
    keep_offsets: Tensor | None
    ignore_index: int
    start: int
    end: int | None


class Upstream(NamedTuple):
    """Merged statistics ``[K, N]`` and the gradients of both outputs ``[N]``, in the accumulation dtype."""

    normalizers: Tensor
    grad_log_prob: Tensor | None
    grad_entropy: Tensor | None


def host_may_read(tensor: Tensor) -> bool:
    """Whether reading a value costs no synchronisation."""
    return tensor.device.type == "cpu"


def counts(rows: Rows) -> Tensor:
    """Rows that are not ignored, ``[N]`` bool."""
    return rows.target != rows.ignore_index


def have_gradient(rows: Rows, upstream: Upstream) -> Tensor:
    """Rows that count and have an upstream gradient, ``[N]`` bool."""
    given = [grad != 0 for grad in upstream[1:] if grad is not None]
    return counts(rows) & (given[0] if len(given) == 1 else given[0] | given[1])


def select(active: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """(Indices of the active rows or None for all rows, a mask to apply or None): Note [Rows that do not count]."""
    if not host_may_read(active):
        return None, active
    return (None if bool(active.all()) else active.nonzero().squeeze(1)), None


def chunks(number: int, size: int, chosen: Tensor | None) -> Iterator[Chunk]:
    """Slices of all rows, or index tensors of the chosen ones."""
    if chosen is not None:
        yield from chosen.split(size)
        return
    for first in range(0, number, size):
        yield slice(first, min(first + size, number))


def margin(rows: Rows) -> int:
    """Spare rows of the workspace before and behind a chunk: Note [Framed sets]."""
    return 0 if rows.keep_ids is None or host_may_read(rows.target) else 1


def _per_row(values: Tensor | None, chunk: Chunk) -> Tensor | None:
    return values if values is None or values.shape[0] == 1 else values[chunk]


def _sets(rows: Rows, chunk: Chunk) -> tuple[Tensor, Tensor]:
    """The chunk's own kept ids and offsets, read on the host."""
    ids, offsets = rows.keep_ids, rows.keep_offsets
    assert ids is not None
    assert offsets is not None
    if isinstance(chunk, slice):
        return kept.sets_of(chunk, ids, offsets)
    offsets = offsets.to(torch.int64)
    first, sizes = offsets[chunk], offsets.diff()[chunk]
    part = pad(sizes.cumsum(0), (1, 0))
    place = torch.arange(int(part[-1]), device=part.device) + (first - part[:-1]).repeat_interleave(sizes)
    return ids[place], part


def _framed_offsets(rows: Rows, chunk: slice) -> Tensor:
    ids, offsets = rows.keep_ids, rows.keep_offsets
    assert ids is not None
    assert offsets is not None
    part = pad(offsets[chunk.start : chunk.stop + 1], (1, 1))
    part[-1:] = len(ids)
    return part


def _framed(values: Tensor | None, fill: float = 0.0) -> Tensor | None:
    """One number more before and behind the last dimension."""
    return None if values is None else pad(values, (1, 1), value=fill)


def _framed_temperature(values: Tensor | None) -> Tensor | None:
    """One number, which serves all rows, stays one."""
    return values if values is None or values.shape[0] == 1 else _framed(values, 1.0)


def stats_of(kernels: ModuleType, logits: Tensor, rows: Rows, chunk: Chunk, stats: Tensor) -> None:
    """Fill ``stats [K, n]`` of a chunk; with a `margin`, logits have two rows more."""
    target, temperature = rows.target[chunk], _per_row(rows.temperature, chunk)
    place = (rows.ignore_index, rows.start, logits.shape[1])
    if rows.keep_ids is None:
        kernels.vocab_stats(logits, target, None, temperature, stats, *place)
    elif not margin(rows):
        kernels.kept_vocab_stats(logits, target, *_sets(rows, chunk), temperature, stats, rows.end, *place)
    else:
        assert isinstance(chunk, slice)
        sets = (rows.keep_ids, _framed_offsets(rows, chunk))
        framed = stats.new_empty((len(stats), len(logits)))
        numbers = (_framed(target, rows.ignore_index), *sets, _framed_temperature(temperature))
        kernels.kept_vocab_stats(logits, *numbers, framed, rows.end, *place)
        stats.copy_(framed[:, 1:-1])


def grads_of(kernels: ModuleType, logits: Tensor, rows: Rows, chunk: Chunk, upstream: Upstream) -> None:
    """Turn the logits of a chunk into their gradient, in place; with a `margin`, logits have two rows more."""
    target, temperature = rows.target[chunk], _per_row(rows.temperature, chunk)
    normalizers, a, b = upstream.normalizers[:, chunk], *(None if g is None else g[chunk] for g in upstream[1:])
    place = (rows.ignore_index, rows.start, logits.shape[1])
    if rows.keep_ids is None:
        kernels.logits_grad(logits, target, None, temperature, normalizers, a, b, logits, *place)
        return
    if not margin(rows):
        sets, numbers = _sets(rows, chunk), (temperature, normalizers, a, b)
    else:
        assert isinstance(chunk, slice)
        sets = (rows.keep_ids, _framed_offsets(rows, chunk))
        target = _framed(target, rows.ignore_index)
        numbers = (_framed_temperature(temperature), _framed(normalizers), _framed(a), _framed(b))
    kernels.kept_logits_grad(logits, target, *sets, *numbers, logits, *place)
