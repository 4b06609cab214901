"""Stage 1: one read of this rank's logits gives a few numbers a row.

    stats[0] lp_max           max of x over the kept set (over all valid columns without one)
    stats[1] lp_sum_exp       sum of e^((x - lp_max) / T) over the same columns
    stats[2] target_logit     x at the target, NaN on a rank that does not own it
    stats[3] sum_exp_shifted  sum of e^z z with z = (x - max) / T over all valid columns   (with entropy)
    stats[4], stats[5]        max and sum_exp over all valid columns                       (with entropy and a kept set)

``x`` are the raw logits in the accumulation dtype. Maxima stay undivided by the temperature: shifting comes first, so a
common offset of 1e8 cancels before anything is rounded. Shapes: logits ``[..., V_local]``, stats ``[K, N]``.
Source: the online softmax of Milakov and Gimelshein (arXiv:1805.02867), with block maxima that start at -inf.
"""

from __future__ import annotations

from types import ModuleType
from typing import NoReturn

import torch
from torch import Tensor

from ppo_ops.kernels import cpu, cuda, native
from ppo_ops.ops.groups import Shard, shard
from ppo_ops.ops.schemas import REGISTRY, accumulation_dtype


def stats_per_row(kept_set: Tensor | None, with_entropy: bool) -> int:
    """K: 3 numbers a row for log-prob, 4 with entropy, 6 with entropy and a kept set."""
    if not with_entropy:
        return 3
    return 4 if kept_set is None else 6


def _empty_stats(logits: Tensor, target: Tensor, kept_set: Tensor | None, with_entropy: bool) -> Tensor:
    shape = (stats_per_row(kept_set, with_entropy), target.numel())
    return logits.new_empty(shape, dtype=accumulation_dtype(logits))


@REGISTRY.fake("_vocab_stats")
def _fake(
    logits: Tensor,
    target: Tensor,
    keep_mask: Tensor | None,
    temperature: Tensor | None,
    ignore_index: int,
    vocab_size: int | None,
    vocab_start: int | None,
    group_name: str,
    group_size: int,
    with_entropy: bool,
    keep_ids: Tensor | None = None,
    keep_offsets: Tensor | None = None,
) -> Tensor:
    return _empty_stats(logits, target, keep_mask if keep_offsets is None else keep_offsets, with_entropy)


def flat_int64(target: Tensor) -> Tensor:
    """``[N]`` int64; the tensor itself where it is that already."""
    return target if target.dim() == 1 and target.dtype == torch.int64 else target.reshape(-1).to(torch.int64)


def check_target(target: Tensor, ignore_index: int, where: Shard, places: int | None = None) -> None:
    """Raise `IndexError` for the first target outside the vocabulary. Reads values, so only for the CPU.

    `places`: how many targets a row has, where that may be more than one.
    """
    bad = cpu.first_bad_target(target, ignore_index, where.end)
    if bad >= 0:
        _raise_bad_target(target, bad, ignore_index, where, places)


def _raise_bad_target(target: Tensor, bad: int, ignore_index: int, where: Shard, places: int | None = None) -> NoReturn:
    bounds = "[0, vocabulary size)" if where.end is None else f"[0, {where.end})"
    row = f"row {bad}" if places is None else f"row {bad // places}, place {bad % places}"
    raise IndexError(
        f"target must be in {bounds} or equal ignore_index ({ignore_index}), got {int(target[bad])} in {row}"
    )


def check_temperature_values(temperature: Tensor) -> None:
    """Raise `ValueError` for the first temperature that is not positive. Reads values, so only for the CPU."""
    bad = ~(temperature > 0)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise ValueError(f"temperature must be > 0, got {float(temperature[row])} in row {row}")


def check_keep_sets(keep_ids: Tensor, keep_offsets: Tensor, where: Shard) -> None:
    """Raise for offsets that are not those of rows, or an id outside the vocabulary. Only for the CPU."""
    if cpu.right_sets(keep_ids, keep_offsets, where.end):
        return
    first, last, number = int(keep_offsets[0]), int(keep_offsets[-1]), keep_ids.numel()
    if first != 0:
        raise ValueError(f"keep_offsets must start at 0, got {first}")
    if last != number:
        raise ValueError(f"keep_offsets must end at the number of keep_ids, {number}, got {last}")
    falling = keep_offsets[1:] < keep_offsets[:-1]  # a difference might wrap
    if falling.any():
        row = int(falling.nonzero()[0])
        sizes = f"{int(keep_offsets[row])} and then {int(keep_offsets[row + 1])}"
        raise ValueError(f"keep_offsets must not decrease, got {sizes} for row {row}")
    if not number:
        return
    lowest, highest = torch.aminmax(keep_ids)
    if lowest < 0 or (where.end is not None and highest >= where.end):
        wrong = (keep_ids < 0) | (keep_ids >= (highest + 1 if where.end is None else where.end))
        place = int(wrong.nonzero()[0])
        bounds = "[0, vocabulary size)" if where.end is None else f"[0, {where.end})"
        raise IndexError(f"keep_ids must be in {bounds}, got {int(keep_ids[place])} at position {place}")


