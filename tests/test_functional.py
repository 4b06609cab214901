"""The Python functions: handed cases, ways to give the same arguments, leading shapes, integer targets."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

import ppo_ops
from tests import cases, oracle
from tests.cases import Case
from tests.tolerances import assert_like, assert_same_bits


@pytest.mark.parametrize("case", cases.handed(), ids=str)
def test_handed_case(kernels: str, case: Case) -> None:
    """Each output and each gradient on its own, within the tolerance of the file."""
    assert case.expected is not None
    logits = case.logits.clone().requires_grad_()
    log_prob, entropy = ppo_ops.logprob_entropy(logits, case.target, case.keep_mask, **case.options())
    case.expected.check("log_prob", log_prob.detach())
    case.expected.check("entropy", entropy.detach())
    for name, output in (("grad_log_prob", log_prob), ("grad_entropy", entropy)):
        (grad,) = torch.autograd.grad(output.sum(), logits, retain_graph=True)
        assert_like(grad, logits)
        case.expected.check(name, grad)


@pytest.mark.parametrize("case", cases.handed(), ids=str)
def test_handed_case_without_entropy(kernels: str, case: Case) -> None:
    assert case.expected is not None
    logits = case.logits.clone().requires_grad_()
    log_prob = ppo_ops.logprob(logits, case.target, case.keep_mask, **case.options())
    case.expected.check("log_prob", log_prob.detach())
    case.expected.check("grad_log_prob", torch.autograd.grad(log_prob.sum(), logits)[0])


def _with_neighbours(case: Case) -> Case:
    """The same rows between others: NaN everywhere, equal logits, one finite logit."""
    columns = case.logits.shape[1]
    before = torch.full((2, columns), torch.nan, dtype=case.logits.dtype)
    after = torch.zeros(2, columns, dtype=case.logits.dtype)
    after[1, 1:] = -torch.inf

    def between(rows: Tensor, first: Tensor, last: Tensor) -> Tensor:
        return torch.cat((first, rows, last))

    mask, temperature = case.keep_mask, case.temperature
    if mask is not None:
        mask = between(mask, mask[:1].expand(2, -1), torch.zeros(2, columns, dtype=torch.bool))
    if isinstance(temperature, Tensor) and temperature.dim():
        temperature = between(temperature, temperature.new_tensor([1.0, 9.0]), temperature.new_tensor([0.1, 2.0]))
    target = between(case.target, case.target.new_zeros(2), case.target.new_zeros(2))
    logits = between(case.logits, before, after)
    return dataclasses.replace(case, logits=logits, target=target, keep_mask=mask, temperature=temperature)


@pytest.mark.parametrize("case", cases.handed(), ids=str)
def test_handed_case_beside_other_rows(kernels: str, case: Case) -> None:
    alone, among = case, _with_neighbours(case)
    for function in (ppo_ops.logprob, ppo_ops.logprob_entropy):
        results = []
        for c, rows in ((alone, slice(None)), (among, slice(2, -2))):
            logits = c.logits.clone().requires_grad_()
            outputs = function(logits, c.target, c.keep_mask, **c.options())
            outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
            grads = [torch.autograd.grad(o.sum(), logits, retain_graph=True)[0] for o in outputs]
            results.append([t.detach()[rows] for t in (*outputs, *grads)])
        for actual, expected in zip(results[1], results[0], strict=True):
            assert_same_bits(actual, expected)


@pytest.mark.parametrize("number", [1.0, 1, 0.7, 3])
def test_temperature_number_or_tensor(number: float) -> None:
    case = cases.by_name("3x129")
    expected = oracle.run(ppo_ops.logprob_entropy, dataclasses.replace(case, temperature=number))
    for temperature in (torch.tensor(float(number)), torch.full((3,), float(number))):
        actual = oracle.run(ppo_ops.logprob_entropy, dataclasses.replace(case, temperature=temperature))
        for a, e in zip(actual, expected, strict=True):
            assert_same_bits(a, e)


def test_temperature_number_keeps_its_digits_with_float64_logits() -> None:
    """0.7 rounded to float32 would be wrong in the eighth digit."""
    case = dataclasses.replace(cases.by_name("float64_3x1025"), temperature=0.7)
    oracle.check(case)


def test_no_group_by_any_name() -> None:
    case = cases.by_name("3x129")
    expected = oracle.run(ppo_ops.logprob_entropy, case)
    for actual in (
        oracle.run(ppo_ops.logprob_entropy, case, group=None),
        oracle.run(ppo_ops.logprob_entropy, case, group=""),
        oracle.run(ppo_ops.logprob_entropy, case, vocab_start=0),
        oracle.run(ppo_ops.logprob_entropy, dataclasses.replace(case, vocab_size=129)),
    ):
        oracle.assert_same_results(actual, expected)


@pytest.mark.parametrize("shape", [(), (1,), (6,), (2, 3), (1, 2, 3), (3, 0, 2), (2, 1, 1, 3)])
def test_leading_shape(shape: tuple[int, ...]) -> None:
    rows = math.prod(shape)
    case = cases.random_case(f"leading_{rows}", rows, 129)
    case = dataclasses.replace(case, logits=case.logits.view(*shape, 129), target=case.target.view(shape))
    results = oracle.run(ppo_ops.logprob_entropy, case)
    assert results.log_prob.shape == results.entropy.shape == shape
    oracle.check(case)


def test_results_are_plain_tensors_of_the_accumulation_dtype() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        expected = torch.float64 if dtype == torch.float64 else torch.float32
        outputs = ppo_ops.logprob_entropy(torch.zeros(2, 3, dtype=dtype), torch.tensor([0, 1]))
        log_prob = ppo_ops.logprob(torch.zeros(2, 3, dtype=dtype), torch.tensor([0, 1]))
        assert isinstance(outputs, tuple)
        for output in (*outputs, log_prob):
            assert type(output) is Tensor
            assert output.dtype == expected
            assert output.is_contiguous()
            assert not output.requires_grad
