"""K targets a position: one normaliser for all of them, and one pass over the logits in backward.

    log_prob[i, j] = (x[i, t_ij] - M_i) / T_i - log S_i
    grad[i, v]     = ( sum_j g_ij [v = t_ij]  -  p_iv sum_j g_ij ) / T_i

Shapes: logits ``[..., V_local]``, target and log_prob ``[..., K]``, stats and normalizers ``[2 + K, N]``: the maximum,
the sum (then its logarithm), and the targets' logits: NaN where this rank (then: any rank) does not own the target, 0
where it is ignored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ppo_ops.ops.checks import TARGET_DTYPES, check_arguments, check_no_grad
from ppo_ops.ops.groups import Shard, group_size, shard
from ppo_ops.ops.logprob_entropy import _is_real_on_cpu
from ppo_ops.ops.merge_stats import (
    _merge_softmax,
    _merge_target,
    _sum_over_ranks,
    all_gather_stats,
    flat_temperature,
)
from ppo_ops.ops.schemas import REGISTRY, accumulation_dtype
from ppo_ops.ops.vocab_stats import check_target

_CORE = torch.ops.ppo._targets_logprob.default
_STATS = torch.ops.ppo._targets_stats.default
_GRAD = torch.ops.ppo._targets_grad.default
_VOCAB_STATS = torch.ops.ppo._vocab_stats.default
_LOGITS_GRAD = torch.ops.ppo._logits_grad.default
# Never an id of this library's vocabularies, never owned by a shard; -100 is what `_vocab_stats` is told to ignore.
_NOBODYS, _IGNORED = -1, -100


def check(
    logits: Tensor,
    target: Tensor,
    temperature: Tensor | None,
    vocab_size: int | None,
    vocab_start: int | None,
    group_name: str,
) -> None:
    torch._check_type(target.dtype in TARGET_DTYPES, lambda: f"target must have an integer dtype, got {target.dtype}")
    torch._check_value(
        target.dim() == logits.dim() and target.shape[-1] >= 1,
        lambda: f"target must have at least one id a position in [..., K], got {tuple(target.shape)}",
    )
    first = target.select(-1, 0)
    check_arguments(logits, first, None, None, None, temperature, vocab_size, vocab_start, False, group_name)


@REGISTRY.decomposed("_targets_logprob")
@REGISTRY.impl("_targets_logprob", "CompositeExplicitAutograd")
def _core(
    logits: Tensor,
    target: Tensor,
    temperature: Tensor | None,
    ignore_index: int,
    vocab_size: int | None,
    vocab_start: int | None,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    check(logits, target, temperature, vocab_size, vocab_start, group_name)
    size = group_size(group_name)
    stats = _STATS(logits, target, temperature, ignore_index, vocab_size, vocab_start, group_name, size)
    divisor = flat_temperature(temperature, stats.dtype)
    if size == 1:
        row_max, sum_exp, target_logit = stats[0], stats[1], stats[2:]
    else:
        gathered = all_gather_stats(stats, size, group_name)
        row_max, sum_exp, _, _ = _merge_softmax(gathered[:, 0], gathered[:, 1], divisor)
        target_logit = _merge_target(gathered[:, 2:])
    normalizers = torch.cat([row_max.unsqueeze(0), sum_exp.log().unsqueeze(0), target_logit])
    ids = target.reshape(-1, target.shape[-1]).to(torch.int64)
    ignored = ids == ignore_index
    log_prob = log_probs_of(normalizers, divisor).masked_fill(ignored, 0.0)
    if vocab_start is not None and vocab_size is None and _is_real_on_cpu(logits):
        bad = normalizers[2:].T.isnan() & ~normalizers[1].isnan().unsqueeze(1) & ~ignored
        if bad.any():
            row, place = bad.nonzero()[0].tolist()
            raise IndexError(f"target must be on some rank's shard, got {int(ids[row, place])} in row {row}")
    return torch.ops.aten._unsafe_view.default(log_prob, target.shape), normalizers


def log_probs_of(normalizers: Tensor, divisor: Tensor | None) -> Tensor:
    """``[N, K]`` of ``[2 + K, N]``."""
    shifted = normalizers[2:] - normalizers[0]
    if divisor is not None:
        shifted = shifted / divisor
    return (shifted - normalizers[1]).T.contiguous()


@REGISTRY.fake("_targets_logprob")
def _fake(
    logits: Tensor,
    target: Tensor,
    temperature: Tensor | None,
    ignore_index: int,
    vocab_size: int | None,
    vocab_start: int | None,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    check(logits, target, temperature, vocab_size, vocab_start, group_name)
    dtype, places = accumulation_dtype(logits), target.shape[-1]
    normalizers = logits.new_empty((2 + places, target.shape[:-1].numel()), dtype=dtype)
    return logits.new_empty(target.shape, dtype=dtype), normalizers


@REGISTRY.impl("_targets_stats", "CompositeExplicitAutograd")
def _stats(
    logits: Tensor,
    target: Tensor,
    temperature: Tensor | None,
    ignore_index: int,
    vocab_size: int | None,
    vocab_start: int | None,
    group_name: str,
    group_size: int,
) -> Tensor:
    place = (vocab_size, vocab_start, group_name)
    where = shard(logits, *place, group_size)
    if target.device.type == "cpu":
        check_target(target.reshape(-1).to(torch.int64), ignore_index, where, target.shape[-1])
    target = target.to(torch.int64)
    # Rows without a target are not read. 0 is always in the vocabulary; its logit is not used.
    rows = torch.where((target != ignore_index).any(-1), 0, _IGNORED)
    stats = _VOCAB_STATS(logits, rows, None, temperature, _IGNORED, *place, group_size, False)
    local, owned = _local(target, where)
    found = torch.full(target.shape, torch.nan, dtype=stats.dtype, device=stats.device)
    if where.columns:
        found = logits.gather(-1, local).to(stats.dtype).where(owned, found)
    found = found.masked_fill(target == ignore_index, 0.0)
    return torch.cat([stats[:2], found.reshape(-1, target.shape[-1]).T])


def _local(target: Tensor, where: Shard) -> tuple[Tensor, Tensor]:
    """Local columns, 0 where this rank does not own the target, and whether it does."""
    local = target - where.start
    owned = (local >= 0) & (local < where.columns)
    return local.where(owned, 0), owned


@REGISTRY.fake("_targets_stats")
def _fake_stats(logits: Tensor, target: Tensor, *rest: Any) -> Tensor:
    shape = (2 + target.shape[-1], target.shape[:-1].numel())
    return logits.new_empty(shape, dtype=accumulation_dtype(logits))


def _totals(ids: Tensor, grad: Tensor) -> Tensor:
    """``[N, K]``: the gradients of all places of a row that hold the same id, added up."""
    if ids.shape[1] == 1:
        return grad
    ordered, order = ids.sort(dim=1, stable=True)
    sums = grad.gather(1, order)
    # Each place adds up the places of its id up to itself, twice as many in each step: in the same order every time.
    step = 1
    while step < ids.shape[1]:
        same = ordered[:, step:] == ordered[:, :-step]
        sums = torch.cat([sums[:, :step], sums[:, step:] + sums[:, :-step].where(same, 0.0)], dim=1)
        step *= 2
    last = torch.searchsorted(ordered, ordered, right=True) - 1
    return torch.empty_like(grad).scatter_(1, order, sums.gather(1, last))


@REGISTRY.impl("_targets_grad", "CompositeExplicitAutograd")
def _grad(
    logits: Tensor,
    target: Tensor,
    temperature: Tensor | None,
    ignore_index: int,
    vocab_size: int | None,
    vocab_start: int | None,
    group_name: str,
    normalizers: Tensor,
    grad_log_prob: Tensor,
) -> Tensor:
    """First ``-p sum_j g_j`` everywhere, then the targets' columns anew, so that each element is rounded once."""
    ids = target.reshape(-1, target.shape[-1]).to(torch.int64)
    ignored = ids == ignore_index
    grad = grad_log_prob.reshape(ids.shape).to(normalizers.dtype).masked_fill(ignored, 0.0)
    ids = ids.masked_fill(ignored, _NOBODYS)
    row_max, log_sum, target_logit = normalizers[0], normalizers[1], normalizers[2:].T
    unknown = (grad != 0) & (target_logit.isnan() | log_sum.isnan().unsqueeze(1))
    total = _sum_over_ranks(grad.T).masked_fill(unknown.any(1), torch.nan)
    rows = torch.full(target.shape[:-1], _NOBODYS, dtype=torch.int64, device=logits.device)
    softmax = torch.stack([row_max, log_sum, torch.zeros_like(row_max)])
    place = (vocab_size, vocab_start, group_name)
    grad_logits: Tensor = _LOGITS_GRAD(
        logits, rows, None, temperature, softmax, total.view(rows.shape), None, _IGNORED, *place
    )
    where = shard(logits, *place, None)
    if not where.columns:
        return grad_logits
    divisor = flat_temperature(temperature, normalizers.dtype)
    p = log_probs_of(normalizers, divisor).exp()
    pull = (p * total.unsqueeze(1)).masked_fill(total.unsqueeze(1) == 0, 0.0)
    value = _totals(ids, grad) - pull
    if divisor is not None:
        value = value / (divisor.unsqueeze(1) if divisor.dim() else divisor)
    _overwrite(grad_logits.view(len(ids), logits.shape[-1]), *_local(ids, where), value.to(logits.dtype))
    return grad_logits


