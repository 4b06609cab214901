"""Parity with megatron-core's own losses on tensor-parallel ranks with its real parallel state."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ppo_ops import reference
from ppo_ops.integrations.megatron import vocab_parallel_cross_entropy, vocab_parallel_logprob_entropy
from tests import oracle
from tests.cases import Case, generator, random_mask
from tests.distributed.harness import Pool
from tests.oracle import Results
from tests.tolerances import assert_budget, assert_same_bits

INSTALLED = importlib.util.find_spec("megatron") is not None
needs_megatron = pytest.mark.skipif(not INSTALLED, reason="megatron-core is not installed (extra 'megatron')")

SEQUENCE, BATCH, VOCABULARY, TP = 7, 3, 128, 2


def test_megatron_is_not_missing_where_it_must_be() -> None:
    """On a continuous integration machine a skipped parity test would go unnoticed."""
    assert INSTALLED or not os.environ.get("CI"), "CI is set, but megatron-core is not installed"


def _case(replica: int, dtype: torch.dtype) -> Case:
    """Megatron's layout, other numbers for each data-parallel replica."""
    name = f"megatron {replica}"
    source = generator(name)
    logits = (4 * torch.randn(SEQUENCE, BATCH, VOCABULARY, generator=source)).to(dtype)
    return Case(name, logits, torch.randint(VOCABULARY, (SEQUENCE, BATCH), generator=source))


