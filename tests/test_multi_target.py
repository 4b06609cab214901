"""K targets a position against `reference` applied once a place, and what does not combine with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import ppo_ops
from ppo_ops import reference
from ppo_ops.multi_target import _totals
from tests.tolerances import assert_exact, assert_fp64

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _inputs(dtype: torch.dtype, rows: tuple[int, ...] = (4, 3), columns: int = 50, places: int = 6) -> Any:
    """Logits with a -inf; target with ignored places, an ignored row, equal ids; temperatures; upstream gradients."""
    source = torch.Generator().manual_seed(0)
    logits = torch.randn(*rows, columns, generator=source).to(dtype)
    target = torch.randint(columns, (*rows, places), generator=source)
    if target.numel() > 2 * places:
        logits.view(-1, columns)[0, 3] = -torch.inf
        target.view(-1, places)[0, 2] = -100
        target.view(-1, places)[1] = -100
        target.view(-1, places)[2] = 7
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    temperature = 0.5 + torch.rand(rows, generator=source, dtype=wide)
    return logits.requires_grad_(), target, temperature, torch.randn(target.shape, generator=source, dtype=wide)


def _expected(logits: Tensor, target: Tensor, grad: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """One call of `reference` a place, in float64."""
    leaf = logits.detach().double().requires_grad_()
    places = [reference.logprob_entropy(leaf, t, **options)[0] for t in target.unbind(-1)]
    log_prob = torch.stack(places, -1)
    return log_prob.detach(), torch.autograd.grad(log_prob, leaf, grad.double())[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", ["temperature", "vocab_size", "ignore_index"])
def test_like_one_call_a_place(dtype: torch.dtype, option: str) -> None:
    logits, target, temperature, grad = _inputs(dtype)
    options: dict[str, Any] = {"temperature": temperature}
    if option == "vocab_size":
        options, target = {"vocab_size": 40}, torch.where(target >= 0, target % 40, target)
    elif option == "ignore_index":
        options, target = {"ignore_index": 7}, target.clamp(min=0)
    log_prob = ppo_ops.logprob(logits, target, **options)
    (grad_logits,) = torch.autograd.grad(log_prob, logits, grad)
    expected, expected_grad = _expected(logits, target, grad, **options)
    if dtype == torch.float64:
        assert_fp64(log_prob.detach(), expected)
        assert_fp64(grad_logits, expected_grad)
        return
    # Eight roundings of intermediate values up to 8; the gradient, a sum of up to 12 terms of size 4, is then rounded
    # once to its dtype, which is half a unit of its last place.
    assert log_prob.dtype == torch.float32
    torch.testing.assert_close(log_prob.double(), expected, rtol=0, atol=8e-6)
    rounding = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(grad_logits.double(), expected_grad, rtol=1.01 * rounding, atol=1e-5)


def test_one_target_is_a_single_one() -> None:
    """K = 1 is the same statistics and formula; of one operator C takes the logarithm, of the other torch: one unit."""
    logits, target, temperature, _ = _inputs(torch.float32)
    many = ppo_ops.logprob(logits, target[..., :1], temperature=temperature)
    one = ppo_ops.logprob(logits, target[..., 0], temperature=temperature)
    torch.testing.assert_close(many[..., 0], one, rtol=2.5e-7, atol=0)


def test_gradcheck() -> None:
    logits, target, temperature, _ = _inputs(torch.float64, rows=(3,), columns=8)
    finite = logits.detach().nan_to_num(neginf=-3.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ppo_ops.logprob(x, target % 8, temperature=temperature), finite)


def test_all_ids_sum_to_one() -> None:
    """Property: over all V ids the probabilities add up to 1, and the gradient of each sums to 0 over the columns."""
    logits = torch.randn(5, 33, dtype=torch.float64, requires_grad=True)
    log_prob = ppo_ops.logprob(logits, torch.arange(33).expand(5, 33))
    torch.testing.assert_close(log_prob.exp().sum(-1), torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-14)
    (grad,) = torch.autograd.grad(log_prob.square().sum(), logits)
    torch.testing.assert_close(grad.sum(-1), torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-10)


def test_zero_upstream_gradient_of_a_nan_row() -> None:
    logits = torch.tensor([[torch.nan, 0.0], [0.0, 0.0]], requires_grad=True)
    log_prob = ppo_ops.logprob(logits, torch.tensor([[0, 1], [0, 1]]))
    assert log_prob[0].isnan().all()
    (grad,) = torch.autograd.grad(log_prob, logits, torch.tensor([[0.0, 0.0], [1.0, 0.0]]), retain_graph=True)
    assert_exact(grad, torch.tensor([[0.0, 0.0], [0.5, -0.5]]))
    (grad,) = torch.autograd.grad(log_prob, logits, torch.tensor([[1.0, -1.0], [1.0, -1.0]]))
    assert grad[0].isnan().all()
    assert_exact(grad[1], torch.tensor([1.0, -1.0]))


@pytest.mark.parametrize("strided", [False, True])
def test_layouts_and_no_rows(strided: bool) -> None:
    logits, target, _, grad = _inputs(torch.float64)
    expected, expected_grad = _expected(logits, target, grad)
    if strided:
        logits = logits.detach().transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
        target = target.transpose(0, 2).contiguous().transpose(0, 2)
    log_prob = ppo_ops.logprob(logits, target)
    assert_fp64(log_prob.detach(), expected)
    assert_fp64(torch.autograd.grad(log_prob, logits, grad)[0], expected_grad)
    empty = torch.empty(0, 5, requires_grad=True)
    none = ppo_ops.logprob(empty, torch.empty(0, 2, dtype=torch.int64))
    assert none.shape == (0, 2)
    assert torch.autograd.grad(none.sum(), empty)[0].shape == (0, 5)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "id": ({"target": torch.tensor([[0, 1], [2, 5]])}, IndexError, r"\[0, 5\).*got 5 in row 1, place 1"),
    "negative": ({"target": torch.tensor([[0, -1], [2, 0]])}, IndexError, "got -1 in row 0, place 1"),
    "rows": ({"target": torch.zeros(3, 2, dtype=torch.int64)}, ValueError, r"target must have the shape .*got \(3,\)"),
    "no_place": ({"target": torch.zeros(2, 0, dtype=torch.int64)}, ValueError, "at least one id a position"),
    "dtype": ({"target": torch.zeros(2, 2)}, TypeError, "target must have an integer dtype"),
    "mask": ({"keep_mask": torch.ones(2, 5, dtype=torch.bool)}, ValueError, "keep_mask must be None with K targets"),
    "in_place": ({"inplace_backward": True}, ValueError, "inplace_backward must be False with K targets"),
    "temperature": ({"temperature": torch.ones((), requires_grad=True)}, ValueError, "must not require grad"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name: str) -> None:
    change, error, text = BAD[name]
    arguments = {"logits": torch.zeros(2, 5), "target": torch.zeros(2, 2, dtype=torch.int64), **change}
    with pytest.raises(error, match=text):
        ppo_ops.logprob(**arguments)


def test_no_second_derivative() -> None:
    logits = torch.randn(2, 5, requires_grad=True)
    log_prob = ppo_ops.logprob(logits, torch.tensor([[0, 1], [2, 3]]))
    (grad,) = torch.autograd.grad(log_prob.sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        grad.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype: torch.dtype) -> None:
    logits, target, temperature, grad = _inputs(dtype)
    where = (-100, 45, None, "")
    target = torch.where(target >= 0, target % 45, target)
    opcheck(torch.ops.ppo._targets_logprob.default, (logits, target, temperature, *where))
    plain = (logits.detach(), target, temperature, *where)
    _, normalizers = torch.ops.ppo._targets_logprob(*plain)
    opcheck(torch.ops.ppo._targets_stats.default, (*plain, 1))
    opcheck(torch.ops.ppo._targets_grad.default, (*plain, normalizers, grad))


def test_compiled_for_any_number_of_rows() -> None:
    """One graph for all row counts but 0 and 1, which torch specialises; the same bits as eager."""
    torch._dynamo.reset()
    function = torch.compile(ppo_ops.logprob, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (3, 0, 1, 5):
        logits, target, _, _ = _inputs(torch.float32, rows=(rows, 2))
        ours, eager = function(logits, target), ppo_ops.logprob(logits, target)
        assert_exact(ours, eager)
        assert_exact(*(torch.autograd.grad(x.sum(), logits)[0] for x in (ours, eager)))


@pytest.mark.parametrize("places", [1, 2, 3, 5, 8, 13])
def test_equal_ids_share_their_sum(places: int) -> None:
    """Sums of whole numbers, so that any order gives the same: each place of an id gets the id's total."""
    source = torch.Generator().manual_seed(places)
    ids = torch.randint(4, (50, places), generator=source)
    grad = torch.randint(-9, 10, ids.shape, generator=source).double()
    expected = ((ids.unsqueeze(2) == ids.unsqueeze(1)) * grad.unsqueeze(1)).sum(2)
    assert_exact(_totals(ids, grad), expected)
