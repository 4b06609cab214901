"""What torch checks of the fused output layer's operators, what autograd may do with them, and what they refuse."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import ppo_ops
from ppo_ops.kernels import linear
from tests import linear_tools as tools
from tests import oracle
from tests.linear_tools import Inputs, make
from tests.tolerances import assert_exact, assert_same_bits

OPS = torch.ops.ppo
EVERYTHING = tools.everything()
SMALL = make("small", rows=5, vocab=7, width=3, dtype=torch.float64, bias=True, kept=True, temperature=0.7)
EMPTY = make("no rows", rows=0, vocab=7, width=3)


def _temperature(inputs: Inputs) -> Tensor:
    return torch.as_tensor(inputs.temperature, dtype=torch.float32)


def _calls(inputs: Inputs) -> list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """Each operator with arguments of its own kind."""
    sets = inputs.sets()
    options = {"temperature": _temperature(inputs), "vocab_size": inputs.vocab_size}
    public = (*tools.leaves_of(inputs)[:2], inputs.target, tools.leaves_of(inputs)[2])
    layer = (inputs.hidden, inputs.weight, inputs.bias, inputs.target, _temperature(inputs))
    place = (*(sets or {"keep_ids": None, "keep_offsets": None}).values(), inputs.hidden.dtype)
    where = (-100, inputs.vocab_size, None, "")
    _, entropy, normalizers = OPS._linear_logprob_entropy(*layer, *place, *where, True, True)
    upstream = [grad.to(entropy.dtype) for grad in inputs.upstream()]
    backward = (*layer, *place, *where, normalizers)
    calls = [
        (OPS.linear_logprob.default, public, {**options, **sets}),
        (OPS.linear_logprob_entropy.default, public, options),
        (OPS._linear_logprob_entropy.default, (*public[:2], *layer[2:], *place, *where, True, False), {}),
        (OPS._linear_vocab_stats.default, (*layer, *place, *where, 1, False), {}),
        (OPS._linear_backward.default, (*backward, *upstream, [True, True, inputs.bias is not None], True), {}),
        (OPS._linear_grads.default, (*backward, None, upstream[1], [True, False, False], True), {}),
        (OPS._linear_grads.default, (*backward, upstream[0], None, [False, True, False], False), {}),
    ]
    return [*calls, (OPS.linear_logprob_entropy.kept, public, {**options, **sets})] if sets else calls


@pytest.mark.parametrize("inputs", [SMALL, EMPTY, make("bfloat16", rows=5, vocab=7, dtype=torch.bfloat16)], ids=str)
def test_opcheck(inputs: Inputs) -> None:
    for op, args, kwargs in _calls(inputs):
        opcheck(op, args, kwargs)


@pytest.mark.parametrize("inputs", [EVERYTHING, make("strides", dtype=torch.float16), EMPTY], ids=str)
def test_fake_like_real(inputs: Inputs) -> None:
    for op, args, kwargs in _calls(inputs):
        oracle.check_fake_like_real(op, *args, **kwargs)


@pytest.mark.parametrize("inputs", [SMALL, make("plain small", rows=4, vocab=3, width=2, dtype=torch.float64)], ids=str)
def test_gradcheck(inputs: Inputs) -> None:
    def function(hidden: Tensor, weight: Tensor, *bias: Tensor) -> tuple[Tensor, Tensor]:
        return ppo_ops.linear_logprob_entropy(hidden, weight, inputs.target, *bias, **inputs.options())

    torch.autograd.gradcheck(function, [leaf for leaf in tools.leaves_of(inputs) if leaf is not None])


def _call(*leaves: Any, **more: Any) -> tuple[Tensor, Tensor]:
    hidden, weight, bias = leaves
    return ppo_ops.linear_logprob_entropy(hidden, weight, EVERYTHING.target, bias, **{**EVERYTHING.options(), **more})


def _upstream() -> list[Tensor]:
    return [grad.float() for grad in EVERYTHING.upstream()]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant: bool) -> None:
    leaves = tools.leaves_of(EVERYTHING)
    outputs = checkpoint(_call, *leaves, use_reentrant=use_reentrant)
    torch.autograd.backward(outputs, _upstream())
    for leaf, expected in zip(leaves, tools.run(EVERYTHING)[2:], strict=True):
        assert_same_bits(leaf.grad, expected)


def test_a_second_backward_needs_retain_graph() -> None:
    leaves = tools.leaves_of(EVERYTHING)
    outputs = _call(*leaves)
    for retain in (True, False):
        grads = torch.autograd.grad(outputs, leaves, _upstream(), retain_graph=retain)
        for actual, expected in zip(grads, tools.run(EVERYTHING)[2:], strict=True):
            assert_same_bits(actual, expected)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(outputs, leaves, _upstream())


@pytest.mark.parametrize("which", [0, 1])
def test_missing_gradient_of_either_output(which: int) -> None:
    """Equal to an upstream gradient of zeros."""
    leaves = tools.leaves_of(EVERYTHING)
    grads = torch.autograd.grad(_call(*leaves)[which], leaves, _upstream()[which])
    zeroed = _upstream()
    zeroed[1 - which].zero_()
    for actual, expected in zip(grads, torch.autograd.grad(_call(*leaves), leaves, zeroed), strict=True):
        # Rows without an upstream gradient are left out, which changes the order of sums.
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_expanded_upstream_gradient() -> None:
    leaves = tools.leaves_of(EVERYTHING)
    log_prob, entropy = _call(*leaves)
    grads = torch.autograd.grad(log_prob.sum() - entropy.mean(), leaves)
    given = [torch.ones(37), torch.full((37,), -1 / 37)]
    for actual, expected in zip(grads, torch.autograd.grad(_call(*leaves), leaves, given), strict=True):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("which", ["hidden", "weight", "bias"])
def test_double_backward_raises(which: str) -> None:
    leaves = tools.leaves_of(EVERYTHING)
    leaf = dict(zip(("hidden", "weight", "bias"), leaves, strict=True))[which]
    (grad,) = torch.autograd.grad(_call(*leaves), leaf, _upstream(), create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice: double backward is not implemented"):
        grad.sum().backward()


def test_a_stage_alone_has_no_gradient() -> None:
    name, args, _ = _calls(make("plain"))[3]
    stats = name(args[0].requires_grad_(), *args[1:])
    with pytest.raises(RuntimeError, match="is a stage without a gradient of its own"):
        stats.sum().backward()


def test_tied_embedding() -> None:
    """The weight is the embedding of the same model too: its gradient is the sum of both uses."""
    weight = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    tokens, target = torch.arange(9), torch.arange(1, 10)
    gradients = []
    for through_logits in (True, False):
        hidden = torch.tanh(weight[tokens])
        if through_logits:
            log_prob, entropy = ppo_ops.logprob_entropy(hidden @ weight.t(), target)
        else:
            log_prob, entropy = ppo_ops.linear_logprob_entropy(hidden, weight, target)
        gradients.append(torch.autograd.grad(log_prob.sum() + entropy.sum(), weight)[0])
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_input_gets_no_gradient(frozen: str) -> None:
    hidden, weight, _ = tools.leaves_of(make("plain"))
    {"hidden": hidden, "weight": weight}[frozen].requires_grad_(False)
    log_prob, _ = ppo_ops.linear_logprob_entropy(hidden, weight, make("plain").target)
    log_prob.sum().backward()
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")


def test_change_of_the_weight_after_forward_raises() -> None:
    hidden, weight, _ = tools.leaves_of(make("plain"))
    log_prob, _ = ppo_ops.linear_logprob_entropy(hidden, weight, make("plain").target)
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_prob.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes_change_no_bit(mode: Callable[[], Any]) -> None:
    expected = tools.run(EVERYTHING)
    with mode():
        outputs = _call(EVERYTHING.hidden, EVERYTHING.weight, EVERYTHING.bias)
    for actual, right in zip(outputs, expected[:2], strict=True):
        assert actual.grad_fn is None
        assert_same_bits(actual, right)


def test_autocast_rounds_the_inputs_as_linear_does() -> None:
    """Values are those of rounded inputs; gradients have each input's dtype and are not rounded to the smaller one."""
    inputs = make("autocast", bias=True)
    rounded = {name: getattr(inputs, name).bfloat16() for name in ("hidden", "weight", "bias")}
    rounded = dataclasses.replace(inputs, **rounded)
    right = tools.through_logits(rounded, torch.float64)
    hidden, weight, bias = tools.leaves_of(inputs)
    for given in (hidden, hidden.detach().bfloat16().requires_grad_()):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = ppo_ops.linear_logprob_entropy(given, weight, inputs.target, bias)
        grads = torch.autograd.grad(outputs, (given, weight, bias), [grad.float() for grad in inputs.upstream()])
        assert [t.dtype for t in (*outputs, *grads)] == [torch.float32] * 2 + [given.dtype] + [torch.float32] * 2
        for actual, expected in zip((*outputs, *grads), right, strict=True):
            # float32 sums of about 100 terms of size 10; only hidden's gradient may be bfloat16.
            rough = actual.dtype == torch.bfloat16
            torch.testing.assert_close(
                actual.detach().double(), expected, rtol=4e-3 if rough else 1e-5, atol=4e-3 if rough else 1e-5
            )


