"""The composition: public operators, the core operator, its fake kernel and its autograd formula.

    ppo::logprob, ppo::logprob_entropy    composite: validate, call the core; one node in an exported graph
    ppo::_logprob_entropy                 core: stage 1, all-gather, merge; holds the autograd formula

While AOTAutograd traces for a compiler, the core is decomposed into its stages, so that the compiler sees the
collective and can order it: an opaque operator with a collective inside could deadlock against collectives that the
compiler moves. While exporting it stays whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from ppo_ops.kernels import cpu
from ppo_ops.ops.checks import check_arguments
from ppo_ops.ops.groups import group_size
from ppo_ops.ops.merge_stats import fake_outputs, merge_stats
from ppo_ops.ops.schemas import REGISTRY
from ppo_ops.ops.vocab_stats import one_rank_cpu, stats_per_row, vocab_stats_cpu

_CORE = torch.ops.ppo._logprob_entropy.default
_VOCAB_STATS = torch.ops.ppo._vocab_stats.default
_LOGITS_GRAD = torch.ops.ppo._logits_grad.default
_LOGITS_GRAD_INPLACE = torch.ops.ppo._logits_grad_.default


@REGISTRY.impl("logprob", "CompositeImplicitAutograd")
def _logprob(
    logits: Tensor,
    target: Tensor,
    keep_mask: Tensor | None = None,
    *,
    keep_ids: Tensor | None = None,
    keep_offsets: Tensor | None = None,
    temperature: Tensor | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    inplace_backward: bool = False,
    group_name: str = "",
) -> Tensor:
    sets = (keep_ids, keep_offsets)
    check_arguments(
        logits, target, keep_mask, *sets, temperature, vocab_size, vocab_start, inplace_backward, group_name
    )
    where = (ignore_index, vocab_size, vocab_start, group_name)
    return _call_core(logits, target, keep_mask, temperature, *where, False, inplace_backward, *sets)[0]


@REGISTRY.impl("logprob_entropy", "CompositeImplicitAutograd")
def _logprob_entropy(
    logits: Tensor,
    target: Tensor,
    keep_mask: Tensor | None = None,
    *,
    keep_ids: Tensor | None = None,
    keep_offsets: Tensor | None = None,
    temperature: Tensor | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    inplace_backward: bool = False,
    group_name: str = "",
) -> tuple[Tensor, Tensor]:
    sets = (keep_ids, keep_offsets)
    check_arguments(
        logits, target, keep_mask, *sets, temperature, vocab_size, vocab_start, inplace_backward, group_name
    )
    where = (ignore_index, vocab_size, vocab_start, group_name)
    log_prob, entropy, _ = _call_core(logits, target, keep_mask, temperature, *where, True, inplace_backward, *sets)
    return log_prob, entropy


def _call_core(logits: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    if logits.requires_grad and torch.is_grad_enabled():
        return _CORE(logits, *args)  # type: ignore[no-any-return]
    if goes_straight_to_cpu(logits, *args):
        return _core(logits, *args, straight=True)
    # What the autograd layer would do without a gradient, less its 25 microseconds of Python.
    with torch._C._AutoDispatchBelowAutograd():
        return _CORE(logits, *args)  # type: ignore[no-any-return]


# Dispatch keys of a tensor of the CPU that nothing wraps, made outside and inside of inference mode.
_PLAIN_KEYS = {torch._C._dispatch_keys(torch.empty(0, device="cpu")).raw_repr()}
with torch.inference_mode():
    _PLAIN_KEYS.add(torch._C._dispatch_keys(torch.empty(0, device="cpu")).raw_repr())


def goes_straight_to_cpu(*args: Any) -> bool:
    """Whether the dispatcher, below autograd, would call the CPU kernels and nothing else for these arguments.

    A step through the dispatcher into Python costs 8 microseconds, a third of a small call.
    """
    if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    for arg in args:
        if isinstance(arg, Tensor) and (
            type(arg) is not Tensor or torch._C._dispatch_keys(arg).raw_repr() not in _PLAIN_KEYS
        ):
            return False
    return True


@REGISTRY.decomposed("_logprob_entropy")
@REGISTRY.impl("_logprob_entropy", "CompositeExplicitAutograd")
def _core(
    logits: Tensor,
    target: Tensor,
    keep_mask: Tensor | None,
    temperature: Tensor | None,
    ignore_index: int,
    vocab_size: int | None,
    vocab_start: int | None,
    group_name: str,
    with_entropy: bool,
    inplace_backward: bool,
    keep_ids: Tensor | None = None,
    keep_offsets: Tensor | None = None,
    *,
    straight: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Stages 1 to 3. Callers that know it say whether the arguments go straight to the CPU's kernels."""
    rows = (logits, target, keep_mask, temperature)
    where = (ignore_index, vocab_size, vocab_start, group_name)
    if straight is None:
        straight = goes_straight_to_cpu(*rows, keep_ids, keep_offsets)
    size = group_size(group_name)
    if straight and size == 1 and cpu.finishes(logits, keep_offsets):
        outputs = one_rank_cpu(*rows, *where, with_entropy, keep_ids, keep_offsets)
    else:
        vocab_stats = vocab_stats_cpu if straight else _VOCAB_STATS
        stats = vocab_stats(*rows, *where, size, with_entropy, keep_ids, keep_offsets)
        outputs = merge_stats(stats, target, temperature, ignore_index, size, group_name)
    if vocab_start is not None and vocab_size is None and _is_real_on_cpu(logits):
        _check_owned(target, outputs[2], ignore_index)
    return outputs


