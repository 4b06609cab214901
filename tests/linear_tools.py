"""Inputs of the fused output layer, its truth by `ppo_ops.reference`, and what float32 may be off by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ppo_ops
from ppo_ops import reference
from tests.cases import generator
from tests.tolerances import assert_budget


class Results(NamedTuple):
    log_prob: Tensor
    entropy: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor
    grad_bias: Tensor | None


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """Arguments of one call on one rank that holds the whole vocabulary."""

    name: str
    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None = None
    keep_mask: Tensor | None = None
    temperature: float | Tensor = 1.0
    vocab_size: int | None = None

    def __str__(self) -> str:
        return self.name

    def sets(self) -> dict[str, Tensor]:
        if self.keep_mask is None:
            return {}
        ids, offsets = ppo_ops.keep_sets_from_mask(self.keep_mask)
        return {"keep_ids": ids, "keep_offsets": offsets}

    def options(self) -> dict[str, Any]:
        return {**self.sets(), "temperature": self.temperature, "vocab_size": self.vocab_size}

    def upstream(self) -> tuple[Tensor, Tensor]:
        """Upstream gradients of both outputs, float64, with some exact zeros."""
        grads = torch.randn(2, self.target.numel(), generator=generator(self.name + " upstream"), dtype=torch.float64)
        grads[:, 3::7] = 0.0
        return grads[0].view(self.target.shape), grads[1].view(self.target.shape)


def make(
    name: str,
    rows: int = 37,
    vocab: int = 129,
    width: int = 24,
    dtype: torch.dtype = torch.float32,
    size: float = 3.0,
    **more: Any,
) -> Inputs:
    """Random inputs whose logits have the standard deviation `size`; every fifth target is ignored."""
    source = generator("linear " + name)
    hidden = torch.randn(rows, width, generator=source, dtype=torch.float64) * size / width**0.5
    weight = torch.randn(vocab, width, generator=source, dtype=torch.float64)
    target = torch.randint(more.get("vocab_size") or vocab, (rows,), generator=source)
    target[4::5] = -100
    options: dict[str, Any] = {}
    if more.pop("bias", False):
        options["bias"] = torch.randn(vocab, generator=source, dtype=torch.float64).to(dtype)
    if more.pop("kept", False):
        keep = torch.rand(rows, vocab, generator=source) < 0.3
        keep[2::6] = False  # empty rows are unrestricted
        keep[:, more.get("vocab_size") or vocab :] = False
        options["keep_mask"] = keep
    return Inputs(name, hidden.to(dtype), weight.to(dtype), target, **options, **more)


def everything(dtype: torch.dtype = torch.float32, name: str = "everything") -> Inputs:
    """Bias, kept sets, a temperature for each row, padding rows of weight."""
    temperature = 0.5 + torch.rand(37, generator=generator(name))
    return make(name, dtype=dtype, bias=True, kept=True, temperature=temperature, vocab_size=120)


def _gradients(inputs: Inputs, outputs: tuple[Tensor, Tensor], leaves: tuple[Tensor | None, ...]) -> Results:
    wanted = [leaf for leaf in leaves if leaf is not None]
    upstream = [grad.to(outputs[0].dtype) for grad in inputs.upstream()]
    grads = torch.autograd.grad(outputs, wanted, upstream)
    grad_bias = grads[2] if len(grads) == 3 else None
    return Results(outputs[0].detach(), outputs[1].detach(), grads[0], grads[1], grad_bias)


def leaves_of(inputs: Inputs, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    def leaf(tensor: Tensor | None) -> Any:
        return None if tensor is None else tensor.detach().to(dtype or tensor.dtype, copy=True).requires_grad_()

    return leaf(inputs.hidden), leaf(inputs.weight), leaf(inputs.bias)


def run(inputs: Inputs, function: Callable[..., Any] = ppo_ops.linear_logprob_entropy, **more: Any) -> Results:
    hidden, weight, bias = leaves = leaves_of(inputs)
    return _gradients(inputs, function(hidden, weight, inputs.target, bias, **inputs.options(), **more), leaves)


def through_logits(inputs: Inputs, dtype: torch.dtype) -> Results:
    """By the specification, in `dtype`."""
    hidden, weight, bias = leaves = leaves_of(inputs, dtype)
    logits = hidden @ weight.t() if bias is None else hidden @ weight.t() + bias
    mask = inputs.keep_mask
    if mask is not None:  # the specification has no rows without restriction
        mask = mask | ~mask.any(-1, keepdim=True)
    options = {"temperature": inputs.temperature, "vocab_size": inputs.vocab_size, "dtype": dtype}
    return _gradients(inputs, reference.logprob_entropy(logits, inputs.target, mask, **options), leaves)


def _scales(inputs: Inputs) -> Results:
    """Sums of the absolute values of all terms: what a float32 computation of each result rounds at."""
    hidden, weight = (t.detach().double().abs() for t in (inputs.hidden, inputs.weight))
    bias = 0.0 if inputs.bias is None else inputs.bias.double()
    terms = hidden @ weight.t() + (0.0 if inputs.bias is None else inputs.bias.double().abs())
    divisor = torch.as_tensor(inputs.temperature, dtype=torch.float64).reshape(-1, 1)
    x = inputs.hidden.double() @ inputs.weight.double().t() + bias
    valid = inputs.vocab_size or len(weight)
    x[:, valid:] = -torch.inf
    largest = terms.amax(1, keepdim=True) / divisor
    log_p = (x / divisor).log_softmax(-1)
    p = log_p.exp()
    kept = torch.ones_like(x, dtype=torch.bool) if inputs.keep_mask is None else inputs.keep_mask
    kept = (kept | ~kept.any(-1, keepdim=True)).scatter(1, inputs.target.clamp(min=0).unsqueeze(1), True)
    p_kept = (x / divisor).masked_fill(~kept, -torch.inf).softmax(-1)
    counts = (inputs.target != -100).unsqueeze(1)
    a, b = (g.abs().unsqueeze(1) / divisor * counts for g in inputs.upstream())
    one_hot = torch.zeros_like(x).scatter(1, inputs.target.clamp(min=0).unsqueeze(1), 1.0)
    # A probability e^z is as uncertain as z is large.
    uncertain = (1 + largest) * (a * p_kept + b * (p - (p * log_p).nan_to_num() + p * 10.0)) + a * one_hot
    output = (1 + largest.squeeze(1) + 10.0) * counts.squeeze(1)
    grad_bias = None if inputs.bias is None else uncertain.sum(0)
    return Results(output, output, uncertain @ weight, uncertain.t() @ hidden, grad_bias)


def check(inputs: Inputs, ours: Results | None = None) -> None:
    """Raise `AssertionError` unless values and gradients are right: to 1e-10 in float64, else within the budget."""
    ours = run(inputs) if ours is None else ours
    right = through_logits(inputs, torch.float64)
    if inputs.hidden.dtype == torch.float64:
        # Sums of 129 terms of size 10 in another order: eleven decimal places of float64 would be too many.
        for actual, expected in zip(ours, right, strict=True):
            if expected is not None:
                assert actual.dtype == torch.float64
                torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
        return
    plain = through_logits(inputs, torch.float32)
    for actual, near, expected, scale in zip(ours, plain, right, _scales(inputs), strict=True):
        if expected is not None:
            assert_budget(actual, near.to(actual.dtype), expected, scale)