def test_autocast_does_not_reach_the_products_in_backward() -> None:
    leaves = tools.leaves_of(make("autocast float64", dtype=torch.float64))[:2]
    target = make("autocast float64").target
    with torch.autocast("cpu", dtype=torch.bfloat16):
        log_prob, _ = ppo_ops.linear_logprob_entropy(*leaves, target)
        grads = torch.autograd.grad(log_prob.sum(), leaves)
    expected = torch.autograd.grad(ppo_ops.linear_logprob_entropy(*leaves, target)[0].sum(), leaves)
    for actual, right in zip(grads, expected, strict=True):
        assert_exact(actual, right)


def _wrong(**changes: Any) -> Callable[[], Any]:
    arguments = {"hidden": torch.zeros(2, 4), "weight": torch.zeros(6, 4), "target": torch.zeros(2).long(), **changes}
    return lambda: ppo_ops.linear_logprob_entropy(**arguments)


WRONG = {
    "width": (_wrong(weight=torch.zeros(6, 5)), "weight must have the shape [V_local, H] (6, 4), got (6, 5)"),
    "weight_1d": (_wrong(weight=torch.zeros(6)), "weight must have the shape [V_local, H], got (6,)"),
    "weight_dtype": (
        _wrong(weight=torch.zeros(6, 4, dtype=torch.bfloat16)),
        "weight must have the dtype of hidden (torch.float32) outside autocast, got torch.bfloat16",
    ),
    "bias_dtype": (
        _wrong(bias=torch.zeros(6, dtype=torch.float64)),
        "bias must have the dtype of hidden (torch.float32) outside autocast, got torch.float64",
    ),
    "hidden_dtype": (
        _wrong(hidden=torch.zeros(2, 4, dtype=torch.int32)),
        "hidden must be one of float16, bfloat16, float32, float64, got torch.int32",
    ),
    "hidden_0d": (_wrong(hidden=torch.zeros(())), "hidden must have the shape [..., H], got a 0-dim tensor"),
    "bias": (_wrong(bias=torch.zeros(5)), "bias must have the shape [V_local] (6,), got (5,)"),
    "target": (
        _wrong(target=torch.zeros(3).long()),
        "target must have the shape of hidden without the last dimension (2,), got (3,)",
    ),
    "target_dtype": (_wrong(target=torch.zeros(2)), "target must have an integer dtype, got torch.float32"),
    "device": (
        _wrong(weight=torch.zeros(6, 4, device="meta")),
        "weight must be on the device of hidden (cpu), got meta",
    ),
    "keep_ids_alone": (
        _wrong(keep_ids=torch.zeros(2).long()),
        "keep_ids and keep_offsets must be given together, got keep_offsets=None",
    ),
    "keep_offsets": (
        _wrong(keep_ids=torch.zeros(2).long(), keep_offsets=torch.zeros(2).long()),
        "keep_offsets must have the shape [N + 1] (3,), got (2,)",
    ),
    "keep_ids_dtype": (
        _wrong(keep_ids=torch.zeros(2), keep_offsets=torch.zeros(3).long()),
        "keep_ids must be int32 or int64, got torch.float32",
    ),
    "temperature": (
        _wrong(temperature=torch.ones(3)),
        "temperature must have the shape () or that of target (2,), got (3,)",
    ),
    "temperature_0": (_wrong(temperature=0.0), "temperature must be > 0, got 0.0"),
    "temperature_tensor_0": (_wrong(temperature=torch.zeros(2)), "temperature must be > 0, got 0.0 in row 0"),
    "vocab_size": (
        _wrong(vocab_size=7),
        "vocab_size must be at most the 6 rows of weight that the 1 ranks of the group hold together, got 7",
    ),
    "vocab_start": (
        _wrong(vocab_start=1),
        "vocab_start must be 0 without a group, because weight then holds the whole vocabulary; got 1",
    ),
    "group": (
        _wrong(group="nobody"),
        "group_name must be the name of an initialized process group of this rank, or '' when logits hold the whole "
        "vocabulary; got 'nobody'",
    ),
    "target_value": (
        _wrong(target=torch.tensor([0, 6])),
        "target must be in [0, 6) or equal ignore_index (-100), got 6 in row 1",
    ),
    "no_tensor": (_wrong(weight=[1.0]), "weight must be a tensor, got <class 'list'>"),
}
# Those that name a value can only be found when there is one.
VALUES = ("temperature_tensor_0", "target_value")


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises((TypeError, ValueError, IndexError)) as caught:
        call()
    assert str(caught.value) == message


