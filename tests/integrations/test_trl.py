"""TRL's functions: the adapters against values everywhere, and against TRL itself where it is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from ppo_ops import reference
from ppo_ops.integrations import trl as ours
from tests.cases import Case, generator
from tests.integrations import hosts
from tests.integrations.hosts import case_of
from tests.tolerances import assert_budget, assert_exact, assert_same_bits

INSTALLED = importlib.util.find_spec("trl") is not None
needs_trl = pytest.mark.skipif(not INSTALLED, reason="trl is not installed (extra 'bench')")

DTYPES = [torch.float32, torch.bfloat16]
K = 5


def _functions(module: Any) -> dict[str, tuple[hosts.Function, tuple[str, ...]]]:
    """Each function of a module as `hosts` takes it."""
    return {
        "selective_log_softmax": (lambda x, i: (module.selective_log_softmax(x, i),), ("log_prob",)),
        "entropy_from_logits": (lambda x, _: (module.entropy_from_logits(x),), ("entropy",)),
        "both": (module.selective_log_softmax_and_entropy, ("log_prob", "entropy")),
    }


NAMES = tuple(_functions(ours))


def _theirs() -> Any:
    import trl.trainer.utils

    return trl.trainer.utils


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_values(name: str, dtype: torch.dtype) -> None:
    """On the CPU in the dtype of the logits, as TRL."""
    case = case_of("trl", dtype)
    function, which = _functions(ours)[name]
    hosts.judge(hosts.evaluate(function, case, which), hosts.plainly(case, which, dtype), case, which)


@needs_trl
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_is_that_of_trl(name: str, dtype: torch.dtype) -> None:
    (mine, which), (theirs, _) = _functions(ours)[name], _functions(_theirs())[name]
    hosts.check(mine, theirs, case_of("trl", dtype), *which)


def _options(kind: str, index: Tensor) -> dict[str, Any]:
    kept = torch.arange(index.numel()).view(index.shape) % 3
    return {"temperature": {"temperature": 0.7}, "row_mask": {"row_mask": kept}}.get(kind, {})


def _several(function: Any, logits: Tensor, index: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    """K tokens a position: values, and the gradient under an upstream gradient that differs from token to token."""
    leaf = logits.clone().requires_grad_()
    found = function(leaf * 1, index, **more)
    upstream = torch.randn(index.shape, generator=generator("trl upstream")).bfloat16().to(found.dtype)
    (grad,) = torch.autograd.grad(found, leaf, upstream)
    return found.detach(), grad


def _plain_several(logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None) -> Tensor:
    found = (logits / temperature).log_softmax(-1).gather(-1, index)
    return found if row_mask is None else found.masked_fill(row_mask == 0, 0.0)


@pytest.mark.parametrize("framework", [False, pytest.param(True, marks=needs_trl)], ids=["values", "trl"])
@pytest.mark.parametrize("kind", ["plain", "temperature", "row_mask"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_several_tokens_a_position(dtype: torch.dtype, kind: str, framework: bool) -> None:
    case = case_of("trl several", dtype)
    index = torch.randint(hosts.VOCABULARY, (*case.target.shape, K), generator=generator("trl index"))
    more = _options(kind, index)
    mine = _several(ours.selective_log_softmax, case.logits, index, **more)
    right = _several(_plain_several, case.logits.double(), index, **more)
    if framework:
        near = _several(_theirs().selective_log_softmax, case.logits, index, **more)
    else:
        near = tuple(t.to(dtype) for t in _several(_plain_several, case.logits.float(), index, **more))
    # Scale: the largest intermediate values are the logits' spread, about 40, and K gradients of about 3.
    for values in zip(mine, near, right, strict=True):
        assert_budget(*values, torch.full_like(values[2], 40.0))


@pytest.mark.parametrize("kind", ["temperature", "row_mask"])
def test_options_of_both(kind: str) -> None:
    """Against `ppo_ops.reference`, and TRL where it is there."""
    case = case_of("trl options")
    more = _options(kind, case.target)
    mine = ours.selective_log_softmax_and_entropy(case.logits, case.target, **more)
    right = reference.logprob_entropy(case.logits, case.target, temperature=more.get("temperature", 1.0))
    if "row_mask" in more:
        right = tuple(value.masked_fill(more["row_mask"] == 0, 0.0) for value in right)
    for found, expected in zip(mine, right, strict=True):
        # float32 roundings of numbers up to 40.
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    if INSTALLED:
        theirs = _theirs().selective_log_softmax_and_entropy(case.logits, case.target, **more)
        for found, near in zip(mine, theirs, strict=True):
            torch.testing.assert_close(found, near, rtol=1e-5, atol=1e-5)


def test_masked_rows_get_no_gradient_and_are_not_read() -> None:
    case = case_of("trl mask")
    row_mask = torch.ones_like(case.target).index_fill(1, torch.tensor([2]), 0)
    leaf = case.logits.index_fill(1, torch.tensor([2]), torch.nan).requires_grad_()
    log_prob, entropy = ours.selective_log_softmax_and_entropy(leaf, case.target, row_mask=row_mask)
    (log_prob + entropy).sum().backward()
    assert leaf.grad is not None
    for value in (log_prob[:, 2], entropy[:, 2], leaf.grad[:, 2]):
        assert_exact(value.detach(), torch.zeros_like(value))
    assert leaf.grad.isfinite().all()


def test_entropy_without_gradient() -> None:
    leaf = torch.zeros(1, 2, 4, requires_grad=True)
    log_prob, entropy = ours.selective_log_softmax_and_entropy(leaf, torch.zeros(1, 2, dtype=torch.int64), False)
    assert log_prob.requires_grad
    assert not entropy.requires_grad


def test_chunks_change_no_bit() -> None:
    logits = case_of("trl").logits
    for chunk_size in (1, 5, 10_000):
        assert_same_bits(ours.entropy_from_logits(logits, chunk_size), ours.entropy_from_logits(logits))
    for bad in (0, -1, 2.0):
        with pytest.raises(ValueError, match="chunk_size must be a positive integer, got"):
            ours.entropy_from_logits(logits, bad)  # type: ignore[arg-type]


def test_what_is_refused() -> None:
    logits, index = torch.zeros(1, 2, 4), torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="temperature must be > 0, got 0"):
        ours.selective_log_softmax(logits, index, temperature=0.0)
    with pytest.raises(ValueError, match=r"row_mask must have the shape of index \(1, 2\), got \(2,\)"):
        ours.selective_log_softmax(logits, index, row_mask=torch.ones(2))


# Where TRL is wrong.


def test_banned_tokens_have_an_entropy() -> None:
    """Values and gradient against float64; TRL's are NaN."""
    case = case_of("trl banned")
    case = Case(
        case.name,
        case.logits.index_fill(-1, torch.tensor([5]), -torch.inf),
        case.target.masked_fill(case.target == 5, 0),
    )
    function, which = _functions(ours)["entropy_from_logits"]
    hosts.judge(hosts.evaluate(function, case, which), hosts.plainly(case, which, torch.float32), case, which)
    if INSTALLED:
        theirs = hosts.evaluate(_functions(_theirs())["entropy_from_logits"][0], case, which)
        assert theirs.outputs[0].isnan().all()


@needs_trl
@pytest.mark.parametrize("name", NAMES[:2])
def test_bfloat16_is_rounded_once(name: str) -> None:
    """TRL computes in bfloat16. Ours errs by at most half a unit in the last place of the result."""
    logits = (2 * torch.randn(2, 32, 32000, generator=generator("trl wide"))).bfloat16()
    case = Case("trl wide", logits, torch.randint(32000, (2, 32), generator=generator("trl wide target")))
    (mine, which), (theirs, _) = _functions(ours)[name], _functions(_theirs())[name]
    (right,) = hosts.truth(case, which).outputs
    # bfloat16 has 8 significant bits: half a unit is at most 2^-8 of the value; a float32 rounding comes before.
    half_unit = right.abs() * 2.0**-8
    (found,), (near,) = (hosts.evaluate(f, case, which).outputs for f in (mine, theirs))
    assert ((found.double() - right).abs() <= half_unit * 1.001).all()
    assert hosts.errors(near, right) > hosts.errors(found, right)
