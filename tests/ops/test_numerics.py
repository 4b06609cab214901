"""Promises that no comparison with a reference shows: exact zeros, and NaN that stays in its row."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import ppo_ops
from tests import cases, oracle
from tests.cases import Case
from tests.ops.numerics_tools import assert_part, part_of, run, run_unit, run_with
from tests.tolerances import assert_exact, assert_same_bits

INF, NAN = math.inf, math.nan


# ---- offsets ----


@pytest.mark.parametrize("masked", [False, True], ids=["all", "kept_set"])
@pytest.mark.parametrize("offset", [0.0, 1e6, -1e6, 1e8, -1e8])
def test_a_common_offset_changes_no_bit(kernels: str, offset: float, masked: bool) -> None:
    """All logits are multiples of 8, exact in float32 with and without the offset; T = 8 spreads the probabilities."""
    source = cases.generator("offset")
    logits = 8.0 * torch.randint(-20, 20, (3, 1000), generator=source).float()
    logits[1, ::5] = -INF
    target = torch.tensor([1, 2, 998])
    mask = torch.rand(3, 1000, generator=source) < 0.3 if masked else None
    case = Case("offset", logits, target, mask, temperature=8.0)
    for actual, expected in zip(run(dataclasses.replace(case, logits=logits + offset)), run(case), strict=True):
        assert_same_bits(actual, expected)


# ---- special values ----

POISON = {"nan": NAN, "plus_inf": INF}


@pytest.mark.parametrize("place", [0, 64, 128, "everywhere"])
@pytest.mark.parametrize("poison", POISON)
def test_a_poisoned_row_is_nan_and_its_neighbours_are_not(kernels: str, poison: str, place: int | str) -> None:
    case = cases.random_case("poisoned", 5, 129)
    clean = run(case)
    logits = case.logits.clone()
    logits[2, slice(None) if place == "everywhere" else place] = POISON[poison]
    results = run(dataclasses.replace(case, logits=logits))
    for name in ("log_prob", "entropy", "grad_logits"):
        dirty, expected = getattr(results, name), getattr(clean, name)
        assert dirty[2].isnan().all(), name
        for row in (0, 1, 3, 4):
            assert_same_bits(dirty[row], expected[row])


def test_a_row_of_minus_inf_is_nan(kernels: str) -> None:
    case = cases.random_case("impossible", 3, cases.WIDE)
    clean = run(case)
    logits = case.logits.clone()
    logits[1] = -INF
    results = run(dataclasses.replace(case, logits=logits))
    assert results.log_prob[1].isnan()
    assert results.entropy[1].isnan()
    assert results.grad_logits[1].isnan().all()
    for dirty, expected in zip(results, clean, strict=True):
        assert_same_bits(dirty[::2], expected[::2])


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_dropped_logit_cannot_spoil_the_log_prob(kernels: str, value: float) -> None:
    """The kept set is all that ppo::logprob looks at; the entropy, over everything, is NaN."""
    case = cases.random_case("dropped", 3, 129, keep_mask=cases.random_mask("dropped", 3, 129))
    case.keep_mask[1, 50] = False
    case.target[1] = 51
    dirty = dataclasses.replace(case, logits=case.logits.clone())
    dirty.logits[1, 50] = value
    for c in (case, dirty):
        assert not ppo_ops.logprob(c.logits, c.target, c.keep_mask).isnan().any()
    logits = dirty.logits.detach().requires_grad_()
    log_prob = ppo_ops.logprob(logits, dirty.target, dirty.keep_mask)
    assert_exact(log_prob.detach(), ppo_ops.logprob(case.logits, case.target, case.keep_mask))
    (grad,) = torch.autograd.grad(log_prob.sum(), logits)
    clean = case.logits.detach().requires_grad_()
    (expected,) = torch.autograd.grad(ppo_ops.logprob(clean, case.target, case.keep_mask).sum(), clean)
    assert_exact(grad, expected)
    assert ppo_ops.logprob_entropy(dirty.logits, dirty.target, dirty.keep_mask)[1].isnan().tolist() == [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("which", ["both", "log_prob", "entropy"])
def test_a_zero_upstream_gradient_gives_an_exactly_zero_row(kernels: str, which: str) -> None:
    """Even where the row's statistics are NaN; a term whose own upstream gradient is 0 is absent."""
    logits = 4 * torch.randn(6, 129, generator=cases.generator("zero upstream"))
    logits[1, 7] = NAN
    logits[2] = -INF
    logits[3, 9] = INF
    target = torch.tensor([0, 1, 2, 3, 4, 5])
    for mask in (None, cases.random_mask("zero upstream", 6, 129)):
        case = Case("zero", logits, target, mask, temperature=0.5)
        a, b = torch.zeros(6), torch.zeros(6)
        a[[4, 5]], b[[4, 5]] = 1.0, -1.0
        clean = Case("clean", logits[4:], target[4:], None if mask is None else mask[4:], temperature=0.5)
        if which == "both":
            grad = run_with(case, a, b).grad_logits
            expected = run_with(clean, a[4:], b[4:]).grad_logits
        else:
            leaves = [c.logits.detach().requires_grad_() for c in (case, clean)]
            index = ("log_prob", "entropy").index(which)
            outputs = [
                ppo_ops.logprob_entropy(leaf, c.target, c.keep_mask, **c.options())[index]
                for leaf, c in zip(leaves, (case, clean), strict=True)
            ]
            grad = torch.autograd.grad(outputs[0], leaves[0], (a, b)[index])[0]
            expected = torch.autograd.grad(outputs[1], leaves[1], (a, b)[index][4:])[0]
        assert_exact(grad[:4], torch.zeros(4, 129))
        assert_same_bits(grad[4:], expected)