@pytest.mark.parametrize("name", [name for name in WRONG if name not in VALUES])
def test_errors_of_fake_tensors(name: str) -> None:
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), pytest.raises((TypeError, ValueError)) as caught:
        WRONG[name][0]()
    assert str(caught.value) == WRONG[name][1]


def test_keep_mask_is_no_argument() -> None:
    with pytest.raises(TypeError, match="keep_mask"):
        ppo_ops.linear_logprob_entropy(  # type: ignore[call-arg]
            EVERYTHING.hidden, EVERYTHING.weight, EVERYTHING.target, keep_mask=EVERYTHING.keep_mask
        )


def test_nothing_of_the_size_of_the_weight_is_saved() -> None:
    """Only the inputs themselves and some numbers a row."""
    leaves = tools.leaves_of(EVERYTHING)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        _call(*leaves)
    own = [t for t in saved if all(t.data_ptr() != leaf.data_ptr() for leaf in leaves)]
    assert sum(leaf.data_ptr() in {t.data_ptr() for t in saved} for leaf in leaves) == 3
    numbers = [t.shape for t in own if t.is_floating_point()]
    assert sorted(numbers) == [(6, 37), (37,)]  # normalizers, and the temperatures that the caller passed


def test_forward_without_gradients_has_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    original = linear._Products.__init__

    def counted(self: Any, *args: Any, backward: bool) -> None:
        made.append(backward)
        original(self, *args, backward=backward)

    monkeypatch.setattr(linear._Products, "__init__", counted)
    with torch.no_grad():
        _call(*tools.leaves_of(EVERYTHING))
    assert made == [False]
