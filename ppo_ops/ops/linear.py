"""Log-prob and entropy from hidden states and the output weight: the logits exist one chunk at a time.

    x = hidden @ weight.T + bias        log_prob, entropy = logprob_entropy(x)

    ppo::linear_logprob, ppo::linear_logprob_entropy    composite: validate, call the core; one node when exported
    ppo::_linear_logprob_entropy                        core: stage 1, all-gather, merge; holds the autograd formula
    ppo::_linear_vocab_stats                            stage 1, local: every chunk's GEMM and row kernel

The layers are those of `logprob_entropy.py`. Shapes: hidden ``[..., H]``, weight ``[V_local, H]``, bias ``[V_local]``.

Note [GEMMs inside a stage]
    How many chunks there are depends on the number of rows, which a compiled graph may leave open, and all chunks
    share one workspace. So a graph holds the loop of GEMMs as one node (their shapes are known to it only as a cost),
    and the collectives, of which there is one each way, beside it as nodes that the compiler can order.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ppo_ops.kernels import cpu, cuda, linear
from ppo_ops.kernels.linear_rows import Rows
from ppo_ops.ops.groups import Shard, group_size, shard
from ppo_ops.ops.linear_checks import check_linear_arguments, compute_dtype
from ppo_ops.ops.logprob_entropy import _check_owned, _is_real_on_cpu
from ppo_ops.ops.merge_stats import fake_outputs, merge_stats
from ppo_ops.ops.schemas import REGISTRY, accumulation_dtype
from ppo_ops.ops.vocab_stats import check_keep_sets, check_target, check_temperature_values, flat_int64, stats_per_row

_CORE = torch.ops.ppo._linear_logprob_entropy.default
_VOCAB_STATS = torch.ops.ppo._linear_vocab_stats.default
_BACKWARD = torch.ops.ppo._linear_backward.default


def _call_core(
    with_entropy: bool,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    keep_ids: Tensor | None = None,
    keep_offsets: Tensor | None = None,
    temperature: Tensor | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    reduce_grad_hidden: bool = True,
    group_name: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Validate, and call the core."""
    sets = (keep_ids, keep_offsets)
    check_linear_arguments(hidden, weight, target, bias, *sets, temperature, vocab_size, vocab_start, group_name)
    layer = (hidden, weight, bias, target, temperature, *sets, compute_dtype(hidden, weight))
    where = (ignore_index, vocab_size, vocab_start, group_name)
    return _CORE(*layer, *where, with_entropy, reduce_grad_hidden)  # type: ignore[no-any-return]


@REGISTRY.impl("linear_logprob", "CompositeImplicitAutograd")
def _linear_logprob(*args: Any, **kwargs: Any) -> Tensor:
    return _call_core(False, *args, **kwargs)[0]


@REGISTRY.impl("linear_logprob_entropy", "CompositeImplicitAutograd")
@REGISTRY.impl("linear_logprob_entropy.kept", "CompositeImplicitAutograd")
def _linear_logprob_entropy(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return _call_core(True, *args, **kwargs)[:2]


@REGISTRY.decomposed("_linear_logprob_entropy")
@REGISTRY.impl("_linear_logprob_entropy", "CompositeExplicitAutograd")
def _core(
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
    with_entropy: bool,
    reduce_grad_hidden: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    size = group_size(group_name)
    layer = (hidden, weight, bias, target, temperature, keep_ids, keep_offsets, compute)
    stats = _VOCAB_STATS(*layer, ignore_index, vocab_size, vocab_start, group_name, size, with_entropy)
    outputs = merge_stats(stats, target, temperature, ignore_index, size, group_name)
    if vocab_start is not None and vocab_size is None and _is_real_on_cpu(hidden):
        _check_owned(target, outputs[2], ignore_index)
    return outputs


@REGISTRY.fake("_linear_logprob_entropy")
def _fake(
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
    with_entropy: bool,
    reduce_grad_hidden: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return fake_outputs(hidden, target, stats_per_row(keep_offsets, with_entropy), with_entropy)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, compute, ignore_index, vocab_size, vocab_start, group_name, with_entropy, reduce_grad_hidden = inputs
    _, entropy, normalizers = output
    ctx.mark_non_differentiable(*((normalizers,) if with_entropy else (entropy, normalizers)))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, normalizers)
    ctx.where = (compute, ignore_index, vocab_size, vocab_start, group_name)
    ctx.reduce_grad_hidden = reduce_grad_hidden


@REGISTRY.autograd("_linear_logprob_entropy", _setup_context)
def _backward(
    ctx: Any, grad_log_prob: Tensor | None, grad_entropy: Tensor | None, grad_normalizers: None
) -> tuple[Tensor | None, ...]:
    none = (None,) * 14
    if grad_log_prob is None and grad_entropy is None:
        return none
    *tensors, normalizers = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:3])
    upstream = (normalizers, grad_log_prob, grad_entropy)
    found = _BACKWARD(*tensors, *ctx.where, *upstream, wanted, ctx.reduce_grad_hidden)
    return (*(grad if want else None for grad, want in zip(found, wanted, strict=True)), *none[3:])


def layer_of(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, compute: torch.dtype, where: Shard
) -> tuple[Tensor, linear.Layer]:
    """Hidden states as rows, and the layer without padding columns."""
    bias = None if bias is None else bias[: where.columns]
    layer = linear.Layer(weight[: where.columns], bias, compute, accumulation_dtype(hidden))
    return hidden.reshape(hidden.shape[:-1].numel(), hidden.shape[-1]), layer


def _stage(kernels: ModuleType) -> Any:
    def vocab_stats(
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
        group_size: int,
        with_entropy: bool,
    ) -> Tensor:
        where = shard(weight.t(), vocab_size, vocab_start, group_name, group_size)
        target = flat_int64(target)
        temperature = None if temperature is None else temperature.reshape(-1)
        if kernels is cpu:
            check_target(target, ignore_index, where)
            if temperature is not None:
                check_temperature_values(temperature)
            if keep_ids is not None and keep_offsets is not None:
                check_keep_sets(keep_ids, keep_offsets, where)
        matrix, layer = layer_of(hidden, weight, bias, compute, where)
        rows = Rows(target, temperature, keep_ids, keep_offsets, ignore_index, where.start, where.end)
        stats = _fake_stats(hidden, target, keep_offsets, with_entropy)
        with torch.autocast(hidden.device.type, enabled=False):
            linear.vocab_stats(kernels, matrix, layer, rows, stats)
        return stats

    return vocab_stats


def _fake_stats(hidden: Tensor, target: Tensor, keep_offsets: Tensor | None, with_entropy: bool) -> Tensor:
    shape = (stats_per_row(keep_offsets, with_entropy), target.numel())
    return hidden.new_empty(shape, dtype=accumulation_dtype(hidden))


@REGISTRY.fake("_linear_vocab_stats")
def _fake_vocab_stats(
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
    group_size: int,
    with_entropy: bool,
) -> Tensor:
    return _fake_stats(hidden, target, keep_offsets, with_entropy)


for _key, _kernels in (("CPU", cpu), ("CUDA", cuda)):
    REGISTRY.impl("_linear_vocab_stats", _key)(_stage(_kernels))


REGISTRY.no_gradient(
    "_linear_vocab_stats",
    "ppo::_linear_vocab_stats is a stage without a gradient of its own: differentiate ppo::linear_logprob or "
    "ppo::linear_logprob_entropy",
)
