# ruff: noqa: E501  (golden texts are as long as they are)
"""Error texts: each names the argument, what was expected and what came, alike for real and for fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import ppo_ops
from ppo_ops.kernels import cpu

LOGITS = torch.zeros(2, 5)
TARGET = torch.tensor([1, 4])


def _call(**changed: Any) -> dict[str, Any]:
    return {"logits": LOGITS, "target": TARGET, **changed}


# What no value of a tensor decides: the same for fake tensors.
STATIC: dict[str, dict[str, Any]] = {
    "integer logits": _call(logits=LOGITS.long()),
    "complex logits": _call(logits=LOGITS.to(torch.complex64)),
    "logits without a dimension": _call(logits=torch.tensor(0.0), target=torch.tensor(0)),
    "logits a list": _call(logits=[[0.0]]),
    "target a number": _call(target=1),
    "target too long": _call(target=torch.tensor([1, 2, 3])),
    "target with two dimensions more": _call(target=TARGET.reshape(2, 1, 1)),
    "target floating point": _call(target=TARGET.float()),
    "target bool": _call(target=TARGET > 2),
    "target on another device": _call(target=TARGET.to("meta")),
    "mask too narrow": _call(keep_mask=torch.ones(2, 4, dtype=torch.bool)),
    "mask of one row": _call(keep_mask=torch.ones(5, dtype=torch.bool)),
    "mask of integers": _call(keep_mask=torch.ones(2, 5, dtype=torch.int64)),
    "mask on another device": _call(keep_mask=torch.ones(2, 5, dtype=torch.bool, device="meta")),
    "temperature 0": _call(temperature=0),
    "temperature negative": _call(temperature=-0.5),
    "temperature nan": _call(temperature=float("nan")),
    "temperature a string": _call(temperature="hot"),
    "temperature per column": _call(temperature=torch.ones(5)),
    "temperature with a dimension more": _call(temperature=torch.ones(2, 1)),
    "temperature float64": _call(temperature=torch.ones((), dtype=torch.float64)),
    "temperature integer": _call(logits=LOGITS.double(), temperature=torch.ones((), dtype=torch.int64)),
    "temperature on another device": _call(temperature=torch.ones((), device="meta")),
    "temperature with a gradient": _call(temperature=torch.ones((), requires_grad=True)),
    "vocab_size 0": _call(vocab_size=0),
    "vocab_size above V": _call(vocab_size=6),
    "vocab_start negative": _call(vocab_start=-1),
    "vocab_start without a group": _call(vocab_start=5),
    "unknown group": _call(group="tp"),
    "group a number": _call(group=4),
    "in-place backward, leaf": _call(logits=LOGITS.clone().requires_grad_(), inplace_backward=True),
    "in-place backward, view of a leaf": _call(logits=LOGITS.clone().requires_grad_()[:], inplace_backward=True),
    "in-place backward, strides": _call(logits=LOGITS.expand(2, 5).t().contiguous().t(), inplace_backward=True),
}

# What only the values tell.
VALUES: dict[str, dict[str, Any]] = {
    "target V": _call(target=torch.tensor([1, 5])),
    "target -1": _call(target=torch.tensor([-1, 1])),
    "target -100 and another ignore_index": _call(target=torch.tensor([1, -100]), ignore_index=-1),
    "target in the padding": _call(vocab_size=4),
    "target in the third of four rows": _call(logits=torch.zeros(2, 2, 5), target=torch.tensor([[0, 1], [9, 7]])),
    "target uint8": _call(target=torch.tensor([1, 156], dtype=torch.uint8)),
    "temperature tensor 0": _call(temperature=torch.tensor(0.0)),
    "temperature tensor negative": _call(temperature=torch.tensor([1.0, -2.0])),
    "temperature tensor nan": _call(temperature=torch.tensor([float("nan"), 1.0])),
}


def _error(function: Callable[..., Any], arguments: dict[str, Any]) -> str:
    try:
        result = function(**arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"no error, but {result}"


def _fake_error(function: Callable[..., Any], arguments: dict[str, Any]) -> str:
    with FakeTensorMode() as mode:
        return _error(function, tree_map_only(Tensor, mode.from_tensor, arguments))


def _report(calls: dict[str, dict[str, Any]]) -> str:
    return "\n".join(f"{name}\n    {_error(ppo_ops.logprob_entropy, call)}" for name, call in calls.items())


def test_error_texts() -> None:
    assert_expected_inline(
        _report(STATIC),
        """\