def _overwrite(grad: Tensor, local: Tensor, owned: Tensor, value: Tensor) -> None:
    """Set the owned columns of each row. The others are sent to column 0 with what column 0 gets anyway."""
    first = owned & (local == 0)
    place = first.to(torch.int8).argmax(1, keepdim=True)
    column = value.gather(1, place).where(first.any(1, keepdim=True), grad[:, :1])
    rows = torch.arange(len(grad), device=grad.device).unsqueeze(1)
    # Not `scatter_`, which for bfloat16 and float16 copies the whole matrix on the CPU (torch 2.13).
    grad.index_put_((rows, local), value.where(owned, column))


@REGISTRY.fake("_targets_grad")
def _fake_grad(logits: Tensor, *rest: Any) -> Tensor:
    return logits.new_empty(logits.shape)


REGISTRY.no_gradient("_targets_stats", "ppo::_targets_stats is a stage without a gradient of its own")
REGISTRY.no_gradient("_targets_grad", "K targets and top-k cannot be differentiated twice: not implemented")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, temperature, *where = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, target, temperature, output[1])
    ctx.where = where


@REGISTRY.autograd("_targets_logprob", _setup_context)
def _backward(ctx: Any, grad_log_prob: Tensor | None, grad_normalizers: None) -> tuple[Tensor | None, ...]:
    grad_logits = None
    if grad_log_prob is not None:
        logits, target, temperature, normalizers = ctx.saved_tensors
        grad_logits = _GRAD(logits, target, temperature, *ctx.where, normalizers, grad_log_prob)
    return (grad_logits, *(None,) * 6)


def refuse(keep_mask: Any, keep_ids: Any, keep_offsets: Any, inplace_backward: bool, temperature: Any) -> None:
    """Arguments that K targets do not combine with."""
    given = {"keep_mask": keep_mask, "keep_ids": keep_ids, "keep_offsets": keep_offsets}
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} must be None with K targets a position: each target would change the kept set")
    if inplace_backward:
        raise ValueError("inplace_backward must be False with K targets a position, got True")
    check_no_grad(temperature)
