"""Runs a case through an implementation and judges the results by `ppo_ops.reference` and the rules of `tolerances`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

import ppo_ops
from ppo_ops import reference
from tests.cases import Case, generator
from tests.tolerances import FLOOR, assert_budget, assert_exact, assert_fp64


class Results(NamedTuple):
    log_prob: Tensor
    entropy: Tensor
    grad_logits: Tensor


def upstream(case: Case) -> tuple[Tensor, Tensor]:
    """Upstream gradients of both outputs, float64, with some exact zeros."""
    source = generator(case.name + " upstream")
    grads = torch.randn(2, case.target.numel(), generator=source, dtype=torch.float64)
    grads[:, 3::7] = 0.0
    return grads[0].view(case.target.shape), grads[1].view(case.target.shape)


def run(function: Callable[..., Any], case: Case, logits: Tensor | None = None, **more: Any) -> Results:
    """Both outputs of `function` and the gradient under `upstream`."""
    logits = (case.logits if logits is None else logits).detach().requires_grad_()
    log_prob, entropy = function(logits, case.target, case.keep_mask, **case.options(), **more)
    grads = [g.to(log_prob.dtype) for g in upstream(case)]
    (grad_logits,) = torch.autograd.grad((log_prob, entropy), logits, grads)
    return Results(log_prob.detach(), entropy.detach(), grad_logits)


@functools.cache
def truth(case: Case) -> Results:
    return run(reference.logprob_entropy, case, case.logits.double())


@functools.cache
def plain(case: Case) -> Results:
    """What unfused torch code gives in float32 (float64 for float64 logits)."""
    dtype = torch.float64 if case.logits.dtype == torch.float64 else torch.float32
    return run(reference.logprob_entropy, case, dtype=dtype)


def _uncertain_p(x: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities, floored, and probabilities times 1 + |z|: p = e^z is as uncertain as z is large."""
    z = (x - x.amax(-1, keepdim=True)) / divisor
    log_p = z.log_softmax(-1)
    # A probability below the smallest normal float32 may be flushed to 0; that of a banned token is exactly 0.
    tiny = torch.finfo(torch.float32).smallest_normal / (FLOOR * torch.finfo(torch.float32).eps)
    p = (log_p.exp() * (1 - z.clamp(min=-1e4)) + tiny).masked_fill(z == -torch.inf, 0.0)
    return log_p.clamp(min=-1e4), p


@functools.cache
def scales(case: Case) -> Results:
    """Largest intermediate values: what a float32 computation of each result rounds at.

    log_prob and entropy: lse and the shifted logits, which are at most 1 + ln V + |result|. Gradient: the sum of the
    absolute values of its terms.
    """
    right = truth(case)
    valid = case.logits.shape[-1] if case.vocab_size is None else case.vocab_size
    target = case.target.to(torch.int64)
    ignored = target == case.ignore_index
    one = 1.0 + math.log(valid)
    log_prob, entropy = (r.abs().masked_fill(r.isinf(), 0.0) + one for r in right[:2])

    x = case.logits[..., :valid].double().masked_fill(ignored.unsqueeze(-1), 0.0)
    divisor = torch.as_tensor(case.temperature, dtype=torch.float64)
    divisor = divisor.unsqueeze(-1) if divisor.dim() else divisor
    index = target.masked_fill(ignored, 0).unsqueeze(-1)
    kept = x
    if case.keep_mask is not None:
        kept = x.masked_fill(~case.keep_mask[..., :valid].scatter(-1, index, True), -torch.inf)
    log_p, p = _uncertain_p(x, divisor)
    p_kept = _uncertain_p(kept, divisor)[1]
    a, b = (g.abs().unsqueeze(-1) / divisor for g in upstream(case))
    grad = a * (torch.zeros_like(x).scatter(-1, index, 1.0) + p_kept)
    grad = grad + b * p * (1 - log_p + right.entropy.unsqueeze(-1))
    padding = case.logits.shape[-1] - valid
    grad = torch.nn.functional.pad(grad, (0, padding)).masked_fill(ignored.unsqueeze(-1), 0.0)
    return Results(log_prob.masked_fill(ignored, 0.0), entropy.masked_fill(ignored, 0.0), grad)


def check(case: Case, function: Callable[..., Any] = ppo_ops.logprob_entropy) -> None:
    """Raise `AssertionError` unless both outputs and the gradient of `case` are right."""
    ours, near, right = run(function, case), plain(case), truth(case)
    if case.logits.dtype == torch.float64:
        for actual, expected in zip(ours, right, strict=True):
            assert_fp64(actual, expected)
        return
    for actual, plain_result, expected, scale in zip(ours, near, right, scales(case), strict=True):
        assert_budget(actual, plain_result, expected, scale)


def assert_same_results(actual: Results, expected: Results) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert_exact(a, e)


def _metadata(values: Any) -> list[Any]:
    tensors = (values,) if isinstance(values, Tensor) else values or ()
    return [(type(t), tuple(t.shape), t.dtype, t.stride(), t.device, t.requires_grad) for t in tensors]


def check_fake_like_real(op: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Raise `AssertionError` unless `op` gives shape, dtype, strides and device alike for real and fake tensors."""
    real = _metadata(op(*args, **kwargs))
    with FakeTensorMode() as mode:
        fake_args, fake_kwargs = tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
        fake = _metadata(op(*fake_args, **fake_kwargs))
    assert [(FakeTensor, *rest) for _, *rest in real] == fake
