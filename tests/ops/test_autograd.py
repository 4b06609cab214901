"""What autograd may do with the operators: twice, half, later, in other modes, with hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ppo_ops
from ppo_ops.kernels import cpu
from tests import cases, oracle
from tests.tolerances import assert_exact, assert_same_bits

CASE = cases.by_name("everything")


def _leaf() -> Tensor:
    return CASE.logits.detach().clone().requires_grad_()


def _call(logits: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    return ppo_ops.logprob_entropy(logits, CASE.target, CASE.keep_mask, **CASE.options(), **more)


def _gradient(a: Tensor, b: Tensor) -> Tensor:
    """Of a fresh forward, with contiguous upstream gradients."""
    logits = _leaf()
    return torch.autograd.grad(_call(logits), logits, (a, b))[0]


def _upstream(seed: int) -> tuple[Tensor, Tensor]:
    a, b = torch.randn(2, 5, generator=torch.Generator().manual_seed(seed)).unbind(0)
    return a.clone(), b.clone()


class _Counted:
    """The chosen kernels, counting calls."""

    def __init__(self) -> None:
        self.forward = self.backward = 0
        self.kernels = cpu._kernels(torch.float32)

    def vocab_stats(self, *args: Any, **kwargs: Any) -> None:
        self.forward += 1
        self.kernels.vocab_stats(*args, **kwargs)

    def logits_grad(self, *args: Any, **kwargs: Any) -> None:
        self.backward += 1
        self.kernels.logits_grad(*args, **kwargs)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> _Counted:
    counter = _Counted()
    monkeypatch.setattr(cpu, "_kernels", lambda dtype: counter)
    return counter


def test_two_upstream_gradients_of_one_graph() -> None:
    logits = _leaf()
    outputs = _call(logits)
    for seed in (1, 2, 1):
        upstream = _upstream(seed)
        (grad,) = torch.autograd.grad(outputs, logits, upstream, retain_graph=True)
        assert_same_bits(grad, _gradient(*upstream))


def test_gradients_accumulate() -> None:
    logits = _leaf()
    log_prob, entropy = _call(logits)
    log_prob.sum().backward(retain_graph=True)
    first = logits.grad.clone()
    log_prob.sum().backward()
    assert_exact(logits.grad, 2 * first)
    assert not entropy.isnan().any()


def test_second_backward_without_retain_raises() -> None:
    log_prob, _ = _call(_leaf())
    log_prob.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        log_prob.sum().backward()


def test_double_backward_raises() -> None:
    """Without a formula of its own, autograd would go on with a wrong second derivative."""
    for use in (lambda o: o[0].sum(), lambda o: o[1].sum(), lambda o: (o[0] * o[1]).sum()):
        logits = _leaf()
        (grad,) = torch.autograd.grad(use(_call(logits)), logits, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated twice: double backward is not implemented"):
            grad.sum().backward()


def test_create_graph_alone_changes_nothing() -> None:
    logits, upstream = _leaf(), _upstream(1)
    (grad,) = torch.autograd.grad(_call(logits), logits, upstream, create_graph=True)
    assert_same_bits(grad.detach(), _gradient(*upstream))


def test_missing_gradient_of_either_output() -> None:
    """Equal to an upstream gradient of zeros, and computed without it."""
    a, b = _upstream(1)
    for index, expected in ((0, _gradient(a, torch.zeros(5))), (1, _gradient(torch.zeros(5), b))):
        logits = _leaf()
        output = _call(logits)[index]
        (grad,) = torch.autograd.grad(output, logits, (a, b)[index])
        assert_exact(grad, expected)
        logits = _leaf()
        log_prob, entropy = _call(logits)
        parts = (log_prob, entropy.detach()) if index == 0 else (log_prob.detach(), entropy)
        (grad,) = torch.autograd.grad(parts[0] @ a + parts[1] @ b, logits)
        assert_exact(grad, expected)


def test_unused_outputs_cost_no_kernel(counted: _Counted) -> None:
    logits = _leaf()
    log_prob, _ = _call(logits)
    (log_prob.detach().sum() + logits.sum()).backward()
    assert (counted.forward, counted.backward) == (1, 0)


def test_upstream_gradients_as_autograd_makes_them() -> None:
    a, _ = _upstream(1)
    ones = torch.ones(5)

    def through(use: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> None:
        logits = _leaf()
        (grad,) = torch.autograd.grad(use(*_call(logits)), logits)
        assert_same_bits(grad, _gradient(a.contiguous(), b.contiguous()))

    weights = torch.randn(10, generator=torch.Generator().manual_seed(3))
    through(lambda log_prob, entropy: log_prob.sum() + entropy.sum(), ones, ones)
    through(lambda log_prob, entropy: torch.cat((log_prob, entropy)) @ weights, weights[:5], weights[5:])
    through(
        lambda log_prob, entropy: torch.stack((log_prob, entropy), 1).flatten() @ weights, weights[::2], weights[1::2]
    )
    through(lambda log_prob, entropy: (log_prob.flip(0) * a).sum() + entropy.sum(), a.flip(0), ones)


def test_transposed_upstream_gradient() -> None:
    case = cases.by_name("three_dimensions")
    upstream = torch.randn(3, 2, generator=cases.generator("transposed"))
    grads = []
    for gradient in (upstream.t(), upstream.t().contiguous()):
        logits = case.logits.clone().requires_grad_()
        outputs = ppo_ops.logprob_entropy(logits, case.target)
        grads += torch.autograd.grad(outputs, logits, (gradient, gradient))
    assert_same_bits(grads[0], grads[1])


def test_upstream_gradient_of_batches_that_share_one_number() -> None:
    """`expand` in both leading dimensions, as `.mean()` gives it."""
    case = cases.by_name("sequence_first")
    logits = case.logits.detach().requires_grad_()
    (actual,) = torch.autograd.grad(ppo_ops.logprob(logits, case.target).mean(), logits)
    twelfth = torch.full(case.target.shape, 1 / 12)
    (expected,) = torch.autograd.grad(ppo_ops.logprob(logits, case.target), logits, twelfth)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(counted: _Counted, use_reentrant: bool) -> None:
    logits, upstream = _leaf(), _upstream(1)
    outputs = checkpoint(lambda x: _call(1.0 * x), logits, use_reentrant=use_reentrant)
    assert counted.forward == 1
    torch.autograd.backward(outputs, upstream)
    assert (counted.forward, counted.backward) == (2, 1)
    assert_same_bits(logits.grad, _gradient(*upstream))


def test_selective_checkpoint(counted: _Counted) -> None:
    """What the policy saves, the core operator, is not computed again; what it does not save, the product, is."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        core = torch.ops.ppo._logprob_entropy.default
        return CheckpointPolicy.MUST_SAVE if op == core else CheckpointPolicy.PREFER_RECOMPUTE

    logits, upstream = _leaf(), _upstream(1)
    outputs = checkpoint(
        lambda x: _call(1.0 * x),
        logits,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    torch.autograd.backward(outputs, upstream)
    assert (counted.forward, counted.backward) == (1, 1)
    assert_same_bits(logits.grad, _gradient(*upstream))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_downcasts_nothing(dtype: torch.dtype) -> None:
    expected, upstream = _call(CASE.logits), _upstream(1)
    logits = _leaf()
    with torch.autocast("cpu", dtype):
        outputs = _call(logits)
        inside = _call(logits.detach() @ torch.eye(137))  # a product that autocast does downcast
    assert inside[0].dtype == torch.float32
    for actual, right in zip(outputs, expected, strict=True):
        assert_same_bits(actual.detach(), right)
    assert_same_bits(torch.autograd.grad(outputs, logits, upstream)[0], _gradient(*upstream))


def test_saved_tensor_hooks() -> None:
    """Saved are the logits themselves, the rows' arguments and a few numbers a row; unpacking to copies is fine."""
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> tuple[int, Tensor]:
        packed.append(tensor)
        return len(packed), tensor.clone()

    logits, upstream = _leaf(), _upstream(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda pair: pair[1]):
        outputs = _call(logits)
    assert_same_bits(torch.autograd.grad(outputs, logits, upstream)[0], _gradient(*upstream))
    given = {t.data_ptr(): t.numel() for t in (logits, CASE.target, CASE.keep_mask, CASE.temperature)}
    made = [t.numel() for t in packed if t.data_ptr() not in given]
    assert {t.data_ptr() for t in packed} >= set(given)
    assert sum(made) <= 6 * 5


def test_save_on_cpu() -> None:
    logits, upstream = _leaf(), _upstream(1)
    with torch.autograd.graph.save_on_cpu():
        outputs = _call(logits)
    assert_same_bits(torch.autograd.grad(outputs, logits, upstream)[0], _gradient(*upstream))


@contextlib.contextmanager
def _grad_mode_without_tracking() -> Iterator[None]:
    with torch.enable_grad():
        yield


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, _grad_mode_without_tracking])
def test_modes_change_no_bit(mode: Callable[[], Any]) -> None:
    expected = _call(_leaf())
    with mode():
        outputs = _call(CASE.logits)
        log_prob = ppo_ops.logprob(CASE.logits, CASE.target, CASE.keep_mask, **CASE.options())
    for actual, right in zip(outputs, expected, strict=True):
        assert_same_bits(actual, right.detach())
        assert not actual.requires_grad
        assert actual.is_inference() == (mode is torch.inference_mode)
    assert not log_prob.requires_grad


