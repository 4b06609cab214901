"""The fused output layer against `reference` on the logits that it never makes: values, gradients, options, chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import ppo_ops
from ppo_ops import linear as api
from ppo_ops.kernels import linear, linear_rows
from tests import linear_tools as tools
from tests.linear_tools import Inputs, make
from tests.tolerances import assert_exact

PLAIN = make("plain")
CASES = [
    PLAIN,
    make("bias", bias=True),
    make("kept sets", kept=True),
    make("one row", rows=1, vocab=1),
    make("one token", rows=9, vocab=1),
    make("three tokens", vocab=3),
    make("1023 tokens", vocab=1023, bias=True),
    make("temperature", temperature=0.7),
    make("padding", vocab_size=101, bias=True),
    make("everything in float64", dtype=torch.float64, bias=True, kept=True, vocab_size=120),
    make("float64", dtype=torch.float64),
    make("bfloat16", dtype=torch.bfloat16, bias=True),
    make("float16", dtype=torch.float16, kept=True),
    tools.everything(),
    tools.everything(torch.bfloat16, "everything in bfloat16"),
]


@pytest.fixture
def small_workspace() -> Iterator[None]:
    """Room for a few rows of the cases, so that they take several chunks."""
    api.set_workspace_bytes(5 * 129 * 4)
    yield
    api.set_workspace_bytes()


@pytest.mark.parametrize("inputs", CASES, ids=str)
def test_one_chunk(kernels: str, inputs: Inputs) -> None:
    tools.check(inputs)


@pytest.mark.parametrize("inputs", CASES, ids=str)
def test_many_chunks(kernels: str, small_workspace: None, inputs: Inputs) -> None:
    tools.check(inputs)


@pytest.mark.parametrize("inputs", CASES, ids=str)
def test_where_the_host_must_not_read(
    poisoned_memory: None, small_workspace: None, monkeypatch: pytest.MonkeyPatch, inputs: Inputs
) -> None:
    """The control flow of CUDA, on the CPU: ignored rows are computed, kept sets are framed."""
    monkeypatch.setattr(linear_rows, "host_may_read", lambda tensor: False)
    tools.check(inputs)


class _LogProbOnly(Inputs):
    """The same inputs; the entropy has no upstream gradient."""

    def upstream(self) -> tuple[Tensor, Tensor]:
        a, b = super().upstream()
        return a, torch.zeros_like(b)


@pytest.mark.parametrize("inputs", [PLAIN, tools.everything()], ids=str)
def test_log_prob_alone(kernels: str, small_workspace: None, inputs: Inputs) -> None:
    hidden, weight, bias = leaves = tools.leaves_of(inputs)
    log_prob = ppo_ops.linear_logprob(hidden, weight, inputs.target, bias, **inputs.options())
    wanted = [leaf for leaf in leaves if leaf is not None]
    grads = [*torch.autograd.grad(log_prob, wanted, inputs.upstream()[0].float()), None]
    alone = _LogProbOnly(**{field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)})
    entropy = tools.run(inputs).entropy
    tools.check(alone, tools.Results(log_prob.detach(), entropy, *grads[:3]))


def test_bfloat16_logits_of_size_20() -> None:
    """Within 2e-3 (in truth 1e-5) of the float64 result of the same bfloat16 inputs, in 1 chunk and in 1000."""
    inputs = make("size 20", rows=1000, vocab=1000, width=64, dtype=torch.bfloat16, size=8.0)
    right = tools.through_logits(inputs, torch.float64)
    assert 19 < float((inputs.hidden.double() @ inputs.weight.double().t()).abs().amax(1).median()) < 40
    errors = {}
    for chunks, room in ((1, api._chunked.DEFAULT_WORKSPACE_BYTES), (1000, 1)):
        api.set_workspace_bytes(room)
        try:
            ours = tools.run(inputs)
        finally:
            api.set_workspace_bytes()
        log_prob = float((ours.log_prob - right.log_prob).abs().max())
        weight = (ours.grad_weight.double() - right.grad_weight).norm() / right.grad_weight.norm()
        errors[chunks] = (log_prob, float(weight))
    assert max(errors[1][0], errors[1000][0]) < 2e-5, errors
    # One rounding to bfloat16 at the end, uniform in half a unit of 2^-8: 2^-9 / sqrt(3) = 1.1e-3 of the norm.
    assert errors[1000][1] == pytest.approx(errors[1][1], rel=0.01)
    assert errors[1][1] < 2e-3


def test_log_prob_is_never_positive() -> None:
    """The target's logit and lse are taken from the same numbers."""
    weight = torch.randn(500, 512, generator=torch.Generator().manual_seed(0))
    target = torch.arange(500)
    for dtype in (torch.float32, torch.bfloat16):
        log_prob, _ = ppo_ops.linear_logprob_entropy(weight.to(dtype) / 10, weight.to(dtype), target)
        assert (log_prob <= 0).all()
        assert (log_prob > -1e-6).any()


