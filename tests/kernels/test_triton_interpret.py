"""The Triton kernels in Triton's interpreter, on CPU tensors: the CPU suite's cases, and each stage by itself."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

import ppo_ops
from ppo_ops.kernels import cpu
from tests import cases, oracle
from tests.kernels.conftest import SPLIT
from tests.kernels.triton_stage import (
    DTYPES,
    KINDS,
    ORACLE,
    check_grad,
    check_stats,
    make,
)
from tests.kernels.triton_tools import INTERPRETER
from tests.tolerances import assert_exact

pytest.importorskip("triton")
pytestmark = INTERPRETER
COLUMNS = (1, 2, 3, 7, 127, 129, 1000, 1025, 2501)


@pytest.fixture
def through_triton(interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_kernels", lambda dtype: interpreted)


@pytest.mark.usefixtures("through_triton")
@pytest.mark.parametrize("case", cases.handed(), ids=str)
def test_handed_case(case: cases.Case) -> None:
    logits = case.logits.clone().requires_grad_()
    log_prob, entropy = ppo_ops.logprob_entropy(logits, case.target, case.keep_mask, **case.options())
    case.expected.check("log_prob", log_prob.detach())
    case.expected.check("entropy", entropy.detach())
    for name, result in (("grad_log_prob", log_prob), ("grad_entropy", entropy)):
        case.expected.check(name, torch.autograd.grad(result.sum(), logits, retain_graph=True)[0])
    assert_exact(ppo_ops.logprob(case.logits, case.target, case.keep_mask, **case.options()), log_prob.detach())


@pytest.mark.usefixtures("through_triton")
@pytest.mark.parametrize("case", [c for c in cases.generated() if c.target.numel() <= 16], ids=str)
def test_case_of_the_cpu_suite(case: cases.Case, interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.logits.shape[-1] > 20_000:
        monkeypatch.setattr(interpreted, "LANES", 128)
        monkeypatch.setattr(interpreted, "SPLIT_COLUMNS", 8 * SPLIT)
        monkeypatch.setattr(interpreted, "SPAN_COLUMNS", 8 * SPLIT)
    oracle.check(case)


@pytest.mark.parametrize(("kinds", "masked"), KINDS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_sizes(interpreted: ModuleType, columns: int, kinds: int, masked: bool) -> None:
    temperature = ("none", "one", "each")[(columns + kinds) % 3]
    stage = make(columns, kinds, masked, temperature=temperature)
    check_grad(interpreted, stage, check_stats(interpreted, stage))


@pytest.mark.parametrize(("kinds", "masked"), KINDS)
@pytest.mark.parametrize("temperature", ["none", "one", "each"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(interpreted: ModuleType, dtype: torch.dtype, temperature: str, kinds: int, masked: bool) -> None:
    stage = make(261, kinds, masked, dtype, temperature)
    check_grad(interpreted, stage, check_stats(interpreted, stage))


@pytest.mark.parametrize(("kinds", "masked"), [(4, False), (6, True)])
@pytest.mark.parametrize("upstream", ["log_prob", "entropy"])
def test_one_gradient(interpreted: ModuleType, upstream: str, kinds: int, masked: bool) -> None:
    stage = make(129, kinds, masked)
    check_grad(interpreted, stage, stage.double().stats(ORACLE), upstream)


@pytest.mark.parametrize(("kinds", "masked"), KINDS)
def test_programs_as_on_a_device(
    monkeypatch: pytest.MonkeyPatch, interpreted: ModuleType, kinds: int, masked: bool
) -> None:
    monkeypatch.undo()
    stage = make(interpreted.SPLIT_COLUMNS + 5000, kinds, masked).rows(slice(0, 3))
    check_grad(interpreted, stage, check_stats(interpreted, stage))


@pytest.mark.parametrize(("kinds", "masked"), KINDS)
def test_wide_float64_splits(interpreted: ModuleType, kinds: int, masked: bool) -> None:
    stage = make(2501, kinds, masked, torch.float64, "each")
    check_grad(interpreted, stage, check_stats(interpreted, stage))
