"""Ragged kept sets (CSR rows of token ids) beside the dense kernels; ATen operators for every device.

On CUDA the sums over a row's ids are a Triton kernel's, which adds in an order that depends on that row alone.

Row ``i`` keeps ``keep_ids[keep_offsets[i] : keep_offsets[i + 1]]`` and its target; an empty row is unrestricted. The
dense kernels never see the set: they serve unrestricted rows and the entropy, and the functions here replace the kept
statistics, and the gradient at the kept columns, of the restricted rows. The cost is one pass over the ids.

Note [No value on the host]
    Nothing here selects by a boolean or reads a number, so nothing synchronises a device. An entry that does not count
    (another rank's, or said twice) stays in its row with the value -inf; where the gradient is written it repeats
    another entry's write, column and value alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

LOWEST = -1.0e4


class Entries(NamedTuple):
    """The kept ids of all rows and each row's target, row by row, sorted within a row; ``E = M + N`` entries."""

    row: Tensor  # [E]
    column: Tensor  # [E] local; 0 where this rank does not hold the entry
    held: Tensor  # [E] bool: this rank holds it
    counted: Tensor  # [E] bool: held, and not said before in its row
    offsets: Tensor  # [N + 1] first entry of each row
    restricted: Tensor  # [N] bool: the row has a kept set and is not ignored
    broken: Tensor  # [N] bool: an id outside the vocabulary, or offsets that are none


def entries(
    target: Tensor, keep_ids: Tensor, keep_offsets: Tensor, ignore_index: int, start: int, columns: int, end: int | None
) -> Entries:
    """Lay out the kept sets of ``target [N]``; ``end`` is V where it is known."""
    target, ids, offsets = (t.reshape(-1).to(torch.int64) for t in (target, keep_ids, keep_offsets))
    rows, number = target.shape[0], ids.shape[0]
    device = target.device
    position = torch.arange(number, device=device)
    row = (torch.searchsorted(offsets, position, right=True) - 1).clamp(0, max(rows - 1, 0))
    sizes = offsets.diff()
    broken = ((offsets[:1] != 0) | (offsets[-1:] != number) | (offsets[1:] < offsets[:-1]).any()).expand(rows)
    wrong_id = (ids < 0) if end is None else (ids < 0) | (ids >= end)
    broken = broken | torch.zeros_like(broken).index_put((row,), wrong_id, accumulate=True)

    row = torch.cat([row, torch.arange(rows, device=device)])
    local = torch.cat([ids, target]) - start
    held = (local >= 0) & (local < columns)
    key = row * (columns + 1) + local.where(held, columns)
    key, order = key.sort(stable=True)
    row, held = row[order], held[order]
    first = torch.ones_like(held)
    first[1:] = key[1:] != key[:-1]
    restricted = (sizes > 0) & (target != ignore_index)
    row_offsets = torch.searchsorted(row, torch.arange(rows + 1, device=device))
    column = (key - row * (columns + 1)).where(held, 0)
    return Entries(row, column, held, held & first, row_offsets, restricted, broken)