def _check_values(
    target: Tensor,
    temperature: Tensor | None,
    keep_ids: Tensor | None,
    keep_offsets: Tensor | None,
    ignore_index: int,
    where: Shard,
) -> None:
    """The first fault of several is the same whichever way a call takes."""
    check_target(target, ignore_index, where)
    if temperature is not None:
        check_temperature_values(temperature)
    if keep_ids is not None and keep_offsets is not None:
        check_keep_sets(keep_ids, keep_offsets, where)


@REGISTRY.impl("_vocab_stats", "CPU")
def vocab_stats_cpu(
    logits: Tensor,
    target: Tensor,
    keep_mask: Tensor | None,
    temperature: Tensor | None,
    ignore_index: int,
    vocab_size: int | None,
    vocab_start: int | None,
    group_name: str,
    group_size: int,
    with_entropy: bool,
    keep_ids: Tensor | None = None,
    keep_offsets: Tensor | None = None,
) -> Tensor:
    where = shard(logits, vocab_size, vocab_start, group_name, group_size)
    flat_target = flat_int64(target)
    temperature = None if temperature is None else temperature.reshape(-1)
    _check_values(flat_target, temperature, keep_ids, keep_offsets, ignore_index, where)
    return _run(
        cpu, logits, flat_target, keep_mask, temperature, ignore_index, where, with_entropy, keep_ids, keep_offsets
    )


def one_rank_cpu(
    logits: Tensor,
    target: Tensor,
    keep_mask: Tensor | None,
    temperature: Tensor | None,
    ignore_index: int,
    vocab_size: int | None,
    vocab_start: int | None,
    group_name: str,
    with_entropy: bool,
    keep_ids: Tensor | None,
    keep_offsets: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """log_prob, entropy and normalizers where one rank holds the whole vocabulary and `cpu.finishes`.

    What `vocab_stats_cpu` and `merge_stats` do, in one call of the kernels and rounded once.
    """
    where = shard(logits, vocab_size, vocab_start, group_name, 1)
    flat_target = flat_int64(target)
    temperature = None if temperature is None else temperature.reshape(-1)
    if temperature is not None or keep_offsets is not None:  # else targets are all there is, and the kernels check them
        _check_values(flat_target, temperature, keep_ids, keep_offsets, ignore_index, where)
    # Not `new_empty`, which takes 2 us instead of 1 (torch 2.13).
    kinds = stats_per_row(keep_mask if keep_offsets is None else keep_offsets, with_entropy)
    stats = torch.empty((kinds, flat_target.shape[0]), dtype=torch.float32, device=logits.device)
    log_prob = torch.empty_like(target, dtype=stats.dtype, memory_format=torch.contiguous_format)
    entropy = torch.empty_like(log_prob) if with_entropy else stats.new_empty(0)
    flat = (log_prob, entropy) if target.dim() == 1 else (log_prob.view(-1), entropy.view(-1))
    bad = cpu.finished(
        logits,
        flat_target,
        keep_mask,
        keep_ids,
        keep_offsets,
        temperature,
        stats,
        native.Outputs(*flat, where.end),
        ignore_index=ignore_index,
        vocab_start=where.start,
        columns=where.columns,
    )
    if bad >= 0:
        _raise_bad_target(flat_target, bad, ignore_index, where)
    return log_prob, entropy, stats


def _run(
    kernels: ModuleType,
    logits: Tensor,
    target: Tensor,
    keep_mask: Tensor | None,
    temperature: Tensor | None,
    ignore_index: int,
    where: Shard,
    with_entropy: bool,
    keep_ids: Tensor | None,
    keep_offsets: Tensor | None,
) -> Tensor:
    place = (ignore_index, where.start, where.columns)
    if keep_ids is None or keep_offsets is None:
        stats = _empty_stats(logits, target, keep_mask, with_entropy)
        kernels.vocab_stats(logits, target, keep_mask, temperature, stats, *place)
        return stats
    stats = _empty_stats(logits, target, keep_offsets, with_entropy)
    kernels.kept_vocab_stats(logits, target, keep_ids, keep_offsets, temperature, stats, where.end, *place)
    return stats


@REGISTRY.impl("_vocab_stats", "CUDA")
def _cuda(
    logits: Tensor,
    target: Tensor,
    keep_mask: Tensor | None,
    temperature: Tensor | None,
    ignore_index: int,
    vocab_size: int | None,
    vocab_start: int | None,
    group_name: str,
    group_size: int,
    with_entropy: bool,
    keep_ids: Tensor | None = None,
    keep_offsets: Tensor | None = None,
) -> Tensor:
    """No value is read on the host: a bad target, temperature or kept id gives NaN in its row."""
    where = shard(logits, vocab_size, vocab_start, group_name, group_size)
    flat_target = target.reshape(-1) if keep_ids is None else flat_int64(target)
    flat_temperature = None if temperature is None else temperature.reshape(-1)
    rows = (logits, flat_target, keep_mask, flat_temperature)
    return _run(cuda, *rows, ignore_index, where, with_entropy, keep_ids, keep_offsets)


REGISTRY.no_gradient(
    "_vocab_stats",
    "ppo::_vocab_stats is a stage without a gradient of its own: differentiate ppo::logprob or ppo::logprob_entropy",
)
