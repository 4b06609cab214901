"""The self-check of ``python -m ppo_ops``: a few small cases against `ppo_ops.reference`, in about a second.

Each check takes a device and raises `AssertionError` where a result is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import ppo_ops
from ppo_ops import reference

ROWS, VOCABULARY = 5, 4099  # a prime: no block divides it
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Values are float32 sums of thousands of terms, near 10; gradients are rounded once to the logits' dtype.
NEAR = 1e-5


def _inputs(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits with a banned column, targets with an ignored one, and a kept set that drops some targets."""
    source = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(ROWS, VOCABULARY, generator=source)
    logits[:, 7] = -torch.inf
    target = torch.randint(8, VOCABULARY, (ROWS,), generator=source)
    target[1] = -100
    keep = torch.rand(ROWS, VOCABULARY, generator=source) < 0.1
    return logits.to(device, dtype), target.to(device), keep.to(device)


def _results(function: Callable[..., Any], logits: Tensor, *args: Any, **more: Any) -> tuple[Tensor, Tensor, Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    log_prob, entropy = function(leaf * 1, *args, **more)
    (log_prob.sum() + 0.5 * entropy.square().sum()).backward()
    assert leaf.grad is not None
    return log_prob.detach(), entropy.detach(), leaf.grad


def _compare(device: str, kept: bool, gradient: bool, **more: Any) -> None:
    for dtype in DTYPES:
        logits, target, keep = _inputs(device, dtype)
        arguments = (logits, target, keep if kept else None)
        found = _results(ppo_ops.logprob_entropy, *arguments, temperature=0.8, **more)
        right = _results(reference.logprob_entropy, logits.double(), *arguments[1:], temperature=0.8)
        if gradient:
            rtol = 2 * torch.finfo(dtype).eps + NEAR
            torch.testing.assert_close(found[2].double(), right[2], rtol=rtol, atol=NEAR / 10)
        else:
            for value, expected in zip(found[:2], right[:2], strict=True):
                torch.testing.assert_close(value.double(), expected, rtol=NEAR, atol=NEAR)


def _in_place(device: str) -> None:
    """The gradient of an intermediate result lies in that result's memory."""
    for dtype in DTYPES:
        source, target, _ = _inputs(device, dtype)
        leaf = source.clone().requires_grad_()
        logits = leaf * 1
        log_prob, entropy = ppo_ops.logprob_entropy(logits, target, inplace_backward=True)
        (log_prob.sum() + entropy.sum()).backward()
        fresh = source.clone().requires_grad_()
        sum(value.sum() for value in ppo_ops.logprob_entropy(fresh, target)).backward()  # type: ignore[union-attr]
        assert leaf.grad is not None
        assert fresh.grad is not None
        assert torch.equal(leaf.grad, fresh.grad), "the gradient in place has other bits"
        assert torch.equal(logits.detach(), fresh.grad), "the logits were not overwritten"


CHECKS: dict[str, Callable[[str], None]] = {
    "forward": lambda device: _compare(device, kept=False, gradient=False),
    "gradient": lambda device: _compare(device, kept=False, gradient=True),
    "kept set": lambda device: _compare(device, kept=True, gradient=False),
    "kept set, gradient": lambda device: _compare(device, kept=True, gradient=True),
    "in place": _in_place,
}