integer logits
    TypeError: logits must be one of float16, bfloat16, float32, float64, got torch.int64
complex logits
    TypeError: logits must be one of float16, bfloat16, float32, float64, got torch.complex64
logits without a dimension
    ValueError: logits must have the shape [..., V_local], got a 0-dim tensor
logits a list
    TypeError: logits must be a tensor, got <class 'list'>
target a number
    TypeError: target must be a tensor, got <class 'int'>
target too long
    ValueError: target must have the shape of logits without the last dimension (2,), got (3,)
target with two dimensions more
    ValueError: target must have the shape of logits without the last dimension (2,), got (2, 1, 1)
target floating point
    TypeError: target must have an integer dtype, got torch.float32
target bool
    TypeError: target must have an integer dtype, got torch.bool
target on another device
    ValueError: target must be on the device of logits (cpu), got meta
mask too narrow
    ValueError: keep_mask must have the shape of logits (2, 5), got (2, 4)
mask of one row
    ValueError: keep_mask must have the shape of logits (2, 5), got (5,)
mask of integers
    TypeError: keep_mask must be bool, got torch.int64
mask on another device
    ValueError: keep_mask must be on the device of logits (cpu), got meta
temperature 0
    ValueError: temperature must be > 0, got 0
temperature negative
    ValueError: temperature must be > 0, got -0.5
temperature nan
    ValueError: temperature must be > 0, got nan
temperature a string
    TypeError: temperature must be a number or a tensor, got <class 'str'>
temperature per column
    ValueError: temperature must have the shape () or that of target (2,), got (5,)
temperature with a dimension more
    ValueError: temperature must have the shape () or that of target (2,), got (2, 1)
temperature float64
    TypeError: temperature must be float32 for torch.float32 logits, got torch.float64
temperature integer
    TypeError: temperature must be float32, float64 for torch.float64 logits, got torch.int64
temperature on another device
    ValueError: temperature must be on the device of logits (cpu), got meta
temperature with a gradient
    ValueError: temperature must not require grad: its gradient is not computed; pass temperature.detach()
vocab_size 0
    ValueError: vocab_size must be at least 1, got 0
vocab_size above V
    ValueError: vocab_size must be at most the 5 columns that the 1 ranks of the group hold together, got 6
vocab_start negative
    ValueError: vocab_start must not be negative, got -1
vocab_start without a group
    ValueError: vocab_start must be 0 without a group, because logits then hold the whole vocabulary; got 5
unknown group
    ValueError: group_name must be the name of an initialized process group of this rank, or '' when logits hold the whole vocabulary; got 'tp'
group a number
    TypeError: group must be a ProcessGroup, a 1-D DeviceMesh, a group name or None, got <class 'int'>
in-place backward, leaf
    ValueError: logits must be an intermediate result with inplace_backward, whose values the gradient may overwrite; got a leaf
in-place backward, view of a leaf
    ValueError: logits must be an intermediate result with inplace_backward, whose values the gradient may overwrite; got a view of a leaf
in-place backward, strides
    ValueError: logits must be contiguous with inplace_backward, got strides (1, 2) for torch.Size([2, 5])""",
    )


def test_error_texts_that_depend_on_values() -> None:
    assert_expected_inline(
        _report(VALUES),
        """\
target V
    IndexError: target must be in [0, 5) or equal ignore_index (-100), got 5 in row 1
target -1
    IndexError: target must be in [0, 5) or equal ignore_index (-100), got -1 in row 0
target -100 and another ignore_index
    IndexError: target must be in [0, 5) or equal ignore_index (-1), got -100 in row 1
target in the padding
    IndexError: target must be in [0, 4) or equal ignore_index (-100), got 4 in row 1
target in the third of four rows
    IndexError: target must be in [0, 5) or equal ignore_index (-100), got 9 in row 2
target uint8
    IndexError: target must be in [0, 5) or equal ignore_index (-100), got 156 in row 1
