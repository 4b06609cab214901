"""Memory by the allocator's own account, and offsets beyond 32 bits."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

import ppo_ops
from ppo_ops import reference
from tests.gpu.devices import gpu, need_memory
from tests.tolerances import assert_same_bits

VOCAB = 151_936
# Beyond the logits, in shares of them: a few numbers a row, and the partial sums of five programs a row.
NOTHING = 0.005
# Bytes for each kept id and each row: a dozen int64 and bool vectors, and a sort.
PER_ENTRY = 256


class Meter:
    def __init__(self, logits: Tensor) -> None:
        self.size = logits.nbytes
        gc.collect()
        self.base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> float:
        """Most bytes since the last reading, beyond the start, over the logits'."""
        peak = (torch.cuda.max_memory_allocated() - self.base) / self.size
        torch.cuda.reset_peak_memory_stats()
        return peak

    def held(self) -> float:
        return (torch.cuda.memory_allocated() - self.base) / self.size


class _Made(torch.autograd.Function):
    """Gives logits a history without a copy, and stops there."""

    @staticmethod
    def forward(ctx: object, anchor: Tensor, logits: list[Tensor]) -> Tensor:
        return logits[0].new_empty(0).set_(logits[0])

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[None, None]:
        return None, None


@gpu
@pytest.mark.parametrize("option", ["plain", "options", "ids", "in place", "ids in place"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_beyond_the_logits(device: str, dtype: torch.dtype, option: str) -> None:
    rows = 2048
    source = torch.empty(rows, VOCAB, dtype=dtype, device=device).normal_()
    target = torch.randint(VOCAB, (rows,), device=device)
    options: dict[str, object] = {"inplace_backward": "in place" in option}
    if option == "options":
        options |= {"temperature": torch.full((rows,), 0.7, device=device), "vocab_size": VOCAB - 99}
        options["keep_mask"] = (torch.rand(VOCAB, device=device) < 0.1).expand(rows, VOCAB)
        target[::3] = -100
        target.clamp_(max=VOCAB - 100)
    if "ids" in option:
        options["keep_ids"] = torch.randint(VOCAB, (40 * rows,), device=device)
        options["keep_offsets"] = torch.arange(rows + 1, device=device) * 40
    nothing = NOTHING + ("ids" in option) * 41 * rows * PER_ENTRY / source.nbytes
    anchor = torch.zeros((), device=device, requires_grad=True)
    upstream = (torch.ones(rows, device=device), torch.ones(rows, device=device))
    for turn in range(2):  # the first loads code
        meter = Meter(source)
        logits = _Made.apply(anchor, [source])
        outputs = ppo_ops.logprob_entropy(logits, target, **options)
        forward, held = meter.peak(), meter.held()
        (grad,) = torch.autograd.grad(outputs, logits, upstream)
        backward = meter.peak()
        if turn:
            assert forward <= nothing
            assert held <= NOTHING
            extra = 0.0 if options["inplace_backward"] else 1.0
            assert extra - NOTHING <= backward <= extra + nothing
            assert (grad.data_ptr() == source.data_ptr()) == options["inplace_backward"]
        del logits, outputs, grad


@gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("power", [31, 32])
def test_offsets_beyond_32_bits(device: str, power: int, masked: bool) -> None:
    """The last rows of logits of more than 2^power elements have the bits that they have alone."""
    rows = 2**power // VOCAB + 9
    need_memory(rows * VOCAB * (2 * 2 + masked))
    logits = torch.empty(rows, VOCAB, dtype=torch.bfloat16, device=device).normal_()
    target = torch.randint(VOCAB, (rows,), device=device)
    mask = None
    if masked:
        mask = torch.empty(rows, VOCAB, dtype=torch.bool, device=device).bernoulli_(0.3)
    last = slice(rows - 8, rows)

    def results(rows: slice) -> tuple[Tensor, ...]:
        x = logits[rows].detach().requires_grad_()
        kept = None if mask is None else mask[rows]
        outputs = ppo_ops.logprob_entropy(x, target[rows], kept)
        (grad,) = torch.autograd.grad(outputs, x, [torch.ones_like(outputs[0])] * 2)
        return outputs[0].detach()[-8:], outputs[1].detach()[-8:], grad[-8:]

    whole = [result.clone() for result in results(slice(0, rows))]
    for ours, alone in zip(whole, results(last), strict=True):
        assert not ours.isnan().any()
        assert_same_bits(ours, alone)
    # And they are right: beside float64, where a bfloat16 gradient has half a unit in the last place of 2^-8.
    x = logits[last].double().requires_grad_()
    truth = reference.logprob_entropy(x, target[last], None if mask is None else mask[last])
    for ours, right in zip(whole[:2], truth, strict=True):
        torch.testing.assert_close(ours.double(), right.detach(), rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(truth, x, [torch.ones_like(truth[0])] * 2)
    torch.testing.assert_close(whole[2].double(), grad, rtol=2**-8, atol=1e-9)


@gpu
def test_column_offsets_beyond_32_bits(device: str) -> None:
    """A transposed matrix: the last column of a row lies beyond 2^31 elements, of itself and of the mask."""
    rows = 2**31 // VOCAB + 9
    need_memory(rows * VOCAB * 4)
    memory = torch.empty(VOCAB, rows, dtype=torch.bfloat16, device=device).normal_()
    mask = torch.empty(VOCAB, rows, dtype=torch.bool, device=device).bernoulli_(0.3).t()
    logits, target = memory.t(), torch.randint(VOCAB, (rows,), device=device)
    with torch.no_grad():
        whole = ppo_ops.logprob_entropy(logits, target, mask)
        last = slice(rows - 8, rows)
        alone = ppo_ops.logprob_entropy(logits[last].contiguous(), target[last], mask[last].contiguous())
    for ours, right in zip(whole, alone, strict=True):
        assert_same_bits(ours[last], right)


@gpu
def test_ragged_rows_beyond_32_bits(device: str) -> None:
    """Kept ids of the last rows, whose logits lie beyond 2^31 elements."""
    rows = 2**31 // VOCAB + 9
    need_memory(rows * VOCAB * 2 * 2)
    logits = torch.empty(rows, VOCAB, dtype=torch.bfloat16, device=device).normal_()
    target = torch.randint(VOCAB, (rows,), device=device)
    ids = torch.randint(VOCAB, (rows, 12), device=device, dtype=torch.int32)

    def results(rows: slice) -> tuple[Tensor, ...]:
        x = logits[rows].detach().requires_grad_()
        sets = {"keep_ids": ids[rows].reshape(-1), "keep_offsets": torch.arange(len(x) + 1, device=device) * 12}
        outputs = ppo_ops.logprob_entropy(x, target[rows], **sets)
        (grad,) = torch.autograd.grad(outputs, x, [torch.ones_like(outputs[0])] * 2)
        return outputs[0].detach()[-8:], outputs[1].detach()[-8:], grad[-8:]

    whole = [result.clone() for result in results(slice(0, rows))]
    for ours, alone in zip(whole, results(slice(rows - 8, rows)), strict=True):
        assert not ours.isnan().any()
        assert_same_bits(ours, alone)
