"""Backward of the output layer: each chunk's logits again, their gradient over them, and two GEMMs.

    grad_x = d (log_prob, entropy) / d x                          (see `logits_grad.py`)
    grad_hidden = grad_x @ weight      grad_weight = grad_x.T @ hidden      grad_bias = sum of grad_x over rows

    ppo::_linear_backward   composition: the stage, and the sum of grad_hidden over the group
    ppo::_linear_grads      stage, local; what `wanted` leaves out is neither computed nor allocated

Note [Sum over the group]
    Every rank holds the same hidden states and some columns of the logits, so its `grad_hidden` is a part of a sum:
    one all-reduce, in the accumulation dtype, rounded once after it. A caller that reduces by itself, for instance by
    the reduce-scatter of sequence parallelism, asks for the part with ``reduce_grad_hidden=False``.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ppo_ops.kernels import cpu, cuda, linear
from ppo_ops.kernels.linear_rows import Rows, Upstream
from ppo_ops.ops.groups import group_size, shard
from ppo_ops.ops.linear import layer_of
from ppo_ops.ops.schemas import REGISTRY, accumulation_dtype
from ppo_ops.ops.vocab_stats import flat_int64

_GRADS = torch.ops.ppo._linear_grads.default

Gradients = tuple[Tensor, Tensor, Tensor]


@REGISTRY.decomposed("_linear_backward")
@REGISTRY.impl("_linear_backward", "CompositeExplicitAutograd")
def _linear_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperature: Tensor | None,
    keep_ids: Tensor | None,
    keep_offsets: Tensor | None,
    compute: torch.dtype,
    ignore_index: int,
    vocab_size: int | None,
    vocab_start: int | None,
    group_name: str,
    normalizers: Tensor,
    grad_log_prob: Tensor | None,
    grad_entropy: Tensor | None,
    wanted: list[bool],
    reduce_grad_hidden: bool,
) -> Gradients:
    layer = (hidden, weight, bias, target, temperature, keep_ids, keep_offsets, compute)
    where = (ignore_index, vocab_size, vocab_start, group_name)
    reduced = wanted[0] and reduce_grad_hidden and group_size(group_name) > 1
    upstream = (normalizers, grad_log_prob, grad_entropy)
    grad_hidden, grad_weight, grad_bias = _GRADS(*layer, *where, *upstream, wanted, reduced)
    if reduced:
        functional = torch.ops._c10d_functional
        summed = functional.wait_tensor(functional.all_reduce(grad_hidden, "sum", group_name))
        grad_hidden = summed.to(hidden.dtype)
    return grad_hidden, grad_weight, grad_bias


def _empty(hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool], wide: bool) -> Gradients:
    """Memory for what is wanted; no elements for what is not."""
    dtype = accumulation_dtype(hidden) if wide else hidden.dtype
    bias_like = weight if bias is None else bias
    return (
        hidden.new_empty(hidden.shape if wanted[0] else (0,), dtype=dtype),
        weight.new_empty(weight.shape if wanted[1] else (0,)),
        bias_like.new_empty((weight.shape[0] if wanted[2] else 0,)),
    )


@REGISTRY.fake("_linear_backward")
def _fake_backward(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Gradients:
    *_, wanted, _ = rest
    return _empty(hidden, weight, bias, wanted, False)


@REGISTRY.fake("_linear_grads")
def _fake_grads(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Gradients:
    *_, wanted, wide_grad_hidden = rest
    return _empty(hidden, weight, bias, wanted, wide_grad_hidden)


def _sum_into(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for the sum over chunks: the gradient itself where it has the accumulation dtype."""
    return grad if grad.dtype == dtype else grad.new_empty(grad.shape, dtype=dtype)


def _stage(kernels: ModuleType) -> Any:
    def linear_grads(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        temperature: Tensor | None,
        keep_ids: Tensor | None,
        keep_offsets: Tensor | None,
        compute: torch.dtype,
        ignore_index: int,
        vocab_size: int | None,
        vocab_start: int | None,
        group_name: str,
        normalizers: Tensor,
        grad_log_prob: Tensor | None,
        grad_entropy: Tensor | None,
        wanted: list[bool],
        wide_grad_hidden: bool,
    ) -> Gradients:
        where = shard(weight.t(), vocab_size, vocab_start, group_name, None)
        matrix, layer = layer_of(hidden, weight, bias, compute, where)
        temperature = None if temperature is None else temperature.reshape(-1)
        sets = (keep_ids, keep_offsets)
        rows = Rows(flat_int64(target), temperature, *sets, ignore_index, where.start, where.end)
        flat = [None if g is None else g.reshape(-1).to(normalizers.dtype) for g in (grad_log_prob, grad_entropy)]
        found = _empty(hidden, weight, bias, wanted, wide_grad_hidden)
        sums = [_sum_into(g, layer.accumulate) if want else None for g, want in zip(found[1:], wanted[1:], strict=True)]
        grad_hidden = found[0].view(matrix.shape) if wanted[0] else None
        gradients = linear.Gradients(grad_hidden, *sums)
        with torch.autocast(hidden.device.type, enabled=False):
            linear.grads(kernels, matrix, layer, rows, Upstream(normalizers, *flat), gradients)
        for grad, total in zip(found[1:], sums, strict=True):
            if total is not None and total is not grad:
                grad.copy_(total)
        return found

    return linear_grads


for _key, _kernels in (("CPU", cpu), ("CUDA", cuda)):
    REGISTRY.impl("_linear_grads", _key)(_stage(_kernels))


for _name in ("_linear_backward", "_linear_grads"):
    REGISTRY.no_gradient(
        _name,
        "ppo::linear_logprob and ppo::linear_logprob_entropy cannot be differentiated twice: double backward is not "
        "implemented",
    )