def test_nothing_is_saved_without_a_gradient() -> None:
    for logits in (CASE.logits, _leaf()):
        with contextlib.nullcontext() if not logits.requires_grad else torch.no_grad():
            assert all(output.grad_fn is None for output in _call(logits))


def test_change_of_the_logits_after_forward_raises() -> None:
    logits = 1.0 * _leaf()
    log_prob, _ = _call(logits)
    logits.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_prob.sum().backward()


@pytest.mark.parametrize("name", ["3x129", "everything", "1x1", "three_dimensions"])
def test_outputs_may_be_overwritten(name: str) -> None:
    """Backward keeps its own copy of what it needs from them."""
    case = cases.by_name(name)
    expected = oracle.run(ppo_ops.logprob_entropy, case)
    logits = case.logits.clone().requires_grad_()
    log_prob, entropy = ppo_ops.logprob_entropy(logits, case.target, case.keep_mask, **case.options())
    grads = [g.float() for g in oracle.upstream(case)]
    with torch.no_grad():
        log_prob.fill_(torch.nan)
        entropy.fill_(torch.nan)
    assert_same_bits(torch.autograd.grad((log_prob, entropy), logits, grads)[0], expected.grad_logits)

    log_prob, entropy = ppo_ops.logprob_entropy(logits, case.target, case.keep_mask, **case.options())
    doubled, halved = log_prob.mul_(2.0), entropy.mul_(0.5)
    (grad,) = torch.autograd.grad((doubled, halved), logits, (grads[0] / 2, grads[1] * 2))
    assert_same_bits(grad, expected.grad_logits)