def _is_real_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and not isinstance(tensor, (FakeTensor, FunctionalTensor))


def _check_owned(target: Tensor, normalizers: Tensor, ignore_index: int) -> None:
    """Raise `IndexError` where no rank owns a target, for a vocabulary whose end no rank knows beforehand.

    All ranks see the same merged numbers, so all of them raise. Inside a compiled graph such a row's log-prob is NaN.
    """
    flat_target = target.reshape(-1).to(torch.int64)
    bad = normalizers[2].isnan() & ~normalizers[1].isnan() & (flat_target != ignore_index)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise IndexError(f"target must be on some rank's shard, got {int(flat_target[row])} in row {row}")


@REGISTRY.fake("_logprob_entropy")
def _fake(
    logits: Tensor,
    target: Tensor,
    keep_mask: Tensor | None,
    temperature: Tensor | None,
    ignore_index: int,
    vocab_size: int | None,
    vocab_start: int | None,
    group_name: str,
    with_entropy: bool,
    inplace_backward: bool,
    keep_ids: Tensor | None = None,
    keep_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    kept_set = keep_mask if keep_offsets is None else keep_offsets
    return fake_outputs(logits, target, stats_per_row(kept_set, with_entropy), with_entropy)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, target, keep_mask, temperature, *where, with_entropy, inplace_backward, keep_ids, keep_offsets = inputs
    _, entropy, normalizers = output
    ctx.mark_non_differentiable(*((normalizers,) if with_entropy else (entropy, normalizers)))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, target, keep_mask, temperature, normalizers, keep_ids, keep_offsets)
    ctx.where = where
    ctx.inplace_backward = inplace_backward


@REGISTRY.autograd("_logprob_entropy", _setup_context)
def _backward(
    ctx: Any, grad_log_prob: Tensor | None, grad_entropy: Tensor | None, grad_normalizers: None
) -> tuple[Tensor | None, ...]:
    grad_logits = None
    if grad_log_prob is not None or grad_entropy is not None:
        logits, *rows, keep_ids, keep_offsets = ctx.saved_tensors
        rest = (*rows, grad_log_prob, grad_entropy, *ctx.where, keep_ids, keep_offsets)
        if ctx.inplace_backward and _may_overwrite(logits):
            _LOGITS_GRAD_INPLACE(logits, *rest)
            grad_logits = logits.detach()
        else:
            grad_logits = _LOGITS_GRAD(logits, *rest)
    # Trailing Nones may outnumber the arguments: the dispatcher drops those that equal their defaults.
    return (grad_logits, *(None,) * 11)


def _may_overwrite(logits: Tensor) -> bool:
    """Not while a compiler traces, which plans memory itself, nor under create_graph, which would need them again."""
    return not (torch.is_grad_enabled() or isinstance(logits, (FakeTensor, FunctionalTensor)))
