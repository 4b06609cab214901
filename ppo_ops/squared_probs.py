"""The sum of squared probabilities of each row: the probability that two draws from it are the same token.

    squares = sum_v p_v^2 = Q / S^2        S = sum_v e^z_v        Q = sum_v e^{2 z_v}        z = (x - M) / T
    d squares / d x_v = 2 p_v (p_v - squares) / T

Stage 1 gives ``[3, N]``: M, S and Q of this rank. Q is a sum of exponentials at half the temperature, so the same
kernels make it, in blocks of rows. Over ranks ``S = sum_r e^{d_r} S_r`` and ``Q = sum_r e^{2 d_r} Q_r`` with
``d_r = (M_r - M) / T``: one all-gather of 3 numbers a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ppo_ops import dtensor
from ppo_ops.functional import Group, _temperature_tensor, group_name_of
from ppo_ops.ops.checks import check_logits, check_no_grad
from ppo_ops.ops.groups import group_size, shard
from ppo_ops.ops.merge_stats import LOWEST, _merge_softmax, _sum_over_ranks, all_gather_stats, flat_temperature
from ppo_ops.ops.schemas import REGISTRY, accumulation_dtype

_CORE = torch.ops.ppo._sum_squared_probs.default
_STATS = torch.ops.ppo._squares_stats.default
_GRAD = torch.ops.ppo._squares_grad.default
_VOCAB_STATS = torch.ops.ppo._vocab_stats.default
_IGNORED = -100
# Rows are taken in blocks of so many elements.
CPU_BLOCK, DEVICE_BLOCK = 1 << 18, 1 << 24


def sum_squared_probs(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    group: Group = None,
) -> Tensor:
    """Computes the sum of squared probabilities of each row, its collision probability.

        squares = sum_v p_v^2        p = softmax(logits / T)        between 1 / V and 1

    Args:
        logits, temperature, vocab_size, vocab_start, group: as `logprob_entropy`; a temperature tensor is 0-dim or
            shaped like the rows. DTensor logits give a DTensor, replicated over the vocabulary's mesh dimension.

    Returns:
        squares: ``[...]`` float32 (float64 for float64 logits), the same bits on every rank of the group.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.

    Cost:
        One all-gather of 3 numbers a row in forward, none for one rank, none in backward. Forward takes two sums over
        the logits, so it costs two of `logprob`. Backward reads once and writes once, by torch operators in blocks of
        rows, several times slower than `logprob`'s. Saves the logits and 3 numbers a row.

    Numerics:
        As `logprob_entropy`.

    Gradient:
        Of logits, ``2 p_v (p_v - squares) / T``, in their dtype, rounded once. A zero upstream gradient gives an
        exactly zero row. Differentiating twice raises RuntimeError.

    Example:
        >>> import torch, ppo_ops
        >>> ppo_ops.sum_squared_probs(torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, 1.0, -torch.inf, -torch.inf]])).tolist()
        [0.25, 0.5]

    Source:
        The definition; Renyi's entropy of order 2 is minus its logarithm.
    """
    if type(logits) is not Tensor and dtensor.is_dtensor(logits):
        options = {
            "temperature": temperature,
            "vocab_size": vocab_size,
            "vocab_start": vocab_start,
            "group": group,
        }
        return dtensor.rows(sum_squared_probs, logits, options)  # type: ignore[no-any-return]
    if not isinstance(logits, Tensor):
        raise TypeError(f"logits must be a tensor, got {type(logits)}")
    check_no_grad(temperature)
    place = (vocab_size, vocab_start, group_name_of(group))
    return _CORE(logits, _temperature_tensor(temperature, logits), *place)[0]  # type: ignore[no-any-return]


@REGISTRY.decomposed("_sum_squared_probs")
@REGISTRY.impl("_sum_squared_probs", "CompositeExplicitAutograd")
def _core(
    logits: Tensor, temperature: Tensor | None, vocab_size: int | None, vocab_start: int | None, group_name: str
) -> tuple[Tensor, Tensor]:
    check_logits(logits, temperature, vocab_size, vocab_start, group_name)
    size = group_size(group_name)
    stats = _STATS(logits, temperature, vocab_size, vocab_start, group_name, size)
    if size == 1:
        row_max, sum_exp, sum_squares = stats.unbind(0)
    else:
        rank_max, rank_sum, rank_squares = all_gather_stats(stats, size, group_name).unbind(1)
        divisor = flat_temperature(temperature, stats.dtype)
        row_max, sum_exp, _, weight = _merge_softmax(rank_max, rank_sum, divisor)
        sum_squares = _sum_over_ranks(weight * weight * rank_squares)
    squares = sum_squares / (sum_exp * sum_exp)
    normalizers = torch.stack([row_max, sum_exp.log(), squares])
    return torch.ops.aten._unsafe_view.default(squares, logits.shape[:-1]), normalizers


@REGISTRY.fake("_sum_squared_probs")
def _fake(
    logits: Tensor, temperature: Tensor | None, vocab_size: int | None, vocab_start: int | None, group_name: str
) -> tuple[Tensor, Tensor]:
    check_logits(logits, temperature, vocab_size, vocab_start, group_name)
    rows, dtype = logits.shape[:-1], accumulation_dtype(logits)
    return logits.new_empty(rows, dtype=dtype), logits.new_empty((3, rows.numel()), dtype=dtype)


def _blocks(logits: Tensor, width: int) -> list[slice]:
    rows = logits.shape[:-1].numel()
    step = max(16, (CPU_BLOCK if logits.device.type == "cpu" else DEVICE_BLOCK) // max(1, width))
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


@REGISTRY.impl("_squares_stats", "CompositeExplicitAutograd")
def _stats(
    logits: Tensor,
    temperature: Tensor | None,
    vocab_size: int | None,
    vocab_start: int | None,
    group_name: str,
    group_size: int,
) -> Tensor:
    place = (vocab_size, vocab_start, group_name)
    dtype, rows = accumulation_dtype(logits), logits.shape[:-1].numel()
    divisor = flat_temperature(temperature, dtype)
    matrix = logits.reshape(rows, logits.shape[-1])
    target = logits.new_zeros((), dtype=torch.int64)  # always in the vocabulary; its logit is not used
    one = torch.ones((), dtype=dtype, device=logits.device)
    stats = torch.empty((3, rows), dtype=dtype, device=logits.device)
    for block in _blocks(logits, logits.shape[-1]):
        part = matrix[block]
        own = divisor if divisor is None or not divisor.dim() else divisor[block]
        nothing = target.expand(len(part))
        found = _VOCAB_STATS(part, nothing, None, own, _IGNORED, *place, group_size, False)
        half = 0.5 * (one if own is None else own)
        stats[:2, block] = found[:2]
        stats[2, block] = _VOCAB_STATS(part, nothing, None, half, _IGNORED, *place, group_size, False)[1]
    return stats


@REGISTRY.fake("_squares_stats")
def _fake_stats(logits: Tensor, *rest: Any) -> Tensor:
    return logits.new_empty((3, logits.shape[:-1].numel()), dtype=accumulation_dtype(logits))


@REGISTRY.impl("_squares_grad", "CompositeExplicitAutograd")
def _grad(
    logits: Tensor,
    temperature: Tensor | None,
    vocab_size: int | None,
    vocab_start: int | None,
    group_name: str,
    normalizers: Tensor,
    grad_squares: Tensor,
) -> Tensor:
    where = shard(logits, vocab_size, vocab_start, group_name, None)
    dtype, columns = normalizers.dtype, where.columns
    matrix = logits.reshape(-1, logits.shape[-1]) if logits.numel() else logits.new_empty(0, logits.shape[-1])
    grad_logits = logits.new_empty(logits.shape)
    result = grad_logits.view(matrix.shape)
    result[:, columns:] = 0
    divisor = flat_temperature(temperature, dtype)
    upstream = grad_squares.reshape(-1).to(dtype)
    scale = 2 * upstream if divisor is None else 2 * upstream / divisor
    for block in _blocks(logits, columns) if logits.numel() else []:
        row_max, log_sum, squares = normalizers[:, block].unsqueeze(2)
        z = matrix[block, :columns].to(dtype) - row_max
        if divisor is not None:
            z = z.div_(divisor[block].unsqueeze(1) if divisor.dim() else divisor)
        p = z.sub_(log_sum).clamp_(min=LOWEST).exp_()
        factor = scale[block].unsqueeze(1)
        block_grad = (p - squares).mul_(p).mul_(factor).masked_fill_(factor == 0, 0.0)
        result[block, :columns] = block_grad.to(logits.dtype)
    return grad_logits


@REGISTRY.fake("_squares_grad")
def _fake_grad(logits: Tensor, *rest: Any) -> Tensor:
    return logits.new_empty(logits.shape)


REGISTRY.no_gradient("_squares_stats", "ppo::_squares_stats is a stage without a gradient of its own")
REGISTRY.no_gradient("_squares_grad", "ppo_ops.sum_squared_probs cannot be differentiated twice: not implemented")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, temperature, *where = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, temperature, output[1])
    ctx.where = where


@REGISTRY.autograd("_sum_squared_probs", _setup_context)
def _backward(ctx: Any, grad_squares: Tensor | None, grad_normalizers: None) -> tuple[Tensor | None, ...]:
    grad_logits = None
    if grad_squares is not None:
        logits, temperature, normalizers = ctx.saved_tensors
        grad_logits = _GRAD(logits, temperature, *ctx.where, normalizers, grad_squares)
    return (grad_logits, *(None,) * 4)
