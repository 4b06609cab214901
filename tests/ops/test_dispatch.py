"""The short way past the dispatcher is taken only where it leads to the same numbers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ppo_ops
from ppo_ops.kernels import cpu
from ppo_ops.ops.logprob_entropy import goes_straight_to_cpu
from tests.tolerances import assert_same_bits

LOGITS = torch.tensor([[2.0, 1.0, -torch.inf, 0.5], [0.0, 3.0, -1.0, 1e4], [0.0, 1.0, 2.0, 3.0]])
TARGET = torch.tensor([0, 3, -100])
TEMPERATURE = torch.tensor([0.5, 2.0, 1.0])


class Recorder(TorchDispatchMode):
    """Notes the operators that pass through the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Wrapped(Tensor):
    """A subclass that changes nothing."""


@pytest.mark.parametrize("mask", [None, LOGITS > 0.2], ids=["all", "kept"])
@pytest.mark.parametrize("temperature", [None, TEMPERATURE], ids=["one", "rows"])
def test_both_ways_agree(mask: Tensor | None, temperature: Tensor | None) -> None:
    options = {"temperature": 1.0 if temperature is None else temperature}
    short = ppo_ops.logprob_entropy(LOGITS, TARGET, mask, **options)
    with Recorder() as recorder, mock.patch.object(cpu, "finishes", return_value=False):
        long = ppo_ops.logprob_entropy(LOGITS, TARGET, mask, **options)
    assert "ppo._logprob_entropy.default" in recorder.names
    # The short way rounds once, the long way after each of at most five steps: 4 units in the last place of numbers
    # below 1e4 / 0.5 in their intermediate steps, which cancel to the outputs' size.
    torch.testing.assert_close(short, long, rtol=5e-7, atol=5e-7)


def test_negated_views_are_read_negated() -> None:
    short = ppo_ops.logprob_entropy(torch._neg_view(-LOGITS), TARGET, temperature=torch._neg_view(-TEMPERATURE))
    torch.testing.assert_close(short, ppo_ops.logprob_entropy(LOGITS, TARGET, temperature=TEMPERATURE), rtol=0, atol=0)


def test_what_goes_straight() -> None:
    assert goes_straight_to_cpu(LOGITS, TARGET, None, 3)
    with torch.inference_mode():
        assert goes_straight_to_cpu(LOGITS.clone())
    assert not goes_straight_to_cpu(LOGITS, torch._neg_view(LOGITS))
    assert not goes_straight_to_cpu(LOGITS.as_subclass(Wrapped))
    assert not goes_straight_to_cpu(LOGITS.to("meta"))
    with Recorder():
        assert not goes_straight_to_cpu(LOGITS)
    torch.vmap(lambda row: pytest.fail("took it") if goes_straight_to_cpu(row) else row)(LOGITS)


def test_an_import_under_another_default_device() -> None:
    """Tensors of that device do not go straight to the CPU's kernels."""
    code = (
        "import torch\n"
        "with torch.device('meta'):\n"
        "    import ppo_ops\n"
        "    print(ppo_ops.logprob(torch.empty(2, 4), torch.empty(2, dtype=torch.int64)).device)\n"
        "print(ppo_ops.logprob(torch.zeros(1, 4), torch.tensor([1])))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["meta", "tensor([-1.3863])"]), done.stderr


def test_another_default_device_changes_nothing(kernels: str) -> None:
    logits, target = torch.randn(9, 1025, generator=torch.Generator().manual_seed(0)), torch.arange(9) * 100
    target[4] = -100
    ids, offsets = torch.arange(90, dtype=torch.int32) * 11 % 1025, torch.arange(10) * 10
    weight, hidden = torch.linspace(-1, 1, 50).view(10, 5), torch.linspace(-1, 2, 45).view(9, 5)
    few = {"keep_ids": ids % 10, "keep_offsets": offsets}

    def everything(dtype: torch.dtype) -> list[Tensor]:
        x = logits.to(dtype).requires_grad_()
        outputs = [*ppo_ops.logprob_entropy(x, target, logits > 0, temperature=0.7)]
        outputs += ppo_ops.logprob_entropy(x, target, keep_ids=ids, keep_offsets=offsets)
        outputs += [ppo_ops.logprob(x, target.unsqueeze(1).expand(9, 3)), ppo_ops.sum_squared_probs(x)]
        outputs += [ppo_ops.vocab_parallel_topk(x, 3)[1]]
        grads = [torch.autograd.grad(out, x, torch.ones_like(out), retain_graph=True)[0] for out in outputs]
        return [*outputs, *grads, *ppo_ops.linear_logprob_entropy(hidden, weight, target % 10, **few)]

    for dtype in (torch.float32, torch.float64):
        expected = everything(dtype)
        with torch.device("meta"):
            found = everything(dtype)
        for ours, right in zip(found, expected, strict=True):
            assert_same_bits(ours.detach(), right.detach())


def test_a_traced_graph_holds_the_operator() -> None:
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: ppo_ops.logprob(x, TARGET))(LOGITS)
    assert torch.ops.ppo._logprob_entropy.default in {node.target for node in graph.graph.nodes}


def test_outputs_may_be_overwritten() -> None:
    logits = LOGITS.clone().requires_grad_()
    log_prob, entropy = ppo_ops.logprob_entropy(logits, TARGET)
    (expected,) = torch.autograd.grad((log_prob + entropy).sum(), logits, retain_graph=True)
    total = (log_prob + entropy).sum()
    with torch.no_grad():
        log_prob.zero_()
        entropy.zero_()
    (grad,) = torch.autograd.grad(total, logits)
    torch.testing.assert_close(grad, expected, rtol=0, atol=0)
