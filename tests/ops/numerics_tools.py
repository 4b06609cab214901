"""Ours on a case, with given upstream gradients or on some of its rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

import ppo_ops
from tests import oracle
from tests.cases import Case
from tests.oracle import Results
from tests.tolerances import assert_same_bits


def run(case: Case) -> Results:
    return oracle.run(ppo_ops.logprob_entropy, case)


def part_of(case: Case, rows: slice) -> Case:
    """Some rows of a case, by the first dimension."""
    temperature, mask = case.temperature, case.keep_mask
    if isinstance(temperature, Tensor) and temperature.dim():
        temperature = temperature[rows]
    mask = None if mask is None else mask[rows]
    return dataclasses.replace(
        case, logits=case.logits[rows], target=case.target[rows], keep_mask=mask, temperature=temperature
    )


def _with_gradient(case: Case, a: Tensor, b: Tensor, function: Callable[..., tuple[Tensor, Tensor]]) -> Results:
    logits = case.logits.detach().requires_grad_()
    outputs = function(logits, case.target, case.keep_mask, **case.options())
    (grad,) = torch.autograd.grad(outputs, logits, (a, b))
    return Results(outputs[0].detach(), outputs[1].detach(), grad)


def run_with(case: Case, a: Tensor, b: Tensor) -> Results:
    return _with_gradient(case, a, b, ppo_ops.logprob_entropy)


def assert_part(whole: Results, part: Results, rows: slice) -> None:
    for all_rows, some in zip(whole, part, strict=True):
        assert_same_bits(all_rows[rows], some)


def run_unit(case: Case) -> Results:
    """Upstream gradients of 1 and -1/2, the same in any part of a case."""
    ones = torch.ones(case.target.shape, dtype=torch.float64 if case.logits.dtype == torch.float64 else torch.float32)
    return run_with(case, ones, -ones / 2)
