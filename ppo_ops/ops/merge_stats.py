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

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from ppo_ops.ops.groups import resolve
from ppo_ops.ops.schemas import accumulation_dtype

# e^-1e4 is 0 in float32 and float64 alike; a finite floor keeps 0 * -inf from becoming NaN.
LOWEST = -1.0e4


def _collectives_are_checked(stats: Tensor) -> bool:
    """Whether to call the group itself: torch's checks of `TORCH_DISTRIBUTED_DEBUG=DETAIL` skip the functional one.

    `ProcessGroupWrapper` compares the ranks' shapes in `_allgather_base`, not in the coalesced variant behind
    `_c10d_functional.all_gather_into_tensor` (torch 2.13, 2.14). Eager only; a traced graph keeps the functional one.
    """
    from torch._C._distributed_c10d import DebugLevel, get_debug_level

    traced = torch.compiler.is_compiling() or isinstance(stats, (FakeTensor, FunctionalTensor))
    return not traced and get_debug_level() == DebugLevel.DETAIL


def all_gather_stats(stats: Tensor, group_size: int, group_name: str) -> Tensor:
    """Gather ``[K, N]`` of every rank into ``[W, K, N]`` in group-rank order."""
    if _collectives_are_checked(stats):
        gathered = stats.new_empty((group_size * stats.shape[0], stats.shape[1]))
        resolve(group_name)._allgather_base(gathered, stats).wait()
        return gathered.view(group_size, *stats.shape)
    functional = torch.ops._c10d_functional
    gathered = functional.wait_tensor(functional.all_gather_into_tensor(stats, group_size, group_name))
    return torch.reshape(gathered, (group_size, *stats.shape))


def flat_temperature(temperature: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """``[N]`` or 0-dim, as merging takes it."""
    if temperature is None:
        return None
    return (temperature.reshape(-1) if temperature.dim() else temperature).to(dtype)


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


def _merge_softmax(
    rank_max: Tensor, rank_sum: Tensor, temperature: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Merged maximum and sum ``[N]``; each rank's distance to the maximum, in units of T, and weight ``[W, N]``."""
    merged_max = rank_max.amax(0)
    distance = rank_max - merged_max
    if temperature is not None:
        distance = distance / temperature
    distance = distance.clamp(min=LOWEST)
    weight = distance.exp()
    return merged_max, _sum_over_ranks(weight * rank_sum), distance, weight


def _merge_target(rank_target: Tensor) -> Tensor:
    """The owner's value; NaN where nobody owns the target."""
    absent = rank_target.isnan()
    return rank_target.masked_fill(absent, -torch.inf).amax(0).masked_fill(absent.all(0), torch.nan)


def _merge_ranks(gathered: Tensor, temperature: Tensor | None) -> list[Tensor]:
    """The K statistics ``[N]`` that one rank with the whole vocabulary would have made."""
    rank_max, rank_sum, rank_target, *rest = gathered.unbind(1)
    merged_max, merged_sum, distance, weight = _merge_softmax(rank_max, rank_sum, temperature)
    merged = [merged_max, merged_sum, _merge_target(rank_target)]
    if not rest:
        return merged
    rank_shifted, *full = rest
    if full:
        rank_max, rank_sum = full
        merged_max, merged_sum, distance, weight = _merge_softmax(rank_max, rank_sum, temperature)
    merged.append(_sum_over_ranks(weight * (rank_shifted + distance * rank_sum)))
    return [*merged, merged_max, merged_sum] if full else merged


def merge_stats(
    stats: Tensor, target: Tensor, temperature: Tensor | None, ignore_index: int, group_size: int, group_name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Combine this rank's ``[K, N]`` with the group's into log_prob and entropy, shaped like target, and normalizers.

    Without entropy (K = 3) that output has no elements. A row whose target nobody owns gets a NaN log-prob.
    """
    temperature = flat_temperature(temperature, stats.dtype)
    ignored = None
    if group_size == 1:
        kept_max, kept_sum, target_logit, *rest = stats.unbind(0)
    else:
        gathered = all_gather_stats(stats, group_size, group_name)
        kept_max, kept_sum, target_logit, *rest = _merge_ranks(gathered, temperature)
        # W ranks' statistics of an ignored row would give log W; one rank's give 0. int64 first: a uint8 target
        # compared with -100 would compare with 156.
        ignored = target.reshape(-1).to(torch.int64) == ignore_index

    kept_log_sum = kept_sum.log()
    log_prob = target_logit - kept_max
    if temperature is not None:
        log_prob = log_prob / temperature
    log_prob = log_prob - kept_log_sum
    normalizers = [kept_max, kept_log_sum, target_logit]
    entropy = None
    if rest:
        shifted, *full = rest
        row_max, sum_exp = full or (kept_max, kept_sum)
        log_sum = sum_exp.log() if full else kept_log_sum
        entropy = log_sum - shifted / sum_exp
        if ignored is not None:
            entropy = entropy.masked_fill(ignored, 0.0)
        normalizers += [entropy, row_max, log_sum] if full else [entropy]
    if ignored is not None:
        log_prob = log_prob.masked_fill(ignored, 0.0)
    # Stacked, thus copied: a caller may overwrite an output without spoiling what backward reads.
    saved = torch.stack(normalizers)
    return _shaped(log_prob, target), log_prob.new_empty(0) if entropy is None else _shaped(entropy, target), saved


def _shaped(values: Tensor, target: Tensor) -> Tensor:
    """Shaped like target; not a view to autograd, which would forbid a caller to overwrite it."""
    return values if target.dim() == 1 else torch.ops.aten._unsafe_view.default(values, target.shape)


def fake_outputs(logits: Tensor, target: Tensor, rows: int, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Empty outputs of the right shapes and dtypes."""
    dtype = accumulation_dtype(logits)
    log_prob = logits.new_empty(target.shape, dtype=dtype)
    entropy = logits.new_empty(target.shape if with_entropy else (0,), dtype=dtype)
    return log_prob, entropy, logits.new_empty((rows, target.numel()), dtype=dtype)
