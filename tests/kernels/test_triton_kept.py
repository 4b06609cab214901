"""Ragged kept sets as CUDA computes them, in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

import ppo_ops
import ppo_ops.kernels
from ppo_ops.kernels import cpu, cuda, kept
from tests import cases
from tests.kernels.triton_tools import INTERPRETER
from tests.tolerances import assert_exact, assert_same_bits

pytest.importorskip("triton")
pytestmark = INTERPRETER
INF, NAN = torch.inf, torch.nan
SIZES = (0, 1, 2, 63, 64, 65, 300, 7)


@pytest.fixture
def kernels(interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Programs of one warp that take 64 entries at a time."""
    monkeypatch.setattr(interpreted, "ENTRIES", 64)
    return interpreted


def _found(sizes: tuple[int, ...]) -> kept.Entries:
    """Only what the reduction looks at: rows and offsets."""
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    row = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return kept.Entries(row, row, row, row, offsets, row, row)


def _temperature(kind: str, rows: int, dtype: torch.dtype) -> Tensor | None:
    given = {"none": None, "one": torch.tensor([0.7]), "each": torch.linspace(0.5, 30.0, rows)}[kind]
    return None if given is None else given.to(dtype)


@pytest.mark.parametrize("temperature", ["none", "one", "each"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equal_to_torch(kernels: ModuleType, dtype: torch.dtype, temperature: str) -> None:
    found = _found(SIZES)
    x = 4 * torch.randn(sum(SIZES), generator=cases.generator("entries"), dtype=torch.float64).to(dtype)
    x[::5] = -INF
    divisor = _temperature(temperature, len(SIZES), dtype)
    ours = kernels.softmax_of_entries(x, found.offsets, divisor)
    right = kept.softmax_of_entries(x, found, divisor)
    assert_exact(ours[0], right[0])
    # A term's exponent is up to 40 and is rounded, a few roundings of the sum on top.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(ours[1], right[1], rtol=64 * eps, atol=0)


def test_special_values(kernels: ModuleType) -> None:
    found = _found((3, 3, 3, 70, 70))
    x = torch.cat(
        [
            torch.tensor([1.0, NAN, 2.0, 1.0, INF, 2.0, -INF, -INF, -INF]),
            torch.full((69,), -INF),  # a whole block, then one finite value
            torch.tensor([5.0]),
            torch.linspace(0, 2, 70).round() * 8 + 1e8,
        ]
    )
    largest, total = kernels.softmax_of_entries(x, found.offsets, None)
    assert largest[0].isnan()
    assert total[:2].isnan().all()
    assert largest[2:4].tolist() == [-INF, 5.0]
    assert total[2:4].tolist() == [0.0, 1.0]
    # The offset of 1e8 changes nothing.
    assert_same_bits(total[4:], kernels.softmax_of_entries(x[-70:] - 1e8, torch.tensor([0, 70]), None)[1])
    for bad in (0.0, -1.0, NAN):
        assert kernels.softmax_of_entries(x, found.offsets, torch.tensor([bad]))[1][3:].isnan().all()


def test_bits_do_not_depend_on_the_place(kernels: ModuleType) -> None:
    x = torch.randn(300, generator=cases.generator("place"))
    alone = kernels.softmax_of_entries(x, torch.tensor([0, 300]), None)
    for before in (1, 3, 17):
        longer = torch.cat([torch.ones(before), x, torch.ones(5)])
        several = kernels.softmax_of_entries(longer, torch.tensor([0, before, before + 300, before + 305]), None)
        for ours, expected in zip(several, alone, strict=True):
            assert_same_bits(ours[1:2], expected)


def test_no_rows(kernels: ModuleType) -> None:
    largest, total = kernels.softmax_of_entries(torch.empty(0), torch.zeros(1, dtype=torch.int64), None)
    assert largest.shape == total.shape == (0,)


@pytest.fixture
def as_on_cuda(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA launchers in place of the CPU's, down to the kernels."""
    monkeypatch.setattr(ppo_ops.kernels, "triton", kernels, raising=False)
    for name in ("vocab_stats", "logits_grad", "kept_vocab_stats", "kept_logits_grad"):
        monkeypatch.setattr(cpu, name, getattr(cuda, name))
    monkeypatch.setattr(cpu, "finishes", lambda *_: False)


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("case", [c for c in cases.handed() if c.keep_mask is not None], ids=str)
def test_handed_case(case: cases.Case) -> None:
    ids, offsets = ppo_ops.keep_sets_from_mask(case.keep_mask)
    logits = case.logits.clone().requires_grad_()
    outputs = ppo_ops.logprob_entropy(logits, case.target, keep_ids=ids, keep_offsets=offsets, **case.options())
    for name, result in zip(("log_prob", "entropy"), outputs, strict=True):
        case.expected.check(name, result.detach())
        case.expected.check(f"grad_{name}", torch.autograd.grad(result.sum(), logits, retain_graph=True)[0])


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_equal_to_the_mask(dtype: torch.dtype, inplace: bool) -> None:
    """Ids in any order, two of them said twice; a row that is ignored, one that is not restricted."""
    shape, vocab = (2, 3), 1100
    case = cases.random_case("ragged_on_cuda", 6, vocab, dtype)
    mask = cases.random_mask("ragged_on_cuda", 6, vocab)
    mask[2] = True
    case.target[4] = -100
    listed = [row.nonzero().squeeze(1) for row in mask]
    listed = [torch.cat([ids.flip(0), ids[:2]]) for ids in listed]
    listed[2] = listed[2][:0]
    sets = {"keep_ids": torch.cat(listed), "keep_offsets": torch.tensor([0, *map(len, listed)]).cumsum(0)}

    def results(kept_set: dict[str, Tensor], function: object) -> list[Tensor]:
        leaf = case.logits.view(*shape, vocab).clone().requires_grad_()
        outputs = function(leaf * 1, case.target.view(shape), temperature=0.7, inplace_backward=inplace, **kept_set)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        weights = [torch.linspace(-1, 2, 6).view(shape).to(out.dtype) for out in outputs]
        return [*(out.detach() for out in outputs), *torch.autograd.grad(outputs, leaf, weights)]

    # The same sums in another order: a few roundings of the accumulation dtype, then one of the gradient's. The
    # interpreter rounds float32 to bfloat16 as devices do.
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    for function in (ppo_ops.logprob_entropy, ppo_ops.logprob):
        ragged, masked = results(sets, function), results({"keep_mask": mask.view(*shape, vocab)}, function)
        for ours, expected in zip(ragged, masked, strict=True):
            rtol = max(16 * eps, torch.finfo(dtype).eps if ours.dim() == 3 else 0.0)
            torch.testing.assert_close(ours, expected, rtol=rtol, atol=16 * eps)
