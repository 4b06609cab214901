"""The correctness gate: a provider's outputs and gradient against `ppo_ops.reference` in float64.

It runs on the inputs to be timed and compares up to `SAMPLE` of their rows. An error is measured relative to
max(1, |truth|) for the outputs, and to the largest gradient of its row for the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.inputs import Inputs
from benchmarks.providers import Provider
from ppo_ops import reference

SAMPLE = 16
OVERWRITES = "overwrites the logits"
# A sum of 150,000 float32 exponentials done in blocks is good to 1e-6; ten times that is a wrong formula.
OUTPUTS = 1e-5
# The gradient inherits the relative error of the probabilities. bfloat16 rounds once, to 2^-8 = 3.9e-3,
# float16 to 2^-11 = 4.9e-4.
GRADIENT = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 5e-3, torch.float16: 1e-3}


@dataclass(frozen=True)
class Errors:
    """Largest errors of one provider; None where there is nothing to compare."""

    log_prob: float
    entropy: float | None
    gradient: float | None


@dataclass(frozen=True)
class Truth:
    """float64 results of the sampled rows, of this rank's columns for the gradient."""

    rows: Tensor
    log_prob: Tensor
    entropy: Tensor
    gradient: Tensor | None


def truth_of(inputs: Inputs, sample: int = SAMPLE) -> Truth:
    """Evaluate the specification in float64 on a sample of rows."""
    cell = inputs.cell
    rows = torch.linspace(0, cell.rows - 1, min(sample, cell.rows)).round().long().to(cell.device)
    logits = inputs.full[rows].double().requires_grad_(cell.grad)
    mask = None if inputs.full_mask is None else inputs.full_mask[rows]
    log_prob, entropy = reference.logprob_entropy(logits, inputs.target[rows], mask)
    gradient = None
    if cell.grad:
        loss = (log_prob * inputs.upstream[0][rows]).sum()
        if cell.entropy:
            loss = loss + (entropy * inputs.upstream[1][rows]).sum()
        gradient = torch.autograd.grad(loss, logits)[0][:, inputs.columns]
    return Truth(rows, log_prob.detach(), entropy.detach(), gradient)


def _largest(actual: Tensor, truth: Tensor, scale: Tensor) -> float:
    """Largest relative error; NaN where a result is NaN and the truth is not."""
    return float(((actual.detach().double() - truth).abs() / scale).max())


def errors_of(provider: Provider, inputs: Inputs, truth: Truth) -> Errors:
    """Run the provider once on the whole inputs and compare the sampled rows. Serves as its warm-up too."""
    inputs.restore()
    with provider.context():
        with torch.set_grad_enabled(inputs.cell.grad):
            outputs = provider.function(inputs.logits(), inputs)
        if inputs.cell.grad:
            inputs.backward(outputs)
    log_prob, entropy = (None if out is None else out.detach()[truth.rows] for out in outputs)
    assert log_prob is not None
    return Errors(
        _largest(log_prob, truth.log_prob, truth.log_prob.abs().clamp(min=1.0)),
        None if entropy is None else _largest(entropy, truth.entropy, truth.entropy.abs().clamp(min=1.0)),
        None
        if truth.gradient is None
        else _largest(
            inputs.grad_logits[truth.rows],
            truth.gradient,
            truth.gradient.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny),
        ),
    )


def verdict(provider: Provider, inputs: Inputs, errors: Errors) -> tuple[bool, str]:
    """Whether the provider may be timed, and what a reader of its numbers must know."""
    dtype = inputs.cell.dtype
    deviation = provider.deviation(dtype)
    allowed = {
        "log_prob": max(OUTPUTS, deviation.outputs),
        "entropy": max(OUTPUTS, deviation.outputs),
        "gradient": max(GRADIENT[dtype], deviation.gradient),
    }
    strict = {"log_prob": OUTPUTS, "entropy": OUTPUTS, "gradient": GRADIENT[dtype]}
    wrong, marked = [], False
    for name, tolerance in allowed.items():
        error = getattr(errors, name)
        if error is None:
            continue
        if not error <= tolerance:  # NaN is wrong too
            wrong.append(f"{name} off by {error:.2g}, allowed {tolerance:.2g}")
        marked = marked or not error <= strict[name]
    if wrong:
        return False, "wrong: " + "; ".join(wrong)
    return True, deviation.reason if marked else ""


def check(provider: Provider, inputs: Inputs, truth: Truth) -> tuple[bool, str]:
    """The gate: run, compare, judge. An exception is a refusal too."""
    try:
        errors = errors_of(provider, inputs, truth)
        overwritten = not torch.equal(inputs.work[truth.rows], inputs.source[truth.rows])
    except Exception as error:
        first = (str(error).strip() or repr(error)).splitlines()[0]
        return False, f"failed: {type(error).__name__}: {first[:120]}"
    finally:
        inputs.received.clear()
    ok, remark = verdict(provider, inputs, errors)
    return ok, "; ".join(filter(None, (remark, OVERWRITES if ok and overwritten else "")))
