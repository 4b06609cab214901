"""Stage 1 against the same statistics in plain torch, float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import ppo_ops  # noqa: F401  (registers the operators)
from ppo_ops.kernels import cpu
from ppo_ops.kernels.launch import vocab_stats as launch
from tests import cases, oracle, plain_kernels
from tests.cases import Case
from tests.tolerances import assert_budget, assert_exact, assert_fp64, assert_same_bits

OP = torch.ops.ppo._vocab_stats.default
# One of each kind for the slow part of opcheck; the quick parts run over all cases.
TELLING = ("3x7", "0x7", "everything", "float64_kept_set", "bfloat16_3x1025", "sequence_first", "target_uint8")


def _statistics(case: Case, dtype: torch.dtype, with_entropy: bool) -> Tensor:
    """The plain kernel's statistics in `dtype`, from logits of any leading shape."""
    kinds = 3 if not with_entropy else 4 if case.keep_mask is None else 6
    stats = torch.empty(kinds, case.target.numel(), dtype=dtype)
    logits, target, keep_mask, temperature, *_ = case.stage_args()
    temperature = None if temperature is None else temperature.reshape(-1)
    columns = logits.shape[-1] if case.vocab_size is None else case.vocab_size
    args = (logits.to(dtype), target.reshape(-1), keep_mask, temperature, stats, case.ignore_index, 0, columns)
    launch(plain_kernels.make(), *args)
    return stats


def _scale(right: Tensor) -> Tensor:
    """Maxima and the target's logit are copies: exact. A sum of terms e^z is as uncertain as its z are large."""
    scale = torch.zeros_like(right)
    scale[1] = right[1] * 10
    if len(right) > 3:
        scale[3] = right[3].abs() * 10 + right[-1 if len(right) == 6 else 1]
    if len(right) == 6:
        scale[5] = right[5] * 10
    return scale.masked_fill(~scale.isfinite(), 0.0)


@pytest.mark.parametrize("with_entropy", [False, True], ids=["log_prob", "entropy"])
@pytest.mark.parametrize("case", cases.generated(), ids=str)
def test_statistics(kernels: str, case: Case, with_entropy: bool) -> None:
    ours = OP(*case.stage_args(), 1, with_entropy)
    right = _statistics(case, torch.float64, with_entropy)
    if case.logits.dtype == torch.float64:
        assert_fp64(ours, right)
    else:
        assert_budget(ours, _statistics(case, torch.float32, with_entropy), right, _scale(right))


def _one_row(kinds: int, **more: float) -> Tensor:
    names = ("lp_max", "lp_sum_exp", "target_logit", "sum_exp_shifted", "row_max", "sum_exp")
    empty = {"lp_max": -torch.inf, "lp_sum_exp": 0.0, "target_logit": torch.nan, "sum_exp_shifted": 0.0}
    values = {**empty, "row_max": -torch.inf, "sum_exp": 0.0, **more}
    return torch.tensor([[values[name]] for name in names[:kinds]])


@pytest.mark.parametrize("kinds", [3, 4, 6])
def test_constructed_rows(kernels: str, kinds: int) -> None:
    """Values that are exact in float32, zero tolerance: 2, 2, -inf over the shard that starts at id 10."""
    inf = torch.inf
    mask = torch.tensor([[True, False, True]]) if kinds == 6 else None

    def stats(row: list[float], target: int, keep_mask: Tensor | None = mask) -> Tensor:
        where = (-100, None, 10, "")
        return OP(torch.tensor([row]), torch.tensor([target]), keep_mask, None, *where, 1, kinds > 3)

    both = {"lp_max": 2.0, "lp_sum_exp": 2.0, "target_logit": 2.0, "row_max": 2.0, "sum_exp": 2.0}
    assert_exact(stats([2.0, 2.0, -inf], 11), _one_row(kinds, **both))
    elsewhere = {**both, "target_logit": torch.nan}
    if kinds == 6:
        elsewhere["lp_sum_exp"] = 1.0  # column 11 is dropped where it is not the target
    assert_exact(stats([2.0, 2.0, -inf], 3), _one_row(kinds, **elsewhere))
    assert_exact(stats([-inf, -inf, -inf], 13), _one_row(kinds))
    ones = {"lp_max": 0.0, "lp_sum_exp": 1.0, "target_logit": 0.0, "row_max": 0.0, "sum_exp": 1.0}
    assert_exact(stats([torch.nan, 7.0, inf], -100), _one_row(kinds, **ones))
    nothing = torch.ones(1, 0, dtype=torch.bool) if kinds == 6 else None
    assert_exact(stats([], 10, nothing), _one_row(kinds))


def test_columns_from_vocab_size_on_are_absent(kernels: str) -> None:
    """Also on a shard that lies partly or wholly behind the vocabulary's end."""
    row, target = torch.tensor([[1.0, torch.nan, torch.nan]]), torch.tensor([0])
    for vocab_size, expected in ((11, {"lp_max": 1.0, "lp_sum_exp": 1.0}), (10, {}), (3, {})):
        assert_exact(OP(row, target, None, None, -100, vocab_size, 10, "", 1, True), _one_row(4, **expected))


def test_each_row_alone(kernels: str) -> None:
    for case in (cases.by_name("257x1025"), cases.by_name("mask_of_257_rows")):
        together = OP(*case.stage_args(), 1, True)
        for row in range(0, 257, 8):
            part = slice(row, row + 1)
            mask = None if case.keep_mask is None else case.keep_mask[part]
            alone = dataclasses.replace(case, logits=case.logits[part], target=case.target[part], keep_mask=mask)
            assert_same_bits(together[:, part], OP(*alone.stage_args(), 1, True))


def test_a_graph_for_another_group_size_is_refused() -> None:
    """What a compile cache of a run of another size would hand us."""
    with pytest.raises(RuntimeError, match="compiled for a group of 2 ranks, but group '' has 1"):
        OP(*cases.by_name("3x7").stage_args(), 2, True)


def test_has_no_gradient_of_its_own() -> None:
    logits, *rest = cases.by_name("3x7").stage_args()
    stats = OP(logits.clone().requires_grad_(), *rest, 1, True)
    with pytest.raises(RuntimeError, match="_vocab_stats is a stage without a gradient of its own"):
        stats.sum().backward()


@pytest.mark.parametrize("case", cases.generated(), ids=str)
def test_fake_like_real(case: Case) -> None:
    for with_entropy in (False, True):
        oracle.check_fake_like_real(OP, *case.stage_args(), 1, with_entropy)


@pytest.mark.parametrize("case", [*cases.generated(), *cases.handed()], ids=str)
def test_opcheck(case: Case) -> None:
    quick = ("test_schema", "test_autograd_registration", "test_faketensor")
    slow = (*quick, "test_aot_dispatch_dynamic")
    opcheck(OP, (*case.stage_args(), 1, True), test_utils=slow if case.name in TELLING else quick)


def test_the_cpu_op_runs_the_chosen_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the fixture `kernels` would choose nothing."""
    monkeypatch.setattr(cpu, "_kernels", lambda dtype: pytest.fail("chosen"))
    with pytest.raises(pytest.fail.Exception, match="chosen"):
        OP(*cases.by_name("3x7").stage_args(), 1, True)
