"""The k most probable tokens of each row over the whole vocabulary, with one collective.

    order: logit, larger first; then id, smaller first        log_prob = (x - M) / T - log S

Every rank packs its own k best with its softmax statistics into integers, so that ids travel exactly and floats by
their bits: ``[2 + 2k, N]`` int32 (int64 for float64 logits): max, sum_exp, k logits, k ids. The gather gives all ranks
the same numbers, and they merge them alike.

Note [Chunks of columns]
    Columns are looked at in chunks. An element among the k best lies in one of the k chunks that come first by their
    own maximum (ties: the earlier chunk): each chunk before another one holds an element that comes before all of the
    other's. So one cheap pass finds the chunks' maxima, and only k chunks are sorted.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ppo_ops import dtensor
from ppo_ops.functional import Group, _temperature_tensor, group_name_of
from ppo_ops.multi_target import log_probs_of
from ppo_ops.ops.checks import check_logits, check_no_grad
from ppo_ops.ops.groups import group_size, shard
from ppo_ops.ops.logprob_entropy import _is_real_on_cpu
from ppo_ops.ops.merge_stats import _merge_softmax, all_gather_stats, flat_temperature
from ppo_ops.ops.schemas import REGISTRY, accumulation_dtype

_CORE = torch.ops.ppo._vocab_topk.default
_STATS = torch.ops.ppo._topk_stats.default
_VOCAB_STATS = torch.ops.ppo._vocab_stats.default
_TARGETS_GRAD = torch.ops.ppo._targets_grad.default
_NOBODYS = -1  # the id of an absent element
_IGNORED = -100
# Rows are taken in blocks of so many elements: what a block needs besides the logits stays small.
BLOCK_ELEMENTS = 1 << 22


def vocab_parallel_topk(
    logits: Tensor,
    k: int,
    *,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    group: Group = None,
) -> tuple[Tensor, Tensor]:
    """Computes the k most probable tokens of each row and their log-probabilities, over the whole vocabulary.

        ids: by logit, larger first; equal logits by id, smaller first
        log_probs = z[ids] - log sum_v e^z_v        z = logits / T        (nats)

    Args:
        logits, temperature, vocab_size, vocab_start, group: as `logprob_entropy`; a temperature tensor is 0-dim or
            shaped like the rows. DTensor logits give DTensors, replicated over the vocabulary's mesh dimension.
        k: between 1 and V; it may exceed this rank's columns.

    Returns:
        ids: ``[..., k]`` int64, global.
        log_probs: ``[..., k]`` float32 (float64 for float64 logits), falling. Both are the same bits on every rank.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came. With `vocab_start` but without
            `vocab_size` nobody knows V beforehand; then a k beyond it raises on the CPU in eager mode, and elsewhere
            the surplus ids are -1 and their log_probs NaN.

    Cost:
        One all-gather of 2 + 2 k numbers a row in forward, none for one rank, none in backward. Forward reads the
        logits twice (normaliser, chunk maxima) and sorts about 2 sqrt(k V) elements a row; backward reads them once and
        writes the gradient once, and the k columns of each row once more. Saves the logits, and 2 + 2 k numbers a row.

    Numerics:
        As `logprob_entropy`. Ties are broken by the id on every rank alike; a NaN comes before all numbers, and its
        row's log_probs are NaN.

    Gradient:
        Of logits through log_probs, ``(sum_j g_j [v = ids_j] - p_v sum_j g_j) / T``, rounded once; ids are fixed.

    Example:
        >>> import torch, ppo_ops
        >>> ids, log_probs = ppo_ops.vocab_parallel_topk(torch.tensor([[0.0, 2.0, 1.0, 2.0]]), 2)
        >>> ids.tolist(), [f"{x:.4f}" for x in log_probs[0].tolist()]
        ([[1, 3]], ['-0.9176', '-0.9176'])

    Source:
        The definition; see also Note [Chunks of columns] in this module.
    """
    if type(logits) is not Tensor and dtensor.is_dtensor(logits):
        options = {
            "temperature": temperature,
            "vocab_size": vocab_size,
            "vocab_start": vocab_start,
            "group": group,
        }
        return dtensor.rows(  # type: ignore[no-any-return]
            lambda local, **rest: vocab_parallel_topk(local, k, **rest), logits, options, k
        )
    if not isinstance(logits, Tensor):
        raise TypeError(f"logits must be a tensor, got {type(logits)}")
    check_no_grad(temperature)
    place = (vocab_size, vocab_start, group_name_of(group))
    log_probs, ids, _ = _CORE(logits, _temperature_tensor(temperature, logits), *place, k)
    return ids, log_probs


def _check(
    logits: Tensor, temperature: Tensor | None, vocab_size: int | None, vocab_start: int | None, group_name: str, k: int
) -> None:
    check_logits(logits, temperature, vocab_size, vocab_start, group_name)
    torch._check_value(k >= 1, lambda: f"k must be at least 1, got {k}")
    columns = vocab_size
    if vocab_size is None and vocab_start is None:
        columns = group_size(group_name) * logits.shape[-1]
    if columns is not None:
        torch._check_value(k <= columns, lambda: f"k must be at most the vocabulary size {columns}, got {k}")


@REGISTRY.decomposed("_vocab_topk")
@REGISTRY.impl("_vocab_topk", "CompositeExplicitAutograd")
def _core(
    logits: Tensor, temperature: Tensor | None, vocab_size: int | None, vocab_start: int | None, group_name: str, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    _check(logits, temperature, vocab_size, vocab_start, group_name, k)
    size = group_size(group_name)
    packed = _STATS(logits, temperature, vocab_size, vocab_start, group_name, size, k)
    gathered = all_gather_stats(packed, size, group_name) if size > 1 else packed.unsqueeze(0)
    numbers = gathered[:, : 2 + k].contiguous().view(accumulation_dtype(logits))
    divisor = flat_temperature(temperature, numbers.dtype)
    row_max, sum_exp, _, _ = _merge_softmax(numbers[:, 0], numbers[:, 1], divisor)
    ids = gathered[:, 2 + k :].to(torch.int64).permute(2, 0, 1).flatten(1)
    values, ids = _best(numbers[:, 2:].permute(2, 0, 1).flatten(1), ids, k)
    normalizers = torch.cat([row_max.unsqueeze(0), sum_exp.log().unsqueeze(0), values.T])
    if vocab_start is not None and vocab_size is None and _is_real_on_cpu(logits) and bool((ids == _NOBODYS).any()):
        raise ValueError(f"k must be at most the number of columns that all ranks hold together, got {k}")
    shape = (*logits.shape[:-1], k)
    unsafe_view = torch.ops.aten._unsafe_view.default
    return unsafe_view(log_probs_of(normalizers, divisor), shape), unsafe_view(ids, shape), normalizers


def _best(values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k first of ``[N, W k]`` candidates; absent ones, which are -inf, come after those that are really -inf."""
    absent = ids == _NOBODYS
    order = ids.masked_fill(absent, torch.iinfo(torch.int64).max).argsort(dim=1, stable=True)
    values, ids = values.gather(1, order), ids.gather(1, order)
    order = values.sort(dim=1, descending=True, stable=True)[1][:, :k]
    values, ids = values.gather(1, order), ids.gather(1, order)
    return values.masked_fill(ids == _NOBODYS, torch.nan), ids.contiguous()


