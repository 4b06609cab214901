"""The public operators and the core against `reference` over all cases."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import ppo_ops
from tests import cases, oracle
from tests.cases import Case
from tests.tolerances import assert_budget, assert_fp64

ENTROPY = torch.ops.ppo.logprob_entropy.default
LOG_PROB = torch.ops.ppo.logprob.default
CORE = torch.ops.ppo._logprob_entropy.default
# One of each kind for the slow part of opcheck; the quick parts run over all cases.
TELLING = ("3x7", "0x7", "1x1", "everything", "float64_kept_set", "bfloat16_3x1025", "sequence_first", "target_uint8")
# Small enough for finite differences, one for each branch of the formula.
DIFFERENTIABLE = ("3x7", "0x3", "1x1", "mask_keeps_minus_inf", "ignore_index_0", "all_ignored", "small_everything")


@pytest.mark.parametrize("case", cases.generated(), ids=str)
def test_both_outputs_and_the_gradient(kernels: str, case: Case) -> None:
    oracle.check(case)


@pytest.mark.parametrize("case", cases.generated(), ids=str)
def test_log_prob_alone(kernels: str, case: Case) -> None:
    logits = case.logits.detach().requires_grad_()
    log_prob = ppo_ops.logprob(logits, case.target, case.keep_mask, **case.options())
    (grad,) = torch.autograd.grad(log_prob, logits, oracle.upstream(case)[0].to(log_prob.dtype))
    both = case.logits.detach().requires_grad_()
    log_prob_of_both, _ = ppo_ops.logprob_entropy(both, case.target, case.keep_mask, **case.options())
    (grad_of_both,) = torch.autograd.grad(log_prob_of_both, both, oracle.upstream(case)[0].to(log_prob.dtype))
    right, scale = oracle.truth(case).log_prob, oracle.scales(case)
    if case.logits.dtype == torch.float64:
        assert_fp64(log_prob.detach(), right)
        assert_fp64(grad, grad_of_both)
    else:
        assert_budget(log_prob.detach(), oracle.plain(case).log_prob, right, scale.log_prob)
        # The other operator is judged by the truth; this one may differ from it by roundings, hence no credit of
        # plain torch's error.
        assert_budget(grad, grad_of_both, grad_of_both.double(), scale.grad_logits)


def _calls(case: Case) -> list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """Each operator with arguments of its own kind."""
    rows = (case.target, case.keep_mask)
    where = case.stage_args()[1:]
    return [
        (ENTROPY, (case.logits, *rows), case.op_options()),
        (LOG_PROB, (case.logits, *rows), case.op_options()),
        (CORE, (case.logits, *where, True, False), {}),
        (CORE, (case.logits, *where, False, False), {}),
    ]


@pytest.mark.parametrize("case", cases.generated(), ids=str)
def test_fake_like_real(case: Case) -> None:
    for op, args, options in _calls(case):
        oracle.check_fake_like_real(op, *args, **options)


@pytest.mark.parametrize("case", [*cases.generated(), *cases.handed()], ids=str)
def test_opcheck(case: Case) -> None:
    quick = ("test_schema", "test_autograd_registration", "test_faketensor")
    tests = (*quick, "test_aot_dispatch_dynamic") if case.name in TELLING else quick
    calls = _calls(case)
    if case.name not in TELLING:
        calls = calls[:3]  # the core without entropy is what the operator of the log-prob calls
    for op, (logits, *rest), options in calls:
        opcheck(op, (logits.detach().requires_grad_(), *rest), options, test_utils=tests)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradcheck(kernels: str, name: str) -> None:
    case = cases.by_name(name)
    if isinstance(case.temperature, float):
        case = dataclasses.replace(case, temperature=0.7)
    logits = case.logits.double().requires_grad_()
    for function in (ppo_ops.logprob_entropy, ppo_ops.logprob):

        def outputs(x: Tensor, function: Callable[..., Any] = function) -> Any:
            return function(x, case.target, case.keep_mask, **case.options())

        assert torch.autograd.gradcheck(outputs, (logits,))


@pytest.mark.parametrize("case", [c for c in cases.generated() if c.target.numel() < 10], ids=str)
def test_outputs_are_fresh(case: Case) -> None:
    """Never an input, never two that share memory, also without rows."""
    for requires_grad in (False, True):
        logits = case.logits.detach().requires_grad_(requires_grad)
        outputs = ENTROPY(logits, case.target, case.keep_mask, **case.op_options())
        given = [t for t in (logits, case.target, case.keep_mask, case.temperature_tensor()) if t is not None]
        tensors = [*outputs, *given]
        assert len({t.untyped_storage()._cdata for t in tensors}) == len(tensors)
        for output in outputs:
            assert output.is_contiguous()
            assert not output._is_view()
            assert output.requires_grad == requires_grad
