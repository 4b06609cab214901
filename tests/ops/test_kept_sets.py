"""Ragged kept sets: equal to masks in values and gradients, whatever the rows look like."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ppo_ops
from ppo_ops import reference
from ppo_ops.kernels import aten, cpu, kept
from tests import cases
from tests.tolerances import assert_same_bits


def _ragged(case: cases.Case, ids: Tensor, offsets: Tensor, **more: object) -> tuple[Tensor, ...]:
    """log_prob, entropy and their gradients, then log_prob alone and its gradient."""
    logits = case.logits.clone().requires_grad_()
    options = {**case.options(), "keep_ids": ids, "keep_offsets": offsets, **more}
    log_prob, entropy = ppo_ops.logprob_entropy(logits * 1, case.target, **options)
    alone = ppo_ops.logprob(logits * 1, case.target, **options)
    grads = [torch.autograd.grad(value.sum(), logits, retain_graph=True)[0] for value in (log_prob, entropy, alone)]
    return log_prob.detach(), entropy.detach(), alone.detach(), *grads


def _masked(case: cases.Case, mask: Tensor, **more: object) -> tuple[Tensor, ...]:
    logits = case.logits.clone().requires_grad_()
    options = {**case.options(), **more}
    log_prob, entropy = ppo_ops.logprob_entropy(logits * 1, case.target, mask, **options)
    alone = ppo_ops.logprob(logits * 1, case.target, mask, **options)
    grads = [torch.autograd.grad(value.sum(), logits, retain_graph=True)[0] for value in (log_prob, entropy, alone)]
    return log_prob.detach(), entropy.detach(), alone.detach(), *grads


def _assert_close(ragged: tuple[Tensor, ...], masked: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    # The same sums in another order: a few roundings of the accumulation dtype, then one of the gradient's dtype.
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    grad_eps = max(8 * eps, torch.finfo(dtype).eps)
    for ours, expected in zip(ragged[:3], masked[:3], strict=True):
        torch.testing.assert_close(ours, expected, rtol=8 * eps, atol=8 * eps, equal_nan=True)
    for ours, expected in zip(ragged[3:], masked[3:], strict=True):
        torch.testing.assert_close(ours, expected, rtol=grad_eps, atol=8 * eps, equal_nan=True)


@pytest.mark.parametrize("case", [c for c in cases.handed() if c.keep_mask is not None], ids=str)
def test_handed_cases(case: cases.Case, kernels: str) -> None:
    ids, offsets = ppo_ops.keep_sets_from_mask(case.keep_mask)
    log_prob, entropy, alone, grad_log_prob, grad_entropy, grad_alone = _ragged(case, ids, offsets)
    for name, value in (("log_prob", log_prob), ("entropy", entropy), ("log_prob", alone)):
        case.expected.check(name, value)
    for name, value in (("log_prob", grad_log_prob), ("entropy", grad_entropy), ("log_prob", grad_alone)):
        case.expected.check(f"grad_{name}", value)


def _sets(rows: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mask, ids and offsets: random rows, an empty (unrestricted) one, a full one, one id, ids said twice."""
    mask = cases.random_mask("ragged", rows, vocabulary)
    mask[1] = True
    mask[2] = True
    mask[3] = False
    mask[3, 5] = True
    ids, sizes = [], []
    for row in range(rows):
        kept = mask[row].nonzero().squeeze(1)
        kept = kept[:0] if row == 1 else torch.cat([kept.flip(0), kept[:2]])
        ids.append(kept)
        sizes.append(len(kept))
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    return mask, torch.cat(ids), offsets


