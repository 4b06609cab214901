"""Compiled together with checkpointing, autocast, compiled autograd, and with bad input."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.utils.checkpoint as ckpt

import ppo_ops
from tests.compiler.harness import TracedGraphs, operators


def _loss(logits: torch.Tensor, target: torch.Tensor, temperature: float | torch.Tensor = 1.0) -> torch.Tensor:
    log_prob, entropy = ppo_ops.logprob_entropy(logits, target, temperature=temperature)
    weight = torch.arange(1, len(log_prob) + 1)
    return (weight * log_prob - 0.01 * entropy).sum()


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 129, generator=generator).requires_grad_()
    return logits, torch.randint(0, 129, (6,), generator=generator)


def _grad(loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, logits)[0]


def test_checkpoint(inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, target = inputs
    graphs = TracedGraphs()

    def region(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return ckpt.checkpoint(lambda x, t: _loss(x.sin(), t), x, t, use_reentrant=False)

    compiled = torch.compile(region, backend=graphs, fullgraph=True)
    assert torch.equal(_grad(compiled(logits, target), logits), _grad(_loss(logits.sin(), target), logits))
    # The region is recomputed as the user asked, in backward.
    assert operators(graphs.backward[0])["ppo._vocab_stats.default"] == 1


def test_selective_checkpoint_saves_the_core_operator(inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, target = inputs
    graphs = TracedGraphs()

    def policy(ctx: object, op: object, *args: object, **kwargs: object) -> ckpt.CheckpointPolicy:
        saved = op is torch.ops.ppo._logprob_entropy.default
        return ckpt.CheckpointPolicy.MUST_SAVE if saved else ckpt.CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(ckpt.create_selective_checkpoint_contexts, policy)

    def region(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return ckpt.checkpoint(lambda x, t: _loss(x.sin(), t), x, t, use_reentrant=False, context_fn=contexts)

    compiled = torch.compile(region, backend=graphs, fullgraph=True)
    expected = _grad(_loss(logits.sin(), target), logits)
    assert torch.equal(_grad(compiled(logits, target), logits), expected)
    assert operators(graphs.backward[0])["ppo._vocab_stats.default"] == 0


def test_autocast(inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, target = inputs
    compiled = torch.compile(_loss, backend=TracedGraphs(), fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = compiled(logits, target)
    assert value.dtype == torch.float32
    assert torch.equal(_grad(value, logits), _grad(_loss(logits, target), logits))


def test_compiled_autograd(inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, target = inputs
    expected = _grad(_loss(logits, target), logits)
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(compiler):
        _loss(logits, target).backward()
    assert torch.equal(logits.grad, expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x, t: (x, t[:3]), torch._dynamo.exc.TorchRuntimeError, "target must have the shape"),
        (lambda x, t: (x.long(), t), torch._dynamo.exc.TorchRuntimeError, "logits must be one of"),
        (lambda x, t: (x, t + 129), IndexError, r"target must be in \[0, 129\)"),
        (lambda x, t: (x, t, torch.tensor(0.0)), ValueError, "temperature must be > 0, got 0.0 in row 0"),
        (lambda x, t: (x, t, -1.0), torch._dynamo.exc.Unsupported, "temperature must be > 0"),
    ],
    ids=["shape", "dtype", "target", "temperature", "number"],
)
def test_errors_reach_the_caller(
    inputs: tuple[torch.Tensor, torch.Tensor], change: object, error: type[Exception], message: str
) -> None:
    compiled = torch.compile(_loss, backend=TracedGraphs(), fullgraph=True)
    with pytest.raises(error, match=message):
        compiled(*change(*inputs))
