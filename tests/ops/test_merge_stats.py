"""Stages 2 and 3: statistics of shards merge to the whole vocabulary's results, however it is cut."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import ppo_ops.ops.merge_stats as stage
from tests import cases, oracle
from tests.cases import Case
from tests.oracle import Results
from tests.tolerances import assert_budget, assert_exact, assert_fp64, assert_same_bits

VOCAB_STATS = torch.ops.ppo._vocab_stats.default
LOGITS_GRAD = torch.ops.ppo._logits_grad.default

# Where the columns are cut, as fractions: one rank; halves; an empty first, middle and last rank; a prime number of
# ranks; more ranks than a small vocabulary has columns.
CUTS = {
    "1": (),
    "2": (0.5,),
    "3_uneven": (0.1, 0.2),
    "empty_first": (0.0,),
    "empty_middle_and_last": (0.3, 0.3, 1.0),
    "7": tuple(r / 7 for r in range(1, 7)),
    "16": tuple(r / 16 for r in range(1, 16)),
}
SPLIT = (
    *("1x1", "3x2", "3x7", "257x129", "3x1000", "one_finite_logit", "inf_blocks_first", "inf_shard", "offset_1e8"),
    *("offset_1e6_kept_set", "mask_keeps_target_only", "mask_drops_target", "mask_drops_the_largest"),
    *("temperature_one_a_row", "padded", "ignored_rows", "everything", "bfloat16_kept_set", "float64_kept_set", "0x7"),
)


def _edges(cut: str, columns: int) -> list[tuple[int, int]]:
    edges = [0, *(int(fraction * columns) for fraction in CUTS[cut]), columns]
    return list(itertools.pairwise(edges))


def _shards(case: Case, cut: str) -> list[tuple[object, ...]]:
    """Arguments of the stages, a rank."""
    logits, target, mask, temperature, ignore_index, _, _, group_name = case.stage_args()
    vocab_size = logits.shape[1] if case.vocab_size is None else case.vocab_size
    shards = []
    for start, end in _edges(cut, logits.shape[1]):
        kept = None if mask is None else mask[:, start:end]
        rows = (logits[:, start:end], target, kept, temperature)
        shards.append((*rows, ignore_index, vocab_size, start, group_name))
    return shards


def _merge(
    gathered: Tensor, target: Tensor, temperature: Tensor | None = None, ignore_index: int = -100
) -> tuple[Tensor, Tensor, Tensor]:
    """What every rank makes of the gathered ``[W, K, N]``."""
    with mock.patch.object(stage, "all_gather_stats", return_value=gathered):
        return stage.merge_stats(gathered[0], target, temperature, ignore_index, len(gathered), "")


def _run(case: Case, cut: str) -> Results:
    """Forward and backward of all ranks in one process."""
    shards = _shards(case, cut)
    gathered = torch.stack([VOCAB_STATS(*shard, 1, True) for shard in shards])
    log_prob, entropy, normalizers = _merge(gathered, case.target, case.temperature_tensor(), case.ignore_index)
    grads = [g.to(log_prob.dtype) for g in oracle.upstream(case)]
    parts = [LOGITS_GRAD(*shard[:4], normalizers, *grads, *shard[4:]) for shard in shards]
    return Results(log_prob, entropy, torch.cat(parts, 1))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", SPLIT)
def test_any_split_gives_the_same_result(kernels: str, name: str, cut: str) -> None:
    case = cases.by_name(name)
    for ours, plain, right, scale in zip(
        _run(case, cut), oracle.plain(case), oracle.truth(case), oracle.scales(case), strict=True
    ):
        if case.logits.dtype == torch.float64:
            assert_fp64(ours, right)
        else:
            assert_budget(ours, plain, right, scale)


@pytest.mark.parametrize("name", ["3x129", "mask_drops_target", "ignored_rows"])
def test_an_empty_rank_changes_no_bit(name: str) -> None:
    case = cases.by_name(name)
    for actual, expected in zip(_run(case, "empty_first"), _run(case, "1"), strict=True):
        assert_exact(actual, expected)


@pytest.mark.parametrize("name", ["257x129", "mask_of_257_rows"])
@pytest.mark.parametrize("cut", ["1", "2", "7"])
def test_a_row_merges_to_the_same_bits_alone(name: str, cut: str) -> None:
    case = cases.by_name(name)
    gathered = torch.stack([VOCAB_STATS(*shard, 1, True) for shard in _shards(case, cut)])
    together = _merge(gathered, case.target)
    for row in range(257):
        part = slice(row, row + 1)
        alone = _merge(gathered[..., part], case.target[part])
        for a, t in zip(alone, together, strict=True):
            assert_same_bits(a, t[..., part])


def _two_ranks(first: list[float], second: list[float]) -> Tensor:
    return torch.tensor([[[value] for value in first], [[value] for value in second]])


def test_a_target_that_nobody_owns_is_nan() -> None:
    """Never a plausible number; the entropy does not depend on the target."""
    stats = [0.0, 1.0, torch.nan, 0.0]
    log_prob, entropy, _ = _merge(_two_ranks(stats, stats), torch.tensor([9]))
    assert log_prob.isnan().all()
    assert_exact(entropy, torch.tensor([2.0]).log())


def test_a_nan_row_of_one_rank_is_nan() -> None:
    good, bad = [0.0, 1.0, 0.0, 0.0], [torch.nan, torch.nan, torch.nan, torch.nan]
    for stats in (_two_ranks(good, bad), _two_ranks(bad, good)):
        log_prob, entropy, _ = _merge(stats, torch.tensor([0]))
        assert log_prob.isnan().all()
        assert entropy.isnan().all()


def test_an_ignored_row_is_zero_on_any_number_of_ranks() -> None:
    """Each rank's statistics are those of one logit of 0; merged, they would give log W."""
    ignored = [0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    for target in (torch.tensor([-100]), torch.tensor([-100], dtype=torch.int8)):
        for kinds in (3, 4, 6):
            stats = _two_ranks(ignored[:kinds], ignored[:kinds])
            log_prob, entropy, _ = _merge(stats, target)
            assert_exact(log_prob, torch.zeros(1))
            assert_exact(entropy, torch.zeros(1 if kinds > 3 else 0))


def test_one_rank_needs_no_collective() -> None:
    """A group name that exists nowhere is not even looked up."""
    stats = torch.tensor([[0.0], [1.0], [0.0], [0.0]])
    log_prob, entropy, _ = stage.merge_stats(stats, torch.tensor([0]), None, -100, 1, "no such group")
    assert_exact(log_prob, torch.zeros(1))
    assert_exact(entropy, torch.zeros(1))


@pytest.mark.parametrize("case", [c for c in cases.generated() if c.target.numel() < 10], ids=str)
def test_fake_like_real_and_fresh(case: Case) -> None:
    for with_entropy in (False, True):
        stats = VOCAB_STATS(*case.stage_args(), 1, with_entropy)
        outputs = _merge(stats.unsqueeze(0), case.target, case.temperature_tensor(), case.ignore_index)
        with FakeTensorMode() as mode:
            logits, target = mode.from_tensor(case.logits), mode.from_tensor(case.target)
            fakes = stage.fake_outputs(logits, target, len(stats), with_entropy)
        for real, fake in zip(outputs, fakes, strict=True):
            assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())
        storages = {t.untyped_storage()._cdata for t in (*outputs, case.logits, case.target, stats)}
        assert len(storages) == 6, "outputs share memory with each other or with an input"