@pytest.mark.parametrize("entries", [1, 700, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_its_block(
    dtype: torch.dtype, entries: int, poisoned_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ATen kernels lay out one row, or some, or all at a time."""
    _, ids, offsets = _sets(9, 1025)
    case = cases.random_case("ragged_values", 9, 1025, dtype, temperature=0.7)
    case.target[4] = -100
    monkeypatch.setattr(cpu, "_kernels", lambda dtype: aten)
    whole = _ragged(case, ids, offsets)
    monkeypatch.setattr(cpu, "ENTRIES", entries)
    for ours, expected in zip(_ragged(case, ids, offsets), whole, strict=True):
        assert_same_bits(ours, expected)


@pytest.mark.parametrize("inplace_backward", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_equal_to_the_mask(dtype: torch.dtype, inplace_backward: bool, kernels: str) -> None:
    mask, ids, offsets = _sets(9, 1025)
    case = cases.random_case("ragged_values", 9, 1025, dtype, temperature=0.7)
    case.target[4] = -100
    if inplace_backward:
        # A second backward through the same logits is an error in place, so each gradient has a forward of its own.
        logits = case.logits.clone().requires_grad_()
        options = {**case.options(), "inplace_backward": True}
        for weights in ((1.0, 0.0), (0.0, 1.0), (1.0, -0.5)):
            grads = []
            for kept in ({"keep_mask": mask}, {"keep_ids": ids, "keep_offsets": offsets}):
                log_prob, entropy = ppo_ops.logprob_entropy(logits * 1, case.target, **kept, **options)
                total = (weights[0] * log_prob + weights[1] * entropy).sum()
                grads.append(torch.autograd.grad(total, logits)[0])
            torch.testing.assert_close(grads[1], grads[0], rtol=max(1e-6, torch.finfo(dtype).eps), atol=1e-6)
        return
    _assert_close(_ragged(case, ids, offsets), _masked(case, mask), dtype)


def test_index_dtypes_give_the_same_bits(kernels: str) -> None:
    _, ids, offsets = _sets(9, 1025)
    case = cases.random_case("ragged_values", 9, 1025)
    expected = _ragged(case, ids, offsets)
    for ids_dtype in (torch.int32, torch.int64):
        for offsets_dtype in (torch.int32, torch.int64):
            for ours, value in zip(_ragged(case, ids.to(ids_dtype), offsets.to(offsets_dtype)), expected, strict=True):
                assert torch.equal(ours, value)


def test_bits_of_a_row_do_not_depend_on_the_others(kernels: str) -> None:
    _, ids, offsets = _sets(9, 1025)
    case = cases.random_case("ragged_values", 9, 1025)
    whole = _ragged(case, ids, offsets)
    for row in range(9):
        alone = cases.Case("row", case.logits[row : row + 1], case.target[row : row + 1])
        kept = ids[offsets[row] : offsets[row + 1]]
        for ours, value in zip(_ragged(alone, kept, torch.tensor([0, len(kept)])), whole, strict=True):
            assert torch.equal(ours, value[row : row + 1])


def test_ten_thousand_ids_in_one_row(kernels: str) -> None:
    case = cases.random_case("ragged_many", 2, 32000)
    mask = cases.random_mask("ragged_many", 2, 32000)
    mask[0] = False
    mask[0, torch.randperm(32000, generator=cases.generator("many"))[:10_000]] = True
    _assert_close(_ragged(case, *ppo_ops.keep_sets_from_mask(mask)), _masked(case, mask), torch.float32)


def test_leading_shape_and_strides(kernels: str) -> None:
    _, ids, offsets = _sets(8, 129)
    case = cases.random_case("ragged_shape", 8, 129)
    flat = _ragged(case, ids, offsets)
    # Rows in the order of target, from logits whose leading dimensions are transposed in memory.
    logits = case.logits.view(2, 4, 129).transpose(0, 1).contiguous().transpose(0, 1)
    shaped = cases.Case("shaped", logits, case.target.view(2, 4))
    for ours, expected in zip(_ragged(shaped, ids, offsets), flat, strict=True):
        assert torch.equal(ours.reshape(expected.shape), expected)


def test_special_values(kernels: str) -> None:
    case = cases.random_case("ragged_special", 6, 129)
    case.logits[0, 3] = torch.nan  # dropped: only the entropy sees it
    case.logits[1, 4] = torch.nan  # kept
    case.logits[2, 5:] = -torch.inf
    case.logits[3] += 1e6
    case.logits[4, 7] = 500.0  # dropped, far above the kept maximum
    case.target.copy_(torch.tensor([8, 8, 1, 8, 8, -100]))
    case.logits[5] = torch.nan
    mask = torch.zeros(6, 129, dtype=torch.bool)
    mask[:, 8:40] = True
    mask[1, 4] = True
    mask[2, :10] = True
    ragged, masked = _ragged(case, *ppo_ops.keep_sets_from_mask(mask)), _masked(case, mask)
    # Row 1 has a NaN log-prob. Its gradient is NaN on the kept set; off it, 0 and NaN are both right.
    for grad in (*ragged[3::2], *masked[3::2]):
        assert grad[1][mask[1]].isnan().all()
        grad[1] = 0.0
    _assert_close(ragged, masked, torch.float32)


def test_against_reference(kernels: str) -> None:
    mask, ids, offsets = _sets(9, 129)
    case = cases.random_case("ragged_truth", 9, 129, torch.float64, temperature=1.3)
    logits = case.logits.clone().requires_grad_()
    truth = reference.logprob_entropy(logits, case.target, mask, temperature=1.3)
    ours = _ragged(case, ids, offsets)
    torch.testing.assert_close(ours[0], truth[0].detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours[3], torch.autograd.grad(truth[0].sum(), logits)[0], rtol=1e-12, atol=1e-12)


def test_gradcheck(kernels: str) -> None:
    _, ids, offsets = _sets(5, 7)
    case = cases.random_case("ragged_gradcheck", 5, 7, torch.float64, temperature=0.7)
    logits = case.logits.clone().requires_grad_()

    def outputs(x: Tensor) -> tuple[Tensor, Tensor]:
        return ppo_ops.logprob_entropy(x, case.target, keep_ids=ids, keep_offsets=offsets, **case.options())

    assert torch.autograd.gradcheck(outputs, (logits,))


@pytest.mark.parametrize("name", ["logprob", "logprob_entropy"])
def test_opcheck(name: str) -> None:
    _, ids, offsets = _sets(5, 7)
    case = cases.random_case("ragged_opcheck", 5, 7)
    kept = {"keep_ids": ids, "keep_offsets": offsets}
    args = (case.logits.requires_grad_(), case.target)
    torch.library.opcheck(getattr(torch.ops.ppo, name).default, args, kept)


def test_no_rows(kernels: str) -> None:
    logits = torch.zeros(0, 7, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.int64)
    log_prob = ppo_ops.logprob(logits, empty, keep_ids=empty, keep_offsets=torch.zeros(1, dtype=torch.int64))
    log_prob.sum().backward()
    assert logits.grad.shape == (0, 7)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"keep_offsets": [1, 2, 3]}, ValueError, "keep_offsets must start at 0, got 1"),
        ({"keep_offsets": [0, 2, 4]}, ValueError, "keep_offsets must end at the number of keep_ids, 3, got 4"),
        ({"keep_offsets": [0, 4, 3]}, ValueError, "keep_offsets must not decrease, got 4 and then 3 for row 1"),
        ({"keep_offsets": [0, 3]}, ValueError, r"keep_offsets must have the shape \[N \+ 1\] \(3,\), got \(2,\)"),
        ({"keep_ids": [0, 7, 1]}, IndexError, r"keep_ids must be in \[0, 7\), got 7 at position 1"),
        ({"keep_ids": [0, 6, -1]}, IndexError, r"keep_ids must be in \[0, 7\), got -1 at position 2"),
        ({"keep_ids": [0.0, 1.0, 2.0]}, TypeError, "keep_ids must be int32 or int64, got torch.float32"),
        ({"keep_ids": None}, ValueError, "keep_ids and keep_offsets must be given together, got keep_ids=None"),
        ({"keep_mask": True}, ValueError, "keep_mask and keep_ids must not both be given"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_errors(changes: dict[str, object], error: type[Exception], message: str) -> None:
    given = {"keep_ids": [0, 1, 2], "keep_offsets": [0, 1, 3], **changes}
    arguments = {name: None if value is None else torch.tensor(value) for name, value in given.items()}
    if "keep_mask" in arguments:
        arguments["keep_mask"] = torch.ones(2, 7, dtype=torch.bool)
    with pytest.raises(error, match=message):
        ppo_ops.logprob(torch.zeros(2, 7), torch.tensor([0, 1]), **arguments)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_whose_differences_wrap(dtype: torch.dtype) -> None:
    most = torch.iinfo(dtype).max
    offsets = torch.tensor([0, most, -2, 3], dtype=dtype)
    with pytest.raises(ValueError, match=f"keep_offsets must not decrease, got {most} and then -2 for row 1"):
        ppo_ops.logprob(torch.zeros(3, 7), torch.zeros(3).long(), keep_ids=torch.arange(3), keep_offsets=offsets)


@pytest.mark.parametrize("offsets", [[0, 2**63 - 1, -2, 3], [0, 2, 1, 3], [1, 2, 3, 3], [0, 1, 2, 2]])
def test_wrong_offsets_spoil_all_rows_where_they_cannot_raise(offsets: list[int]) -> None:
    """The first ones' differences wrap to positive numbers."""
    place = {"ignore_index": -100, "start": 0, "columns": 4, "end": 4}
    found = kept.entries(torch.zeros(3, dtype=torch.int64), torch.tensor([0, 1, 2]), torch.tensor(offsets), **place)
    assert found.broken.all()
    right = kept.entries(
        torch.zeros(3, dtype=torch.int64), torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1, 3]), **place
    )
    assert not right.broken.any()