temperature tensor 0
    ValueError: temperature must be > 0, got 0.0 in row 0
temperature tensor negative
    ValueError: temperature must be > 0, got -2.0 in row 1
temperature tensor nan
    ValueError: temperature must be > 0, got nan in row 0""",
    )


@pytest.mark.parametrize("name", STATIC)
def test_fake_tensors_raise_alike(name: str) -> None:
    for function in (ppo_ops.logprob_entropy, ppo_ops.logprob):
        assert _fake_error(function, STATIC[name]) == _error(ppo_ops.logprob_entropy, STATIC[name])


@pytest.mark.parametrize("name", [*STATIC, *VALUES])
def test_both_functions_raise_alike(name: str) -> None:
    call = {**STATIC, **VALUES}[name]
    assert _error(ppo_ops.logprob, call) == _error(ppo_ops.logprob_entropy, call)


@pytest.mark.parametrize("name", [*STATIC, *VALUES])
def test_the_text_names_the_argument(name: str) -> None:
    """The changed argument, but for those that only another one makes wrong."""
    error = _error(ppo_ops.logprob_entropy, {**STATIC, **VALUES}[name])
    kind, text = error.split(": ", 1)
    assert kind in ("TypeError", "ValueError", "IndexError")
    argument = name.split()[0].rstrip(",")
    argument = {"mask": "keep_mask", "integer": "logits", "complex": "logits", "unknown": "group_name"}.get(
        argument, argument
    )
    argument = {"in-place": "logits"}.get(argument, argument)
    assert argument in text


@pytest.mark.parametrize("name", VALUES)
def test_values_are_judged_before_anything_is_computed(name: str, kernels: str) -> None:
    """Also where a gradient will be wanted, and for both dtypes of kernels."""
    for dtype in (torch.float32, torch.float64):
        call = dict(VALUES[name])
        call["logits"] = call["logits"].to(dtype).requires_grad_()
        assert _error(ppo_ops.logprob_entropy, call) == _error(ppo_ops.logprob_entropy, VALUES[name])


def test_an_error_leaves_nothing_behind() -> None:
    """A good call after each bad one."""
    for call in (*STATIC.values(), *VALUES.values()):
        _error(ppo_ops.logprob_entropy, call)
        log_prob, entropy = ppo_ops.logprob_entropy(LOGITS, TARGET)
        assert log_prob.isfinite().all()
        assert entropy.isfinite().all()


@pytest.mark.parametrize("wrong", [None, [0, 1]], ids=["None", "list"])
def test_what_is_no_tensor_is_named(wrong: object) -> None:
    logits, target, weight = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), torch.zeros(3, 4)
    for function in (ppo_ops.logprob, ppo_ops.logprob_entropy):
        with pytest.raises(TypeError, match="logits must be a tensor, got"):
            function(wrong, target)
        with pytest.raises(TypeError, match="target must be a tensor, got"):
            function(logits, wrong)
    for function in (ppo_ops.linear_logprob, ppo_ops.linear_logprob_entropy):
        for name, place in (("hidden", 0), ("weight", 1), ("target", 2)):
            arguments = [logits, weight, target]
            arguments[place] = wrong
            with pytest.raises(TypeError, match=f"{name} must be a tensor, got"):
                function(*arguments)


@pytest.mark.parametrize("way", ["short", "long"])
def test_the_first_fault_of_several(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets, temperatures, kept sets, whichever way past the dispatcher a call takes."""
    if way == "long":
        monkeypatch.setattr(cpu, "finishes", lambda *_: False)
    logits, target, temperature = torch.zeros(2, 4), torch.tensor([0, 4]), torch.tensor([1.0, 0.0])
    kept = {"keep_ids": torch.tensor([9]), "keep_offsets": torch.tensor([0, 1, 1])}
    with pytest.raises(IndexError, match="target must be in"):
        ppo_ops.logprob(logits, target, temperature=temperature, **kept)
    with pytest.raises(ValueError, match="temperature must be > 0"):
        ppo_ops.logprob(logits, target % 4, temperature=temperature, **kept)
    with pytest.raises(IndexError, match="keep_ids must be in"):
        ppo_ops.logprob(logits, target % 4, **kept)