def test_equal_logits_of_minus_20(kernels: str) -> None:
    """Columns past the end would count as 0 and take all of the probability."""
    for vocab in (1, 3, 129, 1023):
        hidden, weight = torch.full((2, 4), -5.0), torch.ones(vocab, 4)
        log_prob, entropy = ppo_ops.linear_logprob_entropy(hidden, weight, torch.zeros(2, dtype=torch.int64))
        expected = torch.tensor(float(vocab)).log()
        # One rounding of the logarithm and one of the sum of ones.
        torch.testing.assert_close(log_prob, -expected.expand(2), rtol=2e-7, atol=0)
        torch.testing.assert_close(entropy, expected.expand(2), rtol=2e-7, atol=0)


def test_padding_rows_of_weight_are_never_read() -> None:
    inputs = make("padding", vocab_size=101, bias=True)
    weight = inputs.weight.clone()
    weight[101:] = torch.nan
    ours = tools.run(dataclasses.replace(inputs, weight=weight))
    for actual, expected in zip(ours, tools.run(inputs), strict=True):
        assert_exact(actual, expected)
    assert not ours.grad_weight[101:].any()


@pytest.mark.parametrize("host_reads", [True, False])
def test_rows_that_do_not_count_are_never_read(host_reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignored rows may hold NaN, and rows without an upstream gradient may give NaN: no gradient knows."""
    monkeypatch.setattr(linear_rows, "host_may_read", lambda tensor: host_reads)
    inputs = make("plain")
    expected = tools.run(inputs)
    hidden = inputs.hidden.clone()
    hidden[4::5] = torch.nan
    hidden[3] = torch.inf  # its upstream gradients are 0
    ours = tools.run(dataclasses.replace(inputs, hidden=hidden))
    assert ours.log_prob[3].isnan()
    others = torch.arange(37) != 3
    assert_exact(ours.log_prob[others], expected.log_prob[others])
    for actual, right in zip(ours[2:4], expected[2:4], strict=True):
        assert_exact(actual, right)
    assert not ours.grad_hidden[3].any()


def test_nan_stays_in_its_row() -> None:
    inputs = make("plain")
    hidden = inputs.hidden.clone()
    hidden[5, 2] = torch.nan
    log_prob, entropy = ppo_ops.linear_logprob_entropy(hidden, inputs.weight, inputs.target)
    expected = ppo_ops.linear_logprob_entropy(inputs.hidden, inputs.weight, inputs.target)
    for actual, right in zip((log_prob, entropy), expected, strict=True):
        assert actual[5].isnan()
        assert_exact(actual[torch.arange(37) != 5], right[torch.arange(37) != 5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_shape_and_strides(dtype: torch.dtype) -> None:
    """Three dimensions, transposed and sliced inputs: the same as their copies."""
    inputs = make("strides", rows=36, dtype=dtype)
    expected = tools.run(inputs)
    hidden, weight, _ = tools.leaves_of(inputs)
    sequence = hidden.view(9, 4, 24).transpose(0, 1)
    target = inputs.target.view(9, 4).t()
    wide = torch.cat([weight.t(), weight.t()], 1)[:, :129].t()  # column-major, with a gap between columns
    upstream = [grad.view(9, 4).t().float() for grad in inputs.upstream()]
    outputs = ppo_ops.linear_logprob_entropy(sequence, wide, target)
    grads = torch.autograd.grad(outputs, (hidden, weight), upstream)
    ours = [*(output.detach().t().reshape(-1) for output in outputs), *grads]
    for actual, right in zip(ours, expected[:4], strict=True):
        # Another order of the same sums.
        torch.testing.assert_close(actual, right, rtol=1e-5 if dtype == torch.float32 else 8e-3, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 3])
def test_without_rows_or_with_all_rows_ignored(rows: int) -> None:
    hidden, weight, bias = torch.randn(rows, 4), torch.randn(5, 4), torch.randn(5)
    leaves = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
    target = torch.full((rows,), -100)
    log_prob, entropy = ppo_ops.linear_logprob_entropy(hidden, weight, target, bias)
    assert log_prob.grad_fn is not None
    assert_exact(log_prob.detach(), torch.zeros(rows))
    assert_exact(entropy.detach(), torch.zeros(rows))
    (log_prob.sum() + entropy.sum()).backward()
    for leaf in leaves:
        assert_exact(leaf.grad, torch.zeros_like(leaf))


def test_hidden_states_without_elements(kernels: str) -> None:
    bias = torch.tensor([0.0, 2.0, -1.0], requires_grad=True)
    hidden, weight = torch.zeros(2, 0, requires_grad=True), torch.zeros(3, 0, requires_grad=True)
    target = torch.tensor([1, 0])
    outputs = ppo_ops.linear_logprob_entropy(hidden, weight, target, bias)
    ours = [*outputs, *torch.autograd.grad([output.sum() for output in outputs], (hidden, weight, bias))]
    outputs = ppo_ops.logprob_entropy(bias.expand(2, 3), target)
    (grad_bias,) = torch.autograd.grad([output.sum() for output in outputs], bias)
    for actual, right in zip(ours, (*outputs, torch.zeros(2, 0), torch.zeros(3, 0), grad_bias), strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-6, atol=1e-6)  # sums over rows in another order


def test_meta_tensors() -> None:
    hidden, weight = torch.zeros(2, 3, 4, device="meta"), torch.zeros(5, 4, device="meta")
    target = torch.zeros(2, 3, device="meta", dtype=torch.int64)
    for output in ppo_ops.linear_logprob_entropy(hidden, weight, target):
        assert (output.shape, output.dtype, output.device.type) == ((2, 3), torch.float32, "meta")
    with pytest.raises(TypeError, match="weight must have the dtype of hidden"):
        ppo_ops.linear_logprob_entropy(hidden, weight.half(), target)


def _products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the results of all GEMMs from now on."""
    shapes: list[tuple[int, ...]] = []
    original = linear._mm

    def counted(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
        shapes.append(tuple(out.shape))
        original(a, b, out, add)

    monkeypatch.setattr(linear, "_mm", counted)
    return shapes


def test_only_what_is_wanted_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make("wanted", rows=10, bias=True)
    active = 7  # of 10 rows two are ignored and one has no upstream gradient
    logits, hidden, weight = (active, 129), (active, 24), (129, 24)
    shapes = _products(monkeypatch)
    for wanted, expected in (
        ("hidden", [logits, hidden]),
        ("weight", [logits, weight]),
        ("bias", [logits]),
        ("hidden weight bias", [logits, weight, hidden]),
    ):
        leaves = [
            None if tensor is None else tensor.detach().requires_grad_(name in wanted.split())
            for name, tensor in (("hidden", inputs.hidden), ("weight", inputs.weight), ("bias", inputs.bias))
        ]
        outputs = ppo_ops.linear_logprob_entropy(leaves[0], leaves[1], inputs.target, leaves[2])
        shapes.clear()
        chosen = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        torch.autograd.grad(outputs, chosen, [grad.float() for grad in inputs.upstream()])
        assert shapes == expected, wanted


def test_ignored_rows_stay_out_of_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make("plain")
    shapes = _products(monkeypatch)
    ppo_ops.linear_logprob_entropy(inputs.hidden, inputs.weight, inputs.target)
    assert shapes == [(30, 129)]


def test_workspace_bounds_the_chunks(small_workspace: None, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make("plain", rows=50)
    shapes = _products(monkeypatch)
    tools.run(inputs)
    assert len(shapes) > 8 * 3
    assert max(shape[0] for shape in shapes if shape[1] == 129) <= 5
    with pytest.raises(ValueError, match="number must be at least 1 byte, got 0"):
        api.set_workspace_bytes(0)
