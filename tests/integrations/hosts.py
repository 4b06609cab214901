"""A framework's function and its adapter on the same inputs, both judged by `ppo_ops.reference` in float64.

Functions of this module take ``(logits, target)`` and return a tuple of outputs, of which `WHICH` says what they are:
"log_prob", "entropy", or both. Rule: values and gradients of the adapter may be at most twice as far from the truth as
those of the framework (rule "budget" of `tolerances`), in the framework's shape and dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ppo_ops import reference
from tests import oracle
from tests.cases import Case, generator
from tests.tolerances import assert_budget, assert_same_bits

Function = Callable[[Tensor, Tensor], tuple[Tensor, ...]]

BATCH, LENGTH, VOCABULARY = 3, 7, 128


class Evaluated(NamedTuple):
    outputs: tuple[Tensor, ...]
    grad_logits: Tensor


def case_of(name: str, dtype: torch.dtype = torch.float32) -> Case:
    """``logits [3, 7, 128]`` with a standard deviation of 4."""
    source = generator(name)
    logits = (4 * torch.randn(BATCH, LENGTH, VOCABULARY, generator=source)).to(dtype)
    return Case(name, logits, torch.randint(VOCABULARY, (BATCH, LENGTH), generator=source))


def upstream(case: Case, which: tuple[str, ...]) -> list[Tensor]:
    """Upstream gradients, float64, of values that bfloat16 holds exactly: some outputs have that dtype."""
    grads = dict(zip(("log_prob", "entropy"), oracle.upstream(case), strict=True))
    return [grads[name].bfloat16().double() for name in which]


def evaluate(function: Function, case: Case, which: tuple[str, ...], logits: Tensor | None = None) -> Evaluated:
    """Outputs, and the gradient of logits that are, as in training, an intermediate result of their own."""
    leaf = (case.logits if logits is None else logits).detach().clone().requires_grad_()
    outputs = function(leaf.clone(), case.target)
    grads = [g.to(output.dtype) for g, output in zip(upstream(case, which), outputs, strict=True)]
    (grad,) = torch.autograd.grad(outputs, leaf, grads)
    return Evaluated(tuple(output.detach() for output in outputs), grad)


def truth(case: Case, which: tuple[str, ...]) -> Evaluated:
    def function(logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(("log_prob", "entropy"), reference.logprob_entropy(logits, target), strict=True))
        return tuple(values[name] for name in which)

    return evaluate(function, case, which, case.logits.double())


def judge(ours: Evaluated, theirs: Evaluated, case: Case, which: tuple[str, ...]) -> None:
    right, scale = truth(case, which), oracle.scales(case)
    for name, *values in zip(which, ours.outputs, theirs.outputs, right.outputs, strict=True):
        assert_budget(*values, getattr(scale, name))
    assert_budget(ours.grad_logits, theirs.grad_logits, right.grad_logits, scale.grad_logits)


def check(ours: Function, theirs: Function, case: Case, *which: str) -> None:
    """One rank."""
    judge(evaluate(ours, case, which), evaluate(theirs, case, which), case, which)


def columns(case: Case, group: ProcessGroup) -> Tensor:
    return case.logits.chunk(group.size(), -1)[group.rank()]


def join(parts: list[Evaluated]) -> Evaluated:
    """The ranks' results as one; outputs must be the same bits on all of them."""
    for part in parts[1:]:
        for here, first in zip(part.outputs, parts[0].outputs, strict=True):
            assert_same_bits(here, first)
    return Evaluated(parts[0].outputs, torch.cat([part.grad_logits for part in parts], -1))


def plainly(case: Case, which: tuple[str, ...], dtype: torch.dtype) -> Evaluated:
    """Unfused float32 torch, its outputs rounded to `dtype`: stands in for a framework that is not installed."""

    def function(logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        both = reference.logprob_entropy(logits, target, dtype=torch.float32)
        values = dict(zip(("log_prob", "entropy"), both, strict=True))
        return tuple(values[name].to(dtype) for name in which)

    return evaluate(function, case, which)


def errors(found: Tensor, right: Tensor) -> float:
    """The largest absolute error."""
    return float((found.double() - right).abs().max())


def megatron_state(tp: int) -> Any:
    """Megatron's parallel state with `tp` tensor-parallel ranks; every rank of the world must call this."""
    from megatron.core import parallel_state

    end_megatron()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    return parallel_state


def end_megatron() -> None:
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