def test_functorch_is_refused_and_never_wrong() -> None:
    """`torch.library` makes an autograd function that functorch does not take (torch 2.13); no silent zeros."""

    def loss(logits: Tensor) -> Tensor:
        return _call(logits)[0].sum()

    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(loss)(CASE.logits)


def test_an_empty_batch_keeps_its_grad_fn() -> None:
    for name in ("0x7", "0x1", "no_rows_in_the_middle", "float64_empty", "bfloat16_empty"):
        case = cases.by_name(name)
        logits = case.logits.detach().requires_grad_()
        outputs = ppo_ops.logprob_entropy(logits, case.target)
        assert all(output.grad_fn is not None for output in outputs)
        (grad,) = torch.autograd.grad(outputs[0].sum() + outputs[1].sum(), logits)
        assert_exact(grad, torch.zeros_like(case.logits))


def test_through_a_module_and_a_hook() -> None:
    """The gradient that reaches an earlier layer is the one of the logits."""
    seen: list[Tensor] = []
    weight = torch.randn(137, 8, generator=cases.generator("weight"), requires_grad=True)
    hidden = torch.randn(5, 8, generator=cases.generator("hidden"))
    logits = hidden @ weight.t()
    logits.register_hook(seen.append)
    outputs = _call(logits)
    torch.autograd.backward(outputs, _upstream(1))
    leaf = logits.detach().requires_grad_()
    (expected,) = torch.autograd.grad(_call(leaf), leaf, _upstream(1))
    assert_same_bits(seen[0], expected)
    assert_exact(weight.grad, expected.t() @ hidden)


def test_in_place_backward() -> None:
    """The same bits, in the logits' memory; a second backward raises instead of reading gradients as logits."""
    leaf, upstream = _leaf(), _upstream(1)
    logits = 1.0 * leaf
    kept: list[int] = []
    logits.register_hook(lambda grad: kept.append(grad.data_ptr()))
    outputs = _call(logits, inplace_backward=True)
    memory = logits.data_ptr()
    torch.autograd.backward(outputs, upstream, retain_graph=True)
    assert_same_bits(leaf.grad, _gradient(*upstream))
    assert kept == [memory]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(outputs, upstream)
