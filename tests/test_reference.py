"""The specification against values that do not come from it: handed cases, torch's own losses, finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from ppo_ops import reference
from tests import cases, oracle
from tests.cases import Case
from tests.tolerances import assert_exact, assert_fp64


def test_the_copy_of_the_handed_cases_is_the_shared_file() -> None:
    if not cases.SHARED.exists():
        pytest.skip("no folder `shared` beside this checkout; the copy in tests/data is all there is")
    assert cases.DATA.read_bytes() == cases.SHARED.read_bytes()


def test_there_are_handed_cases() -> None:
    names = {case.name for case in cases.handed()}
    assert len(names) == len(cases.handed()) >= 18
    assert {"one_banned_token", "offset_1e6", "confident_bf16", "float64"} <= names


@pytest.mark.parametrize("case", cases.handed(), ids=str)
def test_handed_case(case: Case) -> None:
    """In float64 from the given logits; the file's tolerance covers the nine digits of its numbers."""
    assert case.expected is not None
    logits = case.logits.double().requires_grad_()
    log_prob, entropy = reference.logprob_entropy(logits, case.target, case.keep_mask, **case.options())
    case.expected.check("log_prob", log_prob.detach())
    case.expected.check("entropy", entropy.detach())
    for name, output in (("grad_log_prob", log_prob), ("grad_entropy", entropy)):
        case.expected.check(name, torch.autograd.grad(output.sum(), logits, retain_graph=True)[0])


def test_agrees_with_torch() -> None:
    case = cases.by_name("257x129")
    logits = case.logits.double() / 0.7
    log_prob, entropy = reference.logprob_entropy(case.logits, case.target, temperature=0.7)
    assert_fp64(log_prob, -torch.nn.functional.cross_entropy(logits, case.target, reduction="none"))
    assert_fp64(entropy, torch.distributions.Categorical(logits=logits).entropy())


def test_by_hand() -> None:
    """p = 3/4, 1/4; the kept set leaves only the target."""
    logits = torch.tensor([[math.log(3.0), 0.0]], dtype=torch.float64)
    log_prob, entropy = reference.logprob_entropy(logits, torch.tensor([1]))
    assert_fp64(log_prob, torch.tensor([math.log(0.25)], dtype=torch.float64))
    assert_fp64(entropy, torch.tensor([math.log(4.0) - 0.75 * math.log(3.0)], dtype=torch.float64))
    log_prob, _ = reference.logprob_entropy(logits, torch.tensor([1]), torch.tensor([[False, False]]))
    assert_exact(log_prob.abs(), torch.zeros(1, dtype=torch.float64))


@pytest.mark.parametrize("name", ["3x7", "everything", "half_minus_inf", "mask_drops_target", "padded"])
def test_gradient_is_that_of_the_formula(name: str) -> None:
    """The two formulas of the contract, in float64, against autograd."""
    case = cases.by_name(name)
    a, b = oracle.upstream(case)
    x = case.logits.double()[:, : case.vocab_size]
    ignored = case.target == case.ignore_index
    index = case.target.masked_fill(ignored, 0).unsqueeze(1)
    temperature = torch.as_tensor(case.temperature, dtype=torch.float64).reshape(-1, 1)
    one_hot = torch.zeros_like(x).scatter(1, index, 1.0)
    keep = torch.ones_like(x, dtype=torch.bool) if case.keep_mask is None else case.keep_mask[:, : case.vocab_size]
    p_kept = (x / temperature).masked_fill(~(keep | one_hot.bool()), -torch.inf).softmax(1)
    log_p = (x / temperature).log_softmax(1).clamp(min=-1e300)
    p = log_p.exp()
    entropy = -(p * log_p).sum(1, keepdim=True)
    expected = a.unsqueeze(1) * (one_hot - p_kept) - b.unsqueeze(1) * p * (log_p + entropy)
    expected = (expected / temperature).masked_fill(ignored.unsqueeze(1), 0.0)
    assert_fp64(
        oracle.truth(case).grad_logits, torch.nn.functional.pad(expected, (0, case.logits.shape[1] - x.shape[1]))
    )


def test_gradcheck() -> None:
    case = cases.by_name("small_everything")
    logits = case.logits.double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: reference.logprob_entropy(x, case.target, case.keep_mask, **case.options()), (logits,)
    )


def test_dtype_of_the_computation() -> None:
    case = cases.by_name("bfloat16_3x1025")
    for dtype in (torch.float32, torch.float64):
        for output in reference.logprob_entropy(case.logits, case.target, dtype=dtype):
            assert output.dtype == dtype


@pytest.mark.parametrize("bad", [-1, 7])
def test_rejects_a_target_outside_the_vocabulary(bad: int) -> None:
    with pytest.raises(IndexError, match=r"target must be in \[0, 7\) or equal ignore_index \(-100\)"):
        reference.logprob_entropy(torch.zeros(2, 7), torch.tensor([3, bad]))
