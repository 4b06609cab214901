"""Parity with megatron-core's own losses on tensor-parallel ranks with its real parallel state."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ppo_ops import reference
from ppo_ops.integrations import patch
from ppo_ops.integrations.megatron import (
    compute_language_model_loss,
    fused_vocab_parallel_cross_entropy,
    policy_loss_func,
    vocab_parallel_cross_entropy,
    vocab_parallel_logprob_entropy,
)
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


# What a training loop takes.


def _both_losses(group: ProcessGroup) -> tuple[Loss, Loss]:
    """`compute_language_model_loss` as a function, and the method of Megatron's models, patched and called unbound."""
    state = _initialize()
    from megatron.core.models.common.language_module.language_module import LanguageModule

    case, tp_group = _case(0, torch.float32), state.get_tensor_model_parallel_group()
    labels, shard = case.target.T, case.logits.chunk(TP, -1)[state.get_tensor_model_parallel_rank()]
    config = types.SimpleNamespace(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="native")
    model = types.SimpleNamespace(config=config, pg_collection=types.SimpleNamespace(tp=tp_group))
    found = []
    for patched in (False, True):
        leaf = shard.clone().requires_grad_()
        if patched:
            with patch("megatron"):
                loss = LanguageModule.compute_language_model_loss(model, labels, leaf.clone())
        else:
            loss = compute_language_model_loss(labels, leaf.clone())
        loss.square().sum().backward()
        assert leaf.grad is not None
        found.append(Loss(loss.detach(), leaf.grad))
    return found[0], found[1]


@needs_megatron
def test_language_model_loss(ranks: Pool) -> None:
    """The function, and Megatron's method with its losses replaced: the same bits, and the definition."""
    for mine, method in ranks.run(_both_losses, size=4):
        assert_same_bits(mine.value, method.value)
        assert_same_bits(mine.grad_logits, method.grad_logits)
        assert mine.value.is_contiguous()
        right = -reference.logprob_entropy(_case(0, torch.float32).logits, _case(0, torch.float32).target)[0].T
        # float32 roundings of numbers up to 40.
        torch.testing.assert_close(mine.value.double(), right, rtol=1e-6, atol=1e-5)


class Step(NamedTuple):
    loss: Tensor
    grad_logits: Tensor
    reports: list[dict[str, Tensor]]
    kept: dict[str, Tensor]


def _policy_inputs() -> dict[str, Tensor]:
    source = generator("megatron policy")
    shape = (BATCH, SEQUENCE)
    mask = torch.randint(2, shape, generator=source)
    target = torch.randint(VOCABULARY, shape, generator=source).masked_fill(mask == 0, -1)
    old, advantage = -5 * torch.rand(shape, generator=source), torch.randn(shape, generator=source)
    return {"target": target, "old_log_prob": old, "advantage": advantage, "loss_mask": mask}


def _policy_step(group: ProcessGroup) -> Step:
    """The step of Megatron's schedules that calls a loss function; the whole schedule allocates on CUDA."""
    state = _initialize()
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss

    shard = _case(0, torch.float32).logits.transpose(0, 1).chunk(TP, -1)[state.get_tensor_model_parallel_rank()]
    leaf = shard.clone().requires_grad_()
    loss_func = policy_loss_func(**_policy_inputs(), clip_high=0.28, entropy_coefficient=0.01)
    config = types.SimpleNamespace(calculate_per_token_loss=False, timers=None, num_moe_experts=None)
    config.mtp_num_layers = None
    reports: list[dict[str, Tensor]] = []
    where = {"vp_stage": None, "num_microbatches": 2, "cp_group_size": 1, "is_last_stage": True, "config": config}
    arguments = {"model": None, "loss_func": loss_func, **where}
    loss, _ = forward_step_calc_loss(
        output_tensor=leaf.clone(), collect_non_loss_data=False, forward_data_store=reports, **arguments
    )
    loss.backward()
    kept: list[dict[str, Tensor]] = []
    forward_step_calc_loss(output_tensor=leaf, collect_non_loss_data=True, forward_data_store=kept, **arguments)
    assert leaf.grad is not None
    return Step(loss.detach(), leaf.grad, reports, kept[0])


@needs_megatron
def test_policy_loss_in_a_schedule(ranks: Pool) -> None:
    """Loss, gradient and reports against the formula in float64."""
    first, second = ranks.run(_policy_step, size=4)[:TP]
    inputs = _policy_inputs()
    mask = inputs["loss_mask"] == 1
    logits = _case(0, torch.float32).logits.transpose(0, 1).double().requires_grad_()
    log_prob, entropy = reference.logprob_entropy(logits, inputs["target"].masked_fill(~mask, -100))
    ratio, advantage = (log_prob - inputs["old_log_prob"]).exp(), inputs["advantage"].double()
    policy = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
    # Megatron divides the sum by the tokens and by the number of micro-batches.
    loss = ((policy - 0.01 * entropy) * mask).sum() / mask.sum() / 2
    loss.backward()
    assert logits.grad is not None
    # float32 roundings of log-probs up to 40, in an exponential.
    near: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
    for step in (first, second):
        torch.testing.assert_close(step.loss.double(), loss.detach(), **near)
        torch.testing.assert_close(step.kept["log_prob"].double(), log_prob.detach(), **near)
        torch.testing.assert_close(step.kept["entropy"].double(), entropy.detach(), **near)
        assert not step.kept["log_prob"].requires_grad
        (report,) = step.reports
        clipped = ((ratio < 0.8) | (ratio > 1.28)) & mask
        for name, value in (("policy loss", policy * mask), ("entropy", entropy), ("clipped", clipped)):
            torch.testing.assert_close(report[name].double(), torch.stack([value.sum(), mask.sum()]).double(), **near)
    torch.testing.assert_close(torch.cat([first.grad_logits, second.grad_logits], -1).double(), logits.grad, **near)


def test_positions_outside_the_loss_mask_are_not_read() -> None:
    inputs = _policy_inputs()
    logits = torch.zeros(BATCH, SEQUENCE, VOCABULARY)
    logits[inputs["loss_mask"] == 0] = torch.nan
    leaf = logits.requires_grad_()
    loss, tokens, report = policy_loss_func(**inputs, entropy_coefficient=0.01, tp_group="")(leaf)
    loss.backward()
    assert leaf.grad is not None
    assert loss.isfinite()
    assert all(value.isfinite().all() for value in report.values())
    assert tokens == inputs["loss_mask"].sum()
    assert (leaf.grad[inputs["loss_mask"] == 0] == 0).all()


def test_fused_cross_entropy_has_its_own_signature() -> None:
    logits, target = _logits_and_target()
    assert_same_bits(
        fused_vocab_parallel_cross_entropy(logits, target, ""), vocab_parallel_cross_entropy(logits, target, 0.0, "")
    )


@pytest.mark.parametrize(("dtype", "overwritten"), [(torch.float32, True), (torch.bfloat16, False)])
def test_float32_logits_are_overwritten_as_by_megatron(dtype: torch.dtype, overwritten: bool) -> None:
    """In backward; Megatron does it in forward, and leaves logits of other dtypes alone."""
    case = _case(0, dtype)
    leaf = case.logits.clone().requires_grad_()
    logits = leaf.clone()
    loss = vocab_parallel_cross_entropy(logits, case.target, tp_group="")
    assert torch.equal(logits.detach(), case.logits)
    loss.sum().backward()
    assert leaf.grad is not None
    assert torch.equal(logits.detach(), leaf.grad if overwritten else case.logits)
