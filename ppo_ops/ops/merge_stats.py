"""Stages 2 and 3: the only collective, and the combination of the ranks' statistics.

    M = max_r m_r      d_r = (m_r - M) / T      S = sum_r e^{d_r} s_r      U = sum_r e^{d_r} (u_r + d_r s_r)
    log_prob = (x_target - M_kept) / T - log S_kept            entropy = log S - U / S        (nats)

Shapes: stats ``[K, N]`` -> gathered ``[W, K, N]`` -> log_prob, entropy ``[N]`` and normalizers ``[K, N]``:
``lp_max, lp_log_sum, target_logit, entropy, row_max, log_sum``, as many of them as stage 1 made.

Note [One collective]
    A softmax over W shards needs a global maximum and then a global sum: two dependent all-reduces, and one more for
    the target's logit. Statistics relative to each shard's own maximum merge exactly, so one all-gather of K numbers a
    row replaces them all. Every rank then merges the same numbers in the same order: the outputs are the same bits on
    all ranks, upstream gradients are therefore replicated, and backward needs no collective.

Note [Fixed order]
    Sums over ranks are written as elementwise additions of halves. A reduction kernel may choose its order by N or by
    a row's position; elementwise additions cannot, so a row's bits depend on that row alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ppo_ops.ops.schemas import accumulation_dtype

# e^-1e4 is 0 in float32 and float64 alike; a finite floor keeps 0 * -inf from becoming NaN.
LOWEST = -1.0e4


def all_gather_stats(stats: Tensor, group_size: int, group_name: str) -> Tensor:
    """Gather ``[K, N]`` of every rank into ``[W, K, N]`` in group-rank order; no collective for one rank."""
    if group_size == 1:
        return stats.unsqueeze(0)
    functional = torch.ops._c10d_functional
    gathered = functional.wait_tensor(functional.all_gather_into_tensor(stats, group_size, group_name))
    return torch.reshape(gathered, (group_size, *stats.shape))


def _sum_over_ranks(values: Tensor) -> Tensor:
    """Sum over the first dimension in an order that depends on its size alone (Note [Fixed order])."""
    rest = []
    while values.shape[0] > 1:
        half = values.shape[0] // 2
        if values.shape[0] % 2:
            rest.append(values[-1])
        values = values[:half] + values[half : 2 * half]
    total = values[0]
    for value in rest:
        total = total + value
    return total


class _Softmax(NamedTuple):
    """A merged softmax ``[N]``, and how each rank's own one ``[W, N]`` relates to it (None for one rank)."""

    max: Tensor
    sum_exp: Tensor
    distance: Tensor | None
    weight: Tensor | None


def _merge_softmax(rank_max: Tensor, rank_sum: Tensor, temperature: Tensor | None) -> _Softmax:
    if len(rank_max) == 1:
        return _Softmax(rank_max[0], rank_sum[0], None, None)
    merged_max = rank_max.amax(0)
    distance = rank_max - merged_max
    if temperature is not None:
        distance = distance / temperature
    distance = distance.clamp(min=LOWEST)
    weight = distance.exp()
    return _Softmax(merged_max, _sum_over_ranks(weight * rank_sum), distance, weight)


def _merge_shifted(rank_shifted: Tensor, rank_sum: Tensor, softmax: _Softmax) -> Tensor:
    """Sum of e^z z relative to the merged maximum."""
    if softmax.weight is None or softmax.distance is None:
        return rank_shifted[0]
    return _sum_over_ranks(softmax.weight * (rank_shifted + softmax.distance * rank_sum))


def _merge_target(rank_target: Tensor) -> Tensor:
    """The owner's value; NaN where nobody owns the target."""
    if len(rank_target) == 1:
        return rank_target[0]
    absent = rank_target.isnan()
    return rank_target.masked_fill(absent, -torch.inf).amax(0).masked_fill(absent.all(0), torch.nan)


def merge_stats(
    gathered: Tensor, target: Tensor, temperature: Tensor | None, ignore_index: int, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Combine ``[W, K, N]`` into log_prob and entropy, shaped like target, and normalizers ``[K, N]``.

    Without entropy that output has no elements. A row whose target nobody owns gets a NaN log-prob.
    """
    if temperature is not None:
        temperature = (temperature.reshape(-1) if temperature.dim() else temperature).to(gathered.dtype)
    rank_max, rank_sum, rank_target, *rest = gathered.unbind(1)
    kept = _merge_softmax(rank_max, rank_sum, temperature)
    kept_log_sum = kept.sum_exp.log()
    target_logit = _merge_target(rank_target)
    log_prob = target_logit - kept.max
    if temperature is not None:
        log_prob = log_prob / temperature
    # int64 first: a uint8 target compared with -100 would compare with 156.
    ignored = target.reshape(-1).to(torch.int64) == ignore_index
    log_prob = (log_prob - kept_log_sum).masked_fill(ignored, 0.0)
    normalizers = [kept.max, kept_log_sum, target_logit]
    if not with_entropy:
        return log_prob.view(target.shape), log_prob.new_empty(0), torch.stack(normalizers)

    rank_shifted, *rest = rest
    full, log_sum = kept, kept_log_sum
    if rest:
        rank_max, rank_sum = rest
        full = _merge_softmax(rank_max, rank_sum, temperature)
        log_sum = full.sum_exp.log()
    shifted = _merge_shifted(rank_shifted, rank_sum, full)
    entropy = (log_sum - shifted / full.sum_exp).masked_fill(ignored, 0.0)
    normalizers.append(entropy)
    if rest:
        normalizers += [full.max, log_sum]
    # Stacked, thus copied: a caller may overwrite an output without spoiling what backward reads.
    return log_prob.view(target.shape), entropy.view(target.shape), torch.stack(normalizers)


def fake_outputs(logits: Tensor, target: Tensor, rows: int, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Empty outputs of the right shapes and dtypes."""
    dtype = accumulation_dtype(logits)
    log_prob = logits.new_empty(target.shape, dtype=dtype)
    entropy = logits.new_empty(target.shape if with_entropy else (0,), dtype=dtype)
    return log_prob, entropy, logits.new_empty((rows, target.numel()), dtype=dtype)
