"""Top-k against a stable sort, the sum of squared probabilities against float64; errors, opcheck, compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import ppo_ops
from tests.tolerances import assert_exact, assert_fp64

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Few columns are sorted whole; of many, chunks whose number does or does not divide the columns.
SHAPES = [(1, 1), (3, 1), (50, 5), (64, 64), (1000, 20), (4099, 3), (4099, 300)]


def _logits(dtype: torch.dtype, columns: int, ties: bool = False) -> Tensor:
    logits = torch.randn(4, 3, columns, generator=torch.Generator().manual_seed(columns))
    if ties:
        logits = logits.mul(2).round()
        logits[1] = 0.0
        logits[2, 0, : columns // 2] = -0.0
    logits[0, 0, columns // 2 + 1 :] = -torch.inf
    return logits.to(dtype)


def _best(logits: Tensor, k: int) -> Tensor:
    return logits.detach().sort(dim=-1, descending=True, stable=True)[1][..., :k]


def _close(actual: Tensor, expected: Tensor, dtype: torch.dtype, result: torch.dtype | None = None) -> None:
    """Ten float32 roundings of values up to 16; a gradient is rounded once more, to half a unit of its dtype."""
    if dtype == torch.float64:
        assert_fp64(actual, expected)
    else:
        rtol = 4e-6 if result is None else 4e-6 + 0.51 * torch.finfo(result).eps
        # Below its smallest normal number float16 has steps of 6e-8.
        torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "k"), SHAPES)
@pytest.mark.parametrize("ties", [False, True])
def test_topk(dtype: torch.dtype, columns: int, k: int, ties: bool) -> None:
    logits = _logits(dtype, columns, ties).requires_grad_()
    ids, log_probs = ppo_ops.vocab_parallel_topk(logits, k, temperature=0.7)
    assert_exact(ids, _best(logits, k))
    leaf = logits.detach().double().requires_grad_()
    expected = (leaf / 0.7).log_softmax(-1).gather(-1, ids)
    _close(log_probs.detach(), expected.detach(), dtype)
    grad = torch.randn(ids.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (ours,) = torch.autograd.grad(log_probs, logits, grad.to(log_probs.dtype))
    # autograd's p * -inf is no matter here: the gradient of log_softmax reads its output through exp.
    _close(ours, torch.autograd.grad(expected, leaf, grad)[0], dtype, dtype)


def test_rows_that_are_inf_or_nan() -> None:
    logits = torch.tensor([[-torch.inf] * 3, [0.0, torch.nan, 1.0], [0.0, 1.0, 1.0]])
    ids, log_probs = ppo_ops.vocab_parallel_topk(logits, 2)
    assert ids.tolist() == [[0, 1], [1, 2], [1, 2]]
    assert log_probs[:2].isnan().all()
    assert log_probs[2].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 2, 50, 4099])
def test_sum_squared_probs(dtype: torch.dtype, columns: int) -> None:
    logits = _logits(dtype, columns).requires_grad_()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    temperature = 0.5 + torch.rand(4, 3, generator=torch.Generator().manual_seed(2), dtype=wide)
    squares = ppo_ops.sum_squared_probs(logits, temperature=temperature)
    leaf = logits.detach().double().requires_grad_()
    expected = (leaf / temperature.double().unsqueeze(-1)).softmax(-1).square().sum(-1)
    _close(squares.detach(), expected.detach(), dtype)
    grad = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (ours,) = torch.autograd.grad(squares, logits, grad.to(wide))
    _close(ours, torch.autograd.grad(expected, leaf, grad)[0], dtype, dtype)


def test_closed_forms_of_the_sum_of_squares() -> None:
    """Exact: a common offset of 1e8 cancels; -inf counts as absent, also as padding; a row of -inf is NaN alone."""
    inf = torch.inf
    logits = torch.tensor([[1e8, 1e8, 1e8, 1e8], [5.0, -inf, -inf, -inf], [0.0, 0.0, -inf, -inf], [-inf] * 4])
    squares = ppo_ops.sum_squared_probs(logits)
    assert_exact(squares, torch.tensor([0.25, 1.0, 0.5, torch.nan]))
    assert_exact(ppo_ops.sum_squared_probs(logits[:1], vocab_size=2), torch.tensor([0.5]))
    leaf = logits.clone().requires_grad_()
    (grad,) = torch.autograd.grad(ppo_ops.sum_squared_probs(leaf), leaf, torch.tensor([1.0, 1.0, 1.0, 0.0]))
    assert_exact(grad, torch.zeros(4, 4))


@pytest.mark.parametrize("function", ["topk", "squares"])
def test_gradcheck(function: str) -> None:
    logits = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    temperature = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)

    def call(x: Tensor) -> Tensor:
        if function == "topk":
            return ppo_ops.vocab_parallel_topk(x, 3, temperature=temperature)[1]
        return ppo_ops.sum_squared_probs(x, temperature=temperature)

    assert torch.autograd.gradcheck(call, logits)
    (grad,) = torch.autograd.grad(call(logits).sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        grad.sum().backward()


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "k_0": (lambda: ppo_ops.vocab_parallel_topk(torch.zeros(2, 5), 0), ValueError, "k must be at least 1, got 0"),
    "k_6": (lambda: ppo_ops.vocab_parallel_topk(torch.zeros(2, 5), 6), ValueError, "vocabulary size 5, got 6"),
    "k_padding": (lambda: ppo_ops.vocab_parallel_topk(torch.zeros(2, 5), 4, vocab_size=3), ValueError, "size 3, got 4"),
    "dtype": (lambda: ppo_ops.vocab_parallel_topk(torch.zeros(2, 5, dtype=torch.int8), 1), TypeError, "logits must be"),
    "no_tensor": (lambda: ppo_ops.vocab_parallel_topk([0.0], 1), TypeError, "logits must be a tensor"),  # type: ignore[arg-type]
    "squares_scalar": (lambda: ppo_ops.sum_squared_probs(torch.tensor(0.0)), ValueError, "logits must have the shape"),
    "squares_temperature": (
        lambda: ppo_ops.sum_squared_probs(torch.zeros(2, 5), temperature=torch.ones(3)),
        ValueError,
        "temperature must have the shape",
    ),
    "squares_no_tensor": (lambda: ppo_ops.sum_squared_probs(1.0), TypeError, "logits must be a tensor"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name: str) -> None:
    call, error, text = BAD[name]
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [(4, 3), (0,)])
def test_opcheck(dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    logits = torch.randn(*rows, 50, dtype=dtype)
    temperature = torch.ones(rows, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    arguments = (logits, temperature, 45, None, "")
    leaves = (logits.clone().requires_grad_(), *arguments[1:])
    opcheck(torch.ops.ppo._vocab_topk.default, (*leaves, 4))
    opcheck(torch.ops.ppo._topk_stats.default, (*arguments, 1, 4))
    opcheck(torch.ops.ppo._sum_squared_probs.default, leaves)
    opcheck(torch.ops.ppo._squares_stats.default, (*arguments, 1))
    _, normalizers = torch.ops.ppo._sum_squared_probs(*arguments)
    opcheck(torch.ops.ppo._squares_grad.default, (*arguments, normalizers, torch.ones(rows, dtype=normalizers.dtype)))


def test_compiled_for_any_number_of_rows() -> None:
    """The same bits as eager from traced stages; no rows, too."""
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def function(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return *ppo_ops.vocab_parallel_topk(logits, 3), ppo_ops.sum_squared_probs(logits)

    for rows in (4, 0, 1, 7):
        logits = torch.randn(rows, 20, requires_grad=True)
        eager = (*ppo_ops.vocab_parallel_topk(logits, 3), ppo_ops.sum_squared_probs(logits))
        for ours, expected in zip(function(logits), eager, strict=True):
            assert_exact(ours, expected)
        grads = [torch.autograd.grad(o[1].sum() + o[2].sum(), logits)[0] for o in (function(logits), eager)]
        assert_exact(*grads)