def _initialize() -> Any:
    """Megatron's parallel state: two tensor-parallel groups, [0, 1] and [2, 3]."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=TP)
    return parallel_state


class Loss(NamedTuple):
    value: Tensor
    grad_logits: Tensor


class Losses(NamedTuple):
    ours: Loss
    unfused: Loss
    fused: Loss


def _losses(group: ProcessGroup, dtype: torch.dtype) -> Losses:
    state = _initialize()
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.cross_entropy import (
        vocab_parallel_cross_entropy as unfused_vocab_parallel_cross_entropy,
    )

    case = _case(state.get_data_parallel_rank(), dtype)
    (upstream, _) = oracle.upstream(case)
    tp_group = state.get_tensor_model_parallel_group()

    def evaluate(function: Any, *args: Any) -> Loss:
        # A copy for each: Megatron's losses overwrite float32 logits.
        logits = case.logits.chunk(TP, -1)[state.get_tensor_model_parallel_rank()].clone().requires_grad_()
        value = function(logits.clone(), case.target, *args)
        (grad,) = torch.autograd.grad(value, logits, upstream.to(value.dtype))
        return Loss(value.detach(), grad)

    # Megatron hands its fused loss to torch.compile; without, it is the same formula and starts at once.
    with torch.compiler.set_stance("force_eager"):
        fused = evaluate(fused_vocab_parallel_cross_entropy, tp_group)
    return Losses(evaluate(vocab_parallel_cross_entropy), evaluate(unfused_vocab_parallel_cross_entropy), fused)


def _truth(case: Case) -> tuple[Loss, Loss]:
    """Loss and gradient in float64, and their scales."""
    logits = case.logits.double().requires_grad_()
    value = -reference.logprob_entropy(logits, case.target)[0]
    (upstream, _) = oracle.upstream(case)
    (grad,) = torch.autograd.grad(value, logits, upstream)
    scales = oracle.scales(case)
    return Loss(value.detach(), grad), Loss(scales.log_prob, scales.grad_logits)


@needs_megatron
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_is_that_of_megatron(ranks: Pool, dtype: torch.dtype) -> None:
    replies: list[Losses] = ranks.run(_losses, dtype, size=4)
    for replica in range(2):
        first, second = replies[TP * replica : TP * (replica + 1)]
        assert_same_bits(first.ours.value, second.ours.value)
        ours, unfused, fused = (
            Loss(one.value, torch.cat([one.grad_logits, two.grad_logits], -1))
            for one, two in zip(first, second, strict=True)
        )
        truth, scale = _truth(_case(replica, dtype))
        # No more than twice as wrong as Megatron: both are near the truth, thus near each other.
        for near in (unfused, fused):
            assert_budget(ours.value, near.value, truth.value, scale.value)
        assert_budget(ours.grad_logits, unfused.grad_logits, truth.grad_logits, scale.grad_logits)
        # The fused loss rounds its gradient to bfloat16, to half a unit in 8 bits; ours, for bfloat16 logits, once too,
        # and two roundings of nearly equal numbers may fall to either side. 1e-6: float32 rounding at a scale of 4.
        assert ours.grad_logits.dtype == fused.grad_logits.dtype == dtype
        rtol = 2.0**-8 if dtype == torch.float32 else 2.0**-7
        torch.testing.assert_close(ours.grad_logits, fused.grad_logits, rtol=rtol, atol=1e-6)


def _mask(case: Case) -> Tensor:
    return random_mask(case.name, SEQUENCE * BATCH, VOCABULARY).view(case.logits.shape)


def _logprob_entropy(group: ProcessGroup, compiled: bool) -> Results:
    state = _initialize()
    case, rank = _case(state.get_data_parallel_rank(), torch.float32), state.get_tensor_model_parallel_rank()
    mask = _mask(case).chunk(TP, -1)[rank]

    def function(logits: Tensor, target: Tensor, keep_mask: None, **options: Any) -> tuple[Tensor, Tensor]:
        return vocab_parallel_logprob_entropy(logits, target, keep_mask=mask, **options)

    if compiled:
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    return oracle.run(function, case, case.logits.chunk(TP, -1)[rank])


@needs_megatron
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_logprob_entropy_takes_the_group_of_parallel_state(ranks: Pool, compiled: bool) -> None:
    replies: list[Results] = ranks.run(_logprob_entropy, compiled, size=4)
    for replica in range(2):
        first, second = replies[TP * replica : TP * (replica + 1)]
        assert_same_bits(first.log_prob, second.log_prob)
        assert_same_bits(first.entropy, second.entropy)
        plain = _case(replica, torch.float32)
        case = Case(plain.name, plain.logits, plain.target, _mask(plain))
        ours = (first.log_prob, first.entropy, torch.cat([first.grad_logits, second.grad_logits], -1))
        for arguments in zip(ours, oracle.plain(case), oracle.truth(case), oracle.scales(case), strict=True):
            assert_budget(*arguments)


def _logits_and_target() -> tuple[Tensor, Tensor]:
    return torch.zeros(SEQUENCE, BATCH, 4), torch.zeros(SEQUENCE, BATCH, dtype=torch.int64)


def test_label_smoothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"label_smoothing must be 0, got 0\.1"):
        vocab_parallel_cross_entropy(*_logits_and_target(), 0.1, "")


def test_ignored_positions_have_no_loss() -> None:
    logits, target = _logits_and_target()
    target[0, 0] = -100
    loss = vocab_parallel_cross_entropy(logits, target, tp_group="")
    assert loss.shape == (SEQUENCE, BATCH)
    assert loss[0, 0] == 0
    # ln 4 in float32.
    torch.testing.assert_close(loss[1:], torch.full((SEQUENCE - 1, BATCH), 4.0).log())


@pytest.mark.parametrize("function", [vocab_parallel_cross_entropy, vocab_parallel_logprob_entropy])
def test_a_group_must_be_given_without_megatron(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="tp_group must be given where megatron-core is not installed"):
        function(*_logits_and_target())


@needs_megatron
def test_no_group_before_megatron_is_initialized() -> None:
    with pytest.raises(AssertionError, match="tensor model parallel group is not initialized"):
        vocab_parallel_cross_entropy(*_logits_and_target())


def test_adapters_import_no_framework() -> None:
    text = (
        "import sys; import ppo_ops.integrations.slime, ppo_ops.integrations.megatron; "
        "print([name for name in ('megatron', 'slime') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