def test_a_nan_entropy_does_not_reach_a_log_prob_gradient_beside_it(kernels: str) -> None:
    """Row 0's entropy is NaN because of a dropped NaN, but nobody asks for its gradient."""
    case = cases.random_case("half nan", 2, 129, keep_mask=cases.random_mask("half nan", 2, 129))
    case.keep_mask[0, 50] = False
    case.target[0] = 51
    dirty = dataclasses.replace(case, logits=case.logits.clone())
    dirty.logits[0, 50] = NAN
    a, b = torch.tensor([1.0, 1.0]), torch.tensor([0.0, 1.0])
    assert_exact(run_with(dirty, a, b).grad_logits, run_with(case, a, b).grad_logits)


def test_ignored_rows_are_zero_and_are_not_read(kernels: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        case = cases.random_case(f"ignored {dtype}", 5, 129, dtype)
        case.target[::2] = -100
        case.logits[0], case.logits[2], case.logits[4] = NAN, -INF, INF
        for mask in (None, cases.random_mask("ignored", 5, 129)):
            for temperature in (1.0, torch.full((5,), 0.7)):
                given = dataclasses.replace(case, keep_mask=mask, temperature=temperature)
                results = run_unit(given)
                for rows in results:
                    assert_exact(rows[::2], torch.zeros_like(rows[::2]))
                assert_part(results, run_unit(part_of(given, slice(1, 2))), slice(1, 2))


def test_an_unsigned_target_is_not_mistaken_for_a_negative_ignore_index(kernels: str) -> None:
    """-100 as uint8 is 156, a valid id; likewise 65436 as uint16."""
    for dtype, token, columns in ((torch.uint8, 156, 200), (torch.uint16, 65436, 65500)):
        logits = torch.randn(2, columns, generator=cases.generator("unsigned"))
        target = torch.tensor([token, 3])
        expected = ppo_ops.logprob_entropy(logits, target)
        for actual, right in zip(ppo_ops.logprob_entropy(logits, target.to(dtype)), expected, strict=True):
            assert_same_bits(actual, right)
        assert expected[0][0] < -1


def test_one_token(kernels: str) -> None:
    """V = 1: certain, whatever the logit."""
    case = Case("one", torch.tensor([[3.0], [-1e30], [1e8]]), torch.zeros(3, dtype=torch.int64))
    for mask in (None, torch.zeros(3, 1, dtype=torch.bool)):
        for result in run(dataclasses.replace(case, keep_mask=mask)):
            assert_exact(result, torch.zeros_like(result))


def test_constructed_values_are_exact(kernels: str) -> None:
    """Two equal logits among -inf: log 2 rounded once; the gradients are halves."""
    for columns in (2, 7, 1000, cases.WIDE):
        logits = torch.full((1, columns), -INF)
        logits[0, [0, -1]] = 7.0
        case = Case("halves", logits, torch.tensor([columns - 1]))
        results = run_with(case, torch.ones(1), torch.zeros(1))
        log2 = torch.tensor([2.0]).log()
        assert_exact(results.log_prob, -log2)
        assert_exact(results.entropy, log2)
        # p = e^(-log 2) is at most one rounding of log 2 from 1/2.
        assert (results.grad_logits[0, [0, -1]] - torch.tensor([-0.5, 0.5])).abs().max() <= 6e-8
        assert not results.grad_logits[0, 1:-1].any()


def test_a_tiny_probability_is_not_rounded_up(kernels: str) -> None:
    """No floor may show in an output: log_prob of a token 1e5 below the rest."""
    logits = torch.tensor([[0.0, -1e5, -INF]])
    for mask in (None, torch.tensor([[True, True, False]])):
        log_prob, entropy = ppo_ops.logprob_entropy(logits, torch.tensor([1]), mask)
        assert_exact(log_prob, torch.tensor([-1e5]))
        assert_exact(entropy, torch.zeros(1))
        log_prob, _ = ppo_ops.logprob_entropy(logits, torch.tensor([2]), mask)
        assert_exact(log_prob, torch.tensor([-INF]))


def test_the_target_of_a_confident_row_keeps_its_gradient(kernels: str) -> None:
    """1 - p is subtracted before it is rounded: in bfloat16, 1 - 0.999 would be 0."""
    for dtype in (torch.bfloat16, torch.float16):
        logits = torch.zeros(1, 1000, dtype=dtype)
        logits[0, 0] = 13.75
        results = run_with(Case("confident", logits, torch.tensor([0])), torch.ones(1), torch.zeros(1))
        right = oracle.truth(Case("confident", logits, torch.tensor([0]))).log_prob.expm1().neg()
        assert abs(results.grad_logits[0, 0].double() / right - 1).item() < torch.finfo(dtype).eps


# ---- properties ----


@pytest.mark.parametrize("name", ["3x7", "1x1", "3x129", "3x1000", "half_minus_inf", "inf_shard", "everything"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "kept_set"])
def test_probabilities_sum_to_one(kernels: str, name: str, masked: bool) -> None:
    """exp(log_prob) over all targets of a row. 1e-5: V roundings of terms that average 1/V, each of 1e-7 relative."""
    case = cases.by_name(name)
    row = case.logits[-1, : case.vocab_size]
    columns = len(row)
    mask = None
    if masked:
        mask = cases.random_mask(name, 1, columns)
        mask[0, row.argmax()] = True
        mask = mask.expand(columns, columns)
    log_prob = ppo_ops.logprob(row.expand(columns, columns), torch.arange(columns), mask)
    probability = log_prob.double().exp()
    kept = probability if mask is None else probability[mask[0]]
    assert abs(kept.sum().item() - 1) < 1e-5


@pytest.mark.parametrize("case", cases.generated(), ids=str)
def test_entropy_and_gradient_rows(kernels: str, case: Case) -> None:
    """Entropy in [0, ln V]; a row of the gradient sums to 0, as adding a constant to the logits changes nothing."""
    results = run(case)
    valid = case.logits.shape[-1] if case.vocab_size is None else case.vocab_size
    # Roundings of lse and of the expected logit, each at most ln V + 1.
    slack = 4 * torch.finfo(results.entropy.dtype).eps * (1 + math.log(valid))
    assert (results.entropy >= -slack).all()
    assert (results.entropy <= math.log(valid) + slack).all()
    assert (results.log_prob <= slack).all()
    # One rounding to the gradient's dtype an element, and what the probabilities miss to 1.
    grad, scale = results.grad_logits.double(), oracle.scales(case).grad_logits
    rounding = torch.finfo(case.logits.dtype).eps / 2 * grad.abs() + torch.finfo(case.logits.dtype).smallest_normal
    float32 = 8 * torch.finfo(results.entropy.dtype).eps * scale
    assert (grad.sum(-1).abs() <= (rounding + float32).sum(-1)).all()
