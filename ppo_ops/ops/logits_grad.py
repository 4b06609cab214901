"""Backward: gradient of both outputs in one pass over the logits.

    z = (x - row_max) / T - log_sum        p = e^z        p_kept likewise on the kept set, 0 off it
    grad = [ g_lp (1[v = target] - p_kept) - g_H p (z + H) ] / T

Shapes: logits and grad_logits ``[..., V_local]``, normalizers ``[K, N]``, upstream gradients shaped like target, any
strides. One read, one write, no collective. A zero upstream gradient gives an exactly zero row even where the row's
statistics are NaN, and that row is not read.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ppo_ops.kernels import cpu, cuda
from ppo_ops.ops.groups import shard
from ppo_ops.ops.schemas import REGISTRY
from ppo_ops.ops.vocab_stats import flat_int64


@REGISTRY.fake("_logits_grad")
def _fake(
    logits: Tensor,
    target: Tensor,
    keep_mask: Tensor | None,
    temperature: Tensor | None,
    normalizers: Tensor,
    grad_log_prob: Tensor | None,
    grad_entropy: Tensor | None,
    ignore_index: int,
    vocab_size: int | None,
    vocab_start: int | None,
    group_name: str,
    keep_ids: Tensor | None = None,
    keep_offsets: Tensor | None = None,
) -> Tensor:
    return logits.new_empty(logits.shape)


@REGISTRY.fake("_logits_grad_")
def _fake_inplace(
    logits: Tensor,
    target: Tensor,
    keep_mask: Tensor | None,
    temperature: Tensor | None,
    normalizers: Tensor,
    grad_log_prob: Tensor | None,
    grad_entropy: Tensor | None,
    ignore_index: int,
    vocab_size: int | None,
    vocab_start: int | None,
    group_name: str,
    keep_ids: Tensor | None = None,
    keep_offsets: Tensor | None = None,
) -> None:
    return None


def _flat(grad: Tensor | None, normalizers: Tensor) -> Tensor | None:
    return None if grad is None else grad.reshape(-1).to(normalizers.dtype)


def _write(
    kernels: ModuleType,
    grad_logits: Tensor,
    logits: Tensor,
    target: Tensor,
    keep_mask: Tensor | None,
    temperature: Tensor | None,
    normalizers: Tensor,
    grad_log_prob: Tensor | None,
    grad_entropy: Tensor | None,
    ignore_index: int,
    vocab_size: int | None,
    vocab_start: int | None,
    group_name: str,
    keep_ids: Tensor | None = None,
    keep_offsets: Tensor | None = None,
) -> None:
    where = shard(logits, vocab_size, vocab_start, group_name, None)
    flat_target = target.reshape(-1) if kernels is cuda and keep_ids is None else flat_int64(target)
    flat_temperature = None if temperature is None else temperature.reshape(-1)
    upstream = (_flat(grad_log_prob, normalizers), _flat(grad_entropy, normalizers))
    place = (ignore_index, where.start, where.columns)
    if keep_ids is None or keep_offsets is None:
        rows = (logits, flat_target, keep_mask, flat_temperature)
        kernels.logits_grad(*rows, normalizers, *upstream, grad_logits, *place)
    else:
        ragged = (logits, flat_target, keep_ids, keep_offsets, flat_temperature)
        kernels.kept_logits_grad(*ragged, normalizers, *upstream, grad_logits, *place)


def _into_new_memory(kernels: ModuleType) -> Callable[..., Tensor]:
    def logits_grad(logits: Tensor, *args: Any) -> Tensor:
        grad_logits = logits.new_empty(logits.shape)
        _write(kernels, grad_logits, logits, *args)
        return grad_logits

    return logits_grad


def _over_logits(kernels: ModuleType) -> Callable[..., None]:
    def logits_grad_(logits: Tensor, *args: Any) -> None:
        _write(kernels, logits, logits, *args)

    return logits_grad_


for _key, _kernels in (("CPU", cpu), ("CUDA", cuda)):
    REGISTRY.impl("_logits_grad", _key)(_into_new_memory(_kernels))
    REGISTRY.impl("_logits_grad_", _key)(_over_logits(_kernels))


@REGISTRY.impl_below_autograd("_logits_grad_")
def _count_version(keyset: torch._C.DispatchKeySet, logits: Tensor, *args: Any) -> None:
    """Bump the version counter: any later use of the logits in backward becomes an error, never a wrong number."""
    torch.autograd.graph.increment_version(logits)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        torch.ops.ppo._logits_grad_.default.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, logits, *args)


REGISTRY.no_gradient(
    "_logits_grad",
    "ppo::logprob and ppo::logprob_entropy cannot be differentiated twice: double backward is not implemented",
)