@REGISTRY.fake("_vocab_topk")
def _fake(
    logits: Tensor, temperature: Tensor | None, vocab_size: int | None, vocab_start: int | None, group_name: str, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    _check(logits, temperature, vocab_size, vocab_start, group_name, k)
    rows, dtype = logits.shape[:-1], accumulation_dtype(logits)
    ids = logits.new_empty((*rows, k), dtype=torch.int64)
    normalizers = logits.new_empty((2 + k, rows.numel()), dtype=dtype)
    return logits.new_empty((*rows, k), dtype=dtype), ids, normalizers


@REGISTRY.impl("_topk_stats", "CompositeExplicitAutograd")
def _stats(
    logits: Tensor,
    temperature: Tensor | None,
    vocab_size: int | None,
    vocab_start: int | None,
    group_name: str,
    group_size: int,
    k: int,
) -> Tensor:
    place = (vocab_size, vocab_start, group_name)
    where = shard(logits, *place, group_size)
    # 0 is always in the vocabulary; its logit is not used.
    target = logits.new_zeros((), dtype=torch.int64).expand(logits.shape[:-1])
    stats = _VOCAB_STATS(logits, target, None, temperature, _IGNORED, *place, group_size, False)
    rows = logits.shape[:-1].numel()
    integer = torch.int64 if stats.dtype == torch.float64 else torch.int32
    values = stats.new_full((k, rows), -torch.inf)
    ids = torch.full((k, rows), _NOBODYS, dtype=integer, device=logits.device)
    found = min(k, where.columns)
    if found and rows:
        matrix = logits.reshape(rows, logits.shape[-1])[:, : where.columns]
        step = max(1, BLOCK_ELEMENTS // where.columns)
        for first in range(0, rows, step):
            block = matrix[first : first + step]
            best = _local_best(block, found)
            values[:found, first : first + step] = block.gather(1, best).T.to(values.dtype)
            ids[:found, first : first + step] = (best.T + where.start).to(integer)
    return torch.cat([stats[:2].view(integer), values.view(integer), ids])


def _local_best(block: Tensor, k: int) -> Tensor:
    """``[n, k]`` columns of the k first elements of each row (Note [Chunks of columns])."""
    columns = block.shape[1]
    width = 1 << max(0, int(math.log2(max(1.0, columns / k))) // 2)
    number = -(-columns // width)
    if width < 4 or number <= k:
        return block.sort(dim=1, descending=True, stable=True)[1][:, :k]
    whole = columns // width
    largest = block[:, : whole * width].unflatten(1, (whole, width)).amax(2)
    if whole < number:
        largest = torch.cat([largest, block[:, whole * width :].amax(1, keepdim=True)], 1)
    chunks = largest.sort(dim=1, descending=True, stable=True)[1][:, :k].sort(dim=1)[0]
    candidates = (chunks.unsqueeze(2) * width + torch.arange(width, device=block.device)).flatten(1)
    absent = candidates >= columns
    values = block.gather(1, candidates.masked_fill(absent, 0)).masked_fill(absent, -torch.inf)
    # The absent ones lie in the last chunk, so they come last among equals.
    order = values.sort(dim=1, descending=True, stable=True)[1][:, :k]
    found: Tensor = candidates.gather(1, order)
    return found


@REGISTRY.fake("_topk_stats")
def _fake_stats(logits: Tensor, temperature: Tensor | None, *rest: Any) -> Tensor:
    integer = torch.int64 if logits.dtype == torch.float64 else torch.int32
    return logits.new_empty((2 + 2 * rest[-1], logits.shape[:-1].numel()), dtype=integer)


REGISTRY.no_gradient("_topk_stats", "ppo::_topk_stats is a stage without a gradient of its own")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, temperature, vocab_size, vocab_start, group_name, _ = inputs
    _, ids, normalizers = output
    ctx.mark_non_differentiable(ids, normalizers)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, ids, temperature, normalizers)
    ctx.where = (_IGNORED, vocab_size, vocab_start, group_name)


@REGISTRY.autograd("_vocab_topk", _setup_context)
def _backward(
    ctx: Any, grad_log_probs: Tensor | None, grad_ids: None, grad_normalizers: None
) -> tuple[Tensor | None, ...]:
    grad_logits = None
    if grad_log_probs is not None:
        logits, ids, temperature, normalizers = ctx.saved_tensors
        grad_logits = _TARGETS_GRAD(logits, ids, temperature, *ctx.where, normalizers, grad_log_probs)
    return (grad_logits, *(None,) * 5)