def sets_of(rows: slice, keep_ids: Tensor, keep_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The ids and offsets of some adjacent rows, read on the host."""
    offsets = keep_offsets[rows.start : rows.stop + 1]
    return keep_ids[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0]


def _place(row: Tensor, shape: torch.Size) -> tuple[Tensor, ...]:
    """`torch.unravel_index` for rows, without its copy of the shape to the device, which waits for the device."""
    if len(shape) == 1:
        return (row,)
    index: list[Tensor] = []
    for size in reversed(shape):
        index.insert(0, row % size)
        row = row // size
    return tuple(index)


def _logits_at(logits: Tensor, row: Tensor, column: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits of the entries, in the accumulation dtype; rows are counted over all leading dimensions."""
    return logits[(*_place(row, logits.shape[:-1]), column)].to(dtype)


def _per_entry(values: Tensor | None, row: Tensor) -> Tensor | None:
    return values if values is None or values.shape[0] == 1 else values[row]


def _scaled(x: Tensor, temperature: Tensor | None) -> Tensor:
    return x if temperature is None else x / temperature.to(x.dtype).where(temperature > 0, torch.nan)


def _segments(values: Tensor, found: Entries, reduction: str, initial: float) -> Tensor:
    """Reduce the entries of each row in their order."""
    return torch.segment_reduce(values, reduction, offsets=found.offsets, axis=0, unsafe=True, initial=initial)


def softmax_of_entries(x: Tensor, found: Entries, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
    """Maximum ``[N]`` of each row's entries ``x [E]``, of which some are -inf, and sum of ``e^((x - maximum) / T)``."""
    largest = _segments(x, found, "max", -torch.inf)
    shift = largest.masked_fill(largest == -torch.inf, 0.0)[found.row]
    terms = _scaled(x - shift, _per_entry(temperature, found.row)).clamp(min=LOWEST).exp()
    # In float64: a row's terms are added one by one, and there may be 100,000.
    total = _segments(terms.where(x != -torch.inf, 0.0).double(), found, "sum", 0.0)
    return largest, total.to(x.dtype)


def put_stats(
    logits: Tensor,
    target: Tensor,
    temperature: Tensor | None,
    found: Entries,
    dense: Tensor,
    vocab_start: int,
    reduce: Callable[..., tuple[Tensor, Tensor]] = softmax_of_entries,
) -> Tensor:
    """Statistics ``[K, N]`` from the dense ones ``[3, N]``, or ``[4, N]`` with entropy, of the same rows.

    Without entropy the dense kernel has not read the restricted rows.
    """
    rows, columns = dense.shape[1], logits.shape[-1]
    kept_max, kept_sum, target_logit = dense.new_full((rows,), -torch.inf), dense.new_zeros(rows), dense[2]
    if rows and columns:
        x = _logits_at(logits, found.row, found.column, dense.dtype).where(found.counted, -torch.inf)
        kept_max, kept_sum = reduce(x, found, temperature)
        local = target.to(torch.int64) - vocab_start
        owned = (local >= 0) & (local < columns)
        at_target = _logits_at(logits, torch.arange(rows, device=dense.device), local.where(owned, 0), dense.dtype)
        target_logit = at_target.where(owned, torch.nan).where(found.restricted, target_logit)
    elif rows:
        target_logit = target_logit.masked_fill(found.restricted, torch.nan)
    target_logit = target_logit.masked_fill(found.broken, torch.nan)
    kept = [kept_max.where(found.restricted, dense[0]), kept_sum.where(found.restricted, dense[1]), target_logit]
    return torch.stack([*kept, dense[3], dense[0], dense[1]] if len(dense) == 4 else kept)


def gradients(
    x: Tensor,
    target: Tensor,
    temperature: Tensor | None,
    found: Entries,
    normalizers: Tensor,
    grad_log_prob: Tensor | None,
    grad_entropy: Tensor | None,
    vocab_start: int,
) -> Tensor:
    """``[E]`` gradient of the entries' logits ``x``, in the accumulation dtype; right where `held` and restricted."""
    scale = _per_entry(temperature, found.row)
    per_row = normalizers[:, found.row]
    value = torch.zeros_like(x)
    if grad_log_prob is not None:
        a = _scaled(grad_log_prob, temperature)
        a = a.where((grad_log_prob == 0) | ~normalizers[2].isnan(), torch.nan)[found.row]
        p = (_scaled(x - per_row[0], scale) - per_row[1]).clamp(min=LOWEST).exp()
        is_target = found.column == (target.to(torch.int64) - vocab_start)[found.row]
        value = (a * (is_target.to(x.dtype) - p)).masked_fill(a == 0, 0.0)
    if grad_entropy is not None:
        b = _scaled(grad_entropy, temperature)[found.row]
        log_p = (_scaled(x - per_row[4], scale) - per_row[5]).clamp(min=LOWEST)
        value = value - (b * log_p.exp() * (log_p + per_row[3])).masked_fill(b == 0, 0.0)
    return value


def put_gradients(grad_logits: Tensor, found: Entries, value: Tensor) -> None:
    """Write the entries of restricted rows over the dense gradient (see Note [No value on the host])."""
    if not grad_logits.numel():
        return
    # Entries that this rank holds come first in a row: the others repeat the first one's write.
    source = torch.arange(len(value), device=value.device).where(found.held, found.offsets[found.row])
    column = found.column[source]
    index = (*_place(found.row, grad_logits.shape[:-1]), column)
    written = found.restricted[found.row] & found.held[source]
    grad_logits[index] = value[source].to(grad_logits.dtype).where(written, grad_logits[index])


def vocab_stats(
    dense_kernel: Callable[..., None],
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
    reduce: Callable[..., tuple[Tensor, Tensor]] = softmax_of_entries,
) -> None:
    """Fill ``stats [K, N]``, K = 3 or 6, as `ppo_ops.ops.vocab_stats` says; the kept set alone is read for K = 3.

    `reduce` replaces `softmax_of_entries`.
    """
    found = entries(target, keep_ids, keep_offsets, ignore_index, vocab_start, columns, vocab_end)
    with_entropy = len(stats) == 6
    dense = stats.new_empty((4 if with_entropy else 3, stats.shape[1]))
    read = target if with_entropy else target.masked_fill(found.restricted, ignore_index)
    dense_kernel(logits, read, None, temperature, dense, ignore_index, vocab_start, columns)
    stats.copy_(put_stats(logits, target, temperature, found, dense, vocab_start, reduce))


def logits_grad(
    dense_kernel: Callable[..., None],
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
    """Fill ``grad_logits``, contiguous or the logits' own memory."""
    found = entries(target, keep_ids, keep_offsets, ignore_index, vocab_start, columns, None)
    x = logits.new_zeros(found.row.shape, dtype=normalizers.dtype)
    if logits.numel():  # read before the dense gradient may overwrite them
        x = _logits_at(logits, found.row, found.column, normalizers.dtype)
    upstream = (grad_log_prob, grad_entropy)
    if len(normalizers) == 6:
        dense, read = normalizers[[4, 5, 2, 3]], target
        dense_log_prob = None if grad_log_prob is None else grad_log_prob.masked_fill(found.restricted, 0.0)
    else:
        dense, read = normalizers, target.masked_fill(found.restricted, ignore_index)
        dense_log_prob = grad_log_prob
    where = (ignore_index, vocab_start, columns)
    dense_kernel(logits, read, None, temperature, dense, dense_log_prob, grad_entropy, grad_logits, *where)
    value = gradients(x, target, temperature, found, normalizers, *upstream, vocab_start)
    put_gradients(grad_logits, found, value)
