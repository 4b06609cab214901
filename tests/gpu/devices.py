"""Devices of the tests in this folder, and cases moved to them.

Every test here takes a `device`. Those under `gpu` need a GPU and are skipped without one; those under `portable` run
on the CPU instead, so that their bodies are known to work before a GPU is at hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ppo_ops
from tests import cases, oracle
from tests.tolerances import assert_budget, assert_fp64

GPU = torch.cuda.is_available()
# The only skip that `conftest` lets pass where there is a GPU; `need_memory` alone gives it.
TOO_SMALL = "the device's memory is too small"

_CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not GPU, reason="no GPU"))
gpu = pytest.mark.parametrize("device", [_CUDA])
portable = pytest.mark.parametrize("device", [_CUDA] if GPU else ["cpu", _CUDA])


def portable_cases(every: tuple[cases.Case, ...], on_cpu: int) -> pytest.MarkDecorator:
    """All cases on a GPU; without one every `on_cpu`-th on the CPU, where the rest of the suite runs them all."""
    params = [pytest.param("cuda", case, id=f"cuda-{case}", marks=_CUDA.marks) for case in every]
    if not GPU:
        params += [pytest.param("cpu", case, id=f"cpu-{case}") for case in every[::on_cpu]]
    return pytest.mark.parametrize(("device", "case"), params)


def need_memory(needed: float) -> None:
    """Skip where the device could not hold so many bytes if it were empty."""
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    if needed > 0.95 * total:
        pytest.skip(f"{TOO_SMALL}: {total / 2**30:.0f} GiB of {needed / 2**30:.0f}")
    torch.cuda.empty_cache()


def moved(tensor: Tensor, device: str) -> Tensor:
    """The tensor on a device with its strides and its place in its memory, also where elements overlap."""
    memory = tensor.new_empty(0).set_(tensor.untyped_storage())
    return memory.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def case_on(device: str, case: cases.Case) -> cases.Case:
    temperature = case.temperature
    return dataclasses.replace(
        case,
        logits=moved(case.logits.detach(), device),
        target=moved(case.target, device),
        keep_mask=None if case.keep_mask is None else moved(case.keep_mask, device),
        temperature=temperature.to(device) if isinstance(temperature, Tensor) else temperature,
    )


def run_on(
    device: str, case: cases.Case, function: Callable[..., Any] = ppo_ops.logprob_entropy, **more: Any
) -> oracle.Results:
    """As `oracle.run`, computed on a device; results on the CPU."""
    there = case_on(device, case)
    logits = there.logits.requires_grad_()
    log_prob, entropy = function(logits, there.target, there.keep_mask, **there.options(), **more)
    grads = [g.to(log_prob) for g in oracle.upstream(case)]
    (grad_logits,) = torch.autograd.grad((log_prob, entropy), logits, grads)
    assert log_prob.device == entropy.device == grad_logits.device == logits.device
    return oracle.Results(*(result.detach().cpu() for result in (log_prob, entropy, grad_logits)))


def check(ours: oracle.Results, case: cases.Case, near: oracle.Results | None = None) -> None:
    """As `oracle.check`; `near` is what may be half as wrong, the plain formula by default."""
    near = oracle.plain(case) if near is None else near
    for actual, other, right, scale in zip(ours, near, oracle.truth(case), oracle.scales(case), strict=True):
        if case.logits.dtype == torch.float64:
            assert_fp64(actual, right)
        else:
            assert_budget(actual, other, right, scale)


@dataclasses.dataclass
class Call:
    """Random arguments of one call; `fill` draws new ones into the same memory."""

    logits: Tensor
    target: Tensor
    options: dict[str, Any]
    entropy: bool = True

    def fill(self, seed: int) -> None:
        source = torch.Generator(self.logits.device).manual_seed(seed)
        self.logits.copy_(4 * torch.randn(self.logits.shape, generator=source, device=self.logits.device))
        self.target.random_(100, generator=source)
        self.target[1::4] = -100
        if "keep_mask" in self.options:
            self.options["keep_mask"].copy_(
                torch.rand(self.logits.shape, generator=source, device=self.logits.device) < 0.3
            )
        if isinstance(self.options.get("temperature"), Tensor):
            self.options["temperature"].uniform_(0.5, 2.0, generator=source)
        if "keep_ids" in self.options:
            self.options["keep_ids"].random_(100, generator=source)

    def outputs(self, logits: Tensor) -> tuple[Tensor, ...]:
        if self.entropy:
            return ppo_ops.logprob_entropy(logits, self.target, **self.options)
        return (ppo_ops.logprob(logits, self.target, **self.options),)

    def forward_backward(self) -> tuple[Tensor, ...]:
        """Outputs and gradient; the logits that the operator sees are an intermediate result."""
        leaf = self.logits.detach().requires_grad_()
        outputs = self.outputs(leaf * 1)
        weights = [torch.full_like(out, 0.5 + i) for i, out in enumerate(outputs)]
        return (*(out.detach() for out in outputs), *torch.autograd.grad(outputs, leaf, weights))


OPTIONS = (
    "plain",
    "log-prob alone",
    "number",
    "temperature",
    "per row",
    "padding",
    "mask",
    "mask, log-prob alone",
    "ids",
    "ids, log-prob alone",
    "in place",
    "ids in place",
    "everything",
)


def make_call(device: str, name: str, rows: int = 9, vocab: int = 40_001, dtype: torch.dtype = torch.float32) -> Call:
    """A call with an option of `OPTIONS`."""
    logits = torch.empty(rows, vocab, dtype=dtype, device=device)
    target = torch.empty(rows, dtype=torch.int64, device=device)
    options: dict[str, Any] = {}
    if "mask" in name or name == "everything":
        options["keep_mask"] = torch.empty(rows, vocab, dtype=torch.bool, device=device)
    if "ids" in name:
        options["keep_ids"] = torch.empty(12 * rows, dtype=torch.int32, device=device)
        offsets = torch.arange(rows + 1, device=device) * 12
        offsets[1] = 0  # an unrestricted row and one of 24 ids
        options["keep_offsets"] = offsets
    if "in place" in name:
        options["inplace_backward"] = True
    if name == "number":
        options["temperature"] = 0.7
    if name == "temperature":
        options["temperature"] = torch.empty((), device=device)
    if name in ("per row", "everything"):
        options["temperature"] = torch.empty(rows, device=device)
    if name in ("padding", "everything"):
        options["vocab_size"] = vocab - 77
    call = Call(logits, target, options, "alone" not in name)
    call.fill(0)
    return call
