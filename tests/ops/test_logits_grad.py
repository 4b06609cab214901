"""Backward against autograd through the float64 reference, and the two operators against each other."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import ppo_ops
from ppo_ops import reference
from tests import cases, oracle
from tests.cases import Case
from tests.tolerances import assert_budget, assert_exact, assert_fp64, assert_like, assert_same_bits

OP = torch.ops.ppo._logits_grad.default
INPLACE = torch.ops.ppo._logits_grad_.default
CORE = torch.ops.ppo._logprob_entropy.default
# One of each kind for the slow part of opcheck; the quick parts run over all cases.
TELLING = ("3x7", "0x7", "everything", "float64_kept_set", "bfloat16_3x1025", "sequence_first")


def _normalizers(case: Case, with_entropy: bool = True) -> Tensor:
    return CORE(*case.stage_args(), with_entropy, False)[2]


def _args(case: Case, grad_log_prob: Tensor | None, grad_entropy: Tensor | None) -> tuple[object, ...]:
    logits, target, mask, temperature, *where = case.stage_args()
    return (logits, target, mask, temperature, _normalizers(case), grad_log_prob, grad_entropy, *where)


def _upstream(case: Case) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if case.logits.dtype == torch.float64 else torch.float32
    log_prob, entropy = oracle.upstream(case)
    return log_prob.to(dtype), entropy.to(dtype)


def _by_autograd(case: Case, dtype: torch.dtype, used: tuple[bool, bool]) -> Tensor:
    leaf = case.logits if dtype == torch.float32 else case.logits.double()
    leaf = leaf.detach().requires_grad_()
    outputs = reference.logprob_entropy(leaf, case.target, case.keep_mask, **case.options(), dtype=dtype)
    grads = [g.to(dtype) for g in oracle.upstream(case)]
    wanted = [(o, g) for o, g, u in zip(outputs, grads, used, strict=True) if u]
    return torch.autograd.grad([o for o, _ in wanted], leaf, [g for _, g in wanted])[0]


@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)], ids=["both", "log_prob", "entropy"])
@pytest.mark.parametrize("case", cases.generated(), ids=str)
def test_gradient(kernels: str, case: Case, used: tuple[bool, bool]) -> None:
    grads = [g if u else None for g, u in zip(_upstream(case), used, strict=True)]
    ours = OP(*_args(case, *grads))
    assert_like(ours, case.logits)
    right = _by_autograd(case, torch.float64, used)
    if case.logits.dtype == torch.float64:
        assert_fp64(ours, right)
    else:
        assert_budget(ours, _by_autograd(case, torch.float32, used), right, oracle.scales(case).grad_logits)


@pytest.mark.parametrize("case", [c for c in cases.generated() if c.logits.is_contiguous()], ids=str)
def test_over_the_logits(kernels: str, case: Case) -> None:
    """The same bits, whatever of the logits has been overwritten already."""
    expected = OP(*_args(case, *_upstream(case)))
    logits, *rest = _args(case, *_upstream(case))
    assert isinstance(logits, Tensor)
    logits = logits.clone()
    assert INPLACE(logits, *rest) is None
    assert_same_bits(logits, expected)


def test_over_the_logits_is_a_counted_mutation() -> None:
    """Autograd's version counter must know, so that a later use of the logits raises instead of lying."""
    case = cases.by_name("3x7")
    logits, *rest = _args(case, *_upstream(case))
    assert isinstance(logits, Tensor)
    logits = logits.clone()
    before = logits._version
    INPLACE(logits, *rest)
    assert logits._version == before + 1


def test_upstream_gradients_of_any_strides(kernels: str) -> None:
    case = dataclasses.replace(cases.by_name("257x127"), temperature=0.7)
    one = torch.tensor(0.25)
    expanded, filled = one.expand(257), torch.full((257,), 0.25)
    wide = torch.randn(257, 3, generator=cases.generator("wide"))
    reversed_twice = wide[:, 2].flip(0).flip(0)
    for a, b, same_a, same_b in (
        (expanded, expanded, filled, filled),
        (wide[:, 1], wide[:, 2], wide[:, 1].clone(), reversed_twice),
        (wide[:, 1], expanded, wide[:, 1].contiguous(), filled),
        (wide.t()[0], None, wide[:, 0].clone(), None),
    ):
        assert_same_bits(OP(*_args(case, a, b)), OP(*_args(case, same_a, same_b)))


def test_no_upstream_gradient_at_all(kernels: str) -> None:
    case = cases.by_name("3x129")
    assert_exact(OP(*_args(case, None, None)), torch.zeros_like(case.logits))


@pytest.mark.parametrize("name", ["3x7", "1x1", "small_everything", "mask_keeps_minus_inf", "all_ignored"])
def test_gradcheck(kernels: str, name: str) -> None:
    """The stage, through the core operator, against finite differences in float64."""
    logits, *rest = cases.by_name(name).stage_args()

    def core(x: Tensor) -> tuple[Tensor, ...]:
        return CORE(x, *rest, True, False)[:2]

    assert torch.autograd.gradcheck(core, (logits.double().requires_grad_(),))


def test_cannot_be_differentiated() -> None:
    args = _args(cases.by_name("3x7"), *_upstream(cases.by_name("3x7")))
    logits = cases.by_name("3x7").logits.clone().requires_grad_()
    grad = OP(logits, *args[1:])
    with pytest.raises(RuntimeError, match="cannot be differentiated twice: double backward is not implemented"):
        grad.sum().backward()


@pytest.mark.parametrize("case", cases.generated(), ids=str)
def test_fake_like_real(case: Case) -> None:
    oracle.check_fake_like_real(OP, *_args(case, *_upstream(case)))
    logits, *rest = _args(case, *_upstream(case))
    assert isinstance(logits, Tensor)
    if logits.is_contiguous():
        oracle.check_fake_like_real(INPLACE, logits.clone(), *rest)


@pytest.mark.parametrize("case", [*cases.generated(), *cases.handed()], ids=str)
def test_opcheck(case: Case) -> None:
    logits, *rest = _args(case, *_upstream(case))
    assert isinstance(logits, Tensor)
    quick = ("test_schema", "test_autograd_registration", "test_faketensor")
    tests = (*quick, "test_aot_dispatch_dynamic") if case.name in TELLING else quick
    opcheck(OP, (logits, *rest), test_utils=tests)
    if logits.is_contiguous():
        opcheck(INPLACE, (logits.clone(), *rest), test_utils=tests)


def test_the_gradient_is_contiguous_whatever_the_logits_strides() -> None:
    for case in cases.generated():
        logits = case.logits.detach().requires_grad_()
        log_prob = ppo_ops.logprob(logits, case.target, case.keep_mask, **case.options())
        (grad,) = torch.autograd.grad(log_prob.sum(), logits)
        assert grad.is_contiguous(), case.name
