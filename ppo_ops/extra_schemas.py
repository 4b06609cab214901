"""Schemas of the operators behind the extra outputs, all private, and how their stages are registered.

    targets:   logits --_targets_stats--> [2 + K, N] --all_gather, merge--> log_prob     backward: _targets_grad
    top-k:     logits --_topk_stats-----> [2 + 2k, N] --all_gather, merge--> ids, log_probs          _targets_grad
    squares:   logits --_squares_stats--> [3, N] --all_gather, merge--> sum of p^2                   _squares_grad

As in `ops/schemas.py`, only stages learn this rank's place, when they run; the cores are taken apart while a compiler
traces, so that it sees the collective.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from ppo_ops.ops.checks import check_arguments
from ppo_ops.ops.schemas import REGISTRY

_WHERE = "SymInt? vocab_size, SymInt? vocab_start, str group_name"
_TARGETS = f"Tensor logits, Tensor target, Tensor? temperature, int ignore_index, {_WHERE}"
_LOGITS = f"Tensor logits, Tensor? temperature, {_WHERE}"

EXTRA = {
    "_targets_logprob": f"({_TARGETS}) -> (Tensor log_prob, Tensor normalizers)",
    "_targets_stats": f"({_TARGETS}, int group_size) -> Tensor stats",
    "_targets_grad": f"({_TARGETS}, Tensor normalizers, Tensor grad_log_prob) -> Tensor grad_logits",
    "_vocab_topk": f"({_LOGITS}, int k) -> (Tensor log_probs, Tensor ids, Tensor normalizers)",
    "_topk_stats": f"({_LOGITS}, int group_size, int k) -> Tensor packed",
    "_sum_squared_probs": f"({_LOGITS}) -> (Tensor squares, Tensor normalizers)",
    "_squares_stats": f"({_LOGITS}, int group_size) -> Tensor stats",
    "_squares_grad": f"({_LOGITS}, Tensor normalizers, Tensor grad_squares) -> Tensor grad_logits",
}

if REGISTRY.active:
    for _name, _schema in EXTRA.items():
        _tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
        REGISTRY.library.define(_name + _schema, tags=_tags)


def _setup_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def without_gradient(name: str, message: str) -> None:
    """Make differentiating a stage an error; without a formula it would be a warning and a wrong number."""

    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError(message)

    REGISTRY.autograd(name, _setup_nothing)(backward)


def check_logits(
    logits: Tensor, temperature: Tensor | None, vocab_size: int | None, vocab_start: int | None, group_name: str
) -> None:
    """`check_arguments` for functions without a target."""
    target = logits.new_zeros((), dtype=torch.int64).expand(logits.shape[:-1] if logits.dim() else ())
    check_arguments(logits, target, None, None, None, temperature, vocab_size, vocab_start, False, group_name)


def check_no_grad(temperature: Any) -> None:
    if isinstance(temperature, Tensor) and temperature.requires_grad and torch.is_grad_enabled():
        raise ValueError("temperature must not require grad: its gradient is not computed; pass temperature.detach()")


def flat_temperature(temperature: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """``[N]`` or 0-dim, as merging takes it."""
    if temperature is None:
        return None
    return (temperature.reshape(-1) if temperature.dim() else temperature).to(dtype)
