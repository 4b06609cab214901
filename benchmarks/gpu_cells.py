"""What `python -m benchmarks.gpu` measures: cells in the order of their importance, one provider after another.

Bytes are those of the least traffic: the logits once forward, twice backward, a mask once each. The limit is a copy of
the same logits, which is read plus write, timed in the same rounds. A step's time lies between two events on the
stream; before each the device is made to wait, so that the host is ahead and its time is not counted. The L2 cache is
emptied before forward; backward finds there what forward left, as in training.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import gate
from benchmarks.inputs import SCALE, Cell, Inputs
from benchmarks.providers import Provider
from benchmarks.timing import Run, interleave, provider_run

Row = dict[str, Any]
MAIN_ROWS, MAIN_VOCAB = 8192, 151_936
SHAPES = ((MAIN_ROWS, MAIN_VOCAB), (4096, 18_992), (16_384, 128_256), (8192, 131_072))
TOY_SHAPES = ((2, 264), (1, 136))
DTYPES = (torch.bfloat16, torch.float32)
COPY = "copy"
# Cycles that the device waits, half a millisecond or more: a call of this library costs the host 0.1 ms.
WAIT_CYCLES = 1_000_000
# Twice the L2 cache of an H200 (60 MB), and room.
FLUSH_BYTES = 256 << 20


@dataclass(frozen=True)
class Plan:
    device: str
    toy: bool
    deadline: float
    rounds: int
    budget_s: float

    def left(self) -> float:
        return self.deadline - time.monotonic()


def main_cells(plan: Plan) -> list[Cell]:
    """The shape and the computations that the promises speak of."""
    rows, vocab = TOY_SHAPES[0] if plan.toy else SHAPES[0]
    return [Cell(rows, vocab, dtype, plan.device, entropy=entropy) for entropy in (True, False) for dtype in DTYPES]


def other_cells(plan: Plan) -> list[Cell]:
    """Other shapes, a kept set, and other shapes without entropy."""
    main, *others = TOY_SHAPES if plan.toy else SHAPES
    found = [Cell(*shape, dtype, plan.device) for shape in others for dtype in DTYPES]
    found += [Cell(*main, dtype, plan.device, kept=True) for dtype in DTYPES]
    return found + [Cell(*shape, dtype, plan.device, entropy=False) for shape in others for dtype in DTYPES]


def checked_cells(plan: Plan) -> list[Cell]:
    """Small cells with every option, that ours must pass before anything is timed."""
    rows, vocabs = (2, (131,)) if plan.toy else (64, (MAIN_VOCAB, 18_992, 32_001))
    found = []
    for dtype in DTYPES:
        for vocab in vocabs:
            for options in (
                {},
                {"entropy": False},
                {"kept": True},
                {"kept": True, "entropy": False},
                {"ignored": True},
            ):
                found.append(Cell(rows, vocab, dtype, plan.device, **options))
    return found


def make_inputs(cell: Cell) -> Inputs:
    """Random logits, each row drawn anew, on the device itself."""
    generator = torch.Generator(cell.device).manual_seed(0)
    values = torch.empty(cell.rows, cell.vocab, dtype=cell.dtype, device=cell.device)
    return Inputs(cell, values=values.normal_(0.0, SCALE, generator=generator))


class DeviceRun(Run):
    """A run whose steps are timed by events on the device."""

    def once(self) -> None:
        begin = time.perf_counter()
        self.prepare()
        result, kept = None, []
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in self.steps]
        with self.context():
            for step, (first, last) in zip(self.steps, events, strict=True):
                torch.cuda._sleep(WAIT_CYCLES)
                first.record()
                result = step(result)
                last.record()
                kept.append(result)
        torch.cuda.synchronize()
        self.times.append([first.elapsed_time(last) * 1e-3 for first, last in events])
        del result, kept
        self.spent += time.perf_counter() - begin


@functools.cache
def _large(device: str) -> Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)


def make_run(
    plan: Plan, name: str, steps: list[Callable[[Any], Any]], prepare: Callable[[], None], context: Any
) -> Run:
    if plan.device == "cpu":
        return Run(name, steps, prepare, context=context)

    def prepare_cold() -> None:
        prepare()
        _large(plan.device).zero_()

    return DeviceRun(name, steps, prepare_cold, plan.device, context=context)


def refused(plan: Plan, providers: list[Provider]) -> list[str]:
    """What our providers get wrong in the small cells; nothing may be timed unless it is empty."""
    wrong = []
    for cell in checked_cells(plan):
        inputs = make_inputs(cell)
        truth = gate.truth_of(inputs)
        for provider in providers:
            if provider.ours and provider.can(cell):
                ok, remark = gate.check(provider, inputs, truth)
                if not ok:
                    wrong.append(
                        f"{provider.name}, {cell.what}, {cell.dtype_name}, {cell.rows} x {cell.vocab}: {remark}"
                    )
    return wrong


def measure(plan: Plan, cell: Cell, providers: list[Provider]) -> Iterator[Row]:
    """Rows of one cell: each provider through the gate, then all that passed it in turns with the copy."""
    inputs = make_inputs(cell)
    truth = gate.truth_of(inputs)
    passed, rows = [], []
    for provider in providers:
        row: Row = {**cell.row(), "provider": provider.name, "ok": False, "remark": "not reached in time"}
        if plan.left() > 0:
            row["ok"], row["remark"] = gate.check(provider, inputs, truth)
        if row["ok"]:
            passed.append((provider, row))
        rows.append(row)
        _empty_cache(plan)

    def copy(_: Any) -> Tensor:
        return inputs.work.copy_(inputs.source)

    runs = [make_run(plan, COPY, [copy], lambda: None, nullcontext)]
    for provider, _ in passed:
        run = provider_run(provider, inputs)
        runs.append(make_run(plan, provider.name, run.steps, run.prepare, run.context))
    interleave(runs, plan.rounds, plan.budget_s)
    (copy_s,) = runs[0].medians()
    logits_bytes = inputs.work.nbytes
    for (provider, row), run in zip(passed, runs[1:], strict=True):
        mask_bytes = cell.elements if cell.kept and not provider.only_kept else 0
        row |= _columns(run.medians(), logits_bytes, mask_bytes, 2 * logits_bytes / copy_s)
        row |= _peaks(plan, provider, inputs)
    yield from rows


def _columns(seconds: list[float], logits_bytes: int, mask_bytes: int, copy_rate: float) -> Row:
    """Milliseconds, GB/s of the least traffic, and its share of the copy's rate in percent."""
    found: Row = {"copy_gbs": copy_rate * 1e-9, "total_ms": 1e3 * sum(seconds)}
    for (step, passes), time_s in zip((("forward", 1), ("backward", 2)), seconds, strict=True):
        rate = (passes * logits_bytes + mask_bytes) / time_s
        found |= {f"{step}_ms": 1e3 * time_s, f"{step}_gbs": rate * 1e-9, f"{step}_percent": 100 * rate / copy_rate}
    return found


def _peaks(plan: Plan, provider: Provider, inputs: Inputs) -> Row:
    """Most memory beyond the logits, over the logits': during forward, between, during backward."""
    if plan.device == "cpu":
        return {}
    inputs.restore()
    gc.collect()
    base = torch.cuda.memory_allocated()
    found: Row = {}

    def read(key: str, value: int) -> None:
        found[key] = (value - base) / inputs.work.nbytes

    torch.cuda.reset_peak_memory_stats()
    with provider.context():
        outputs = provider.function(inputs.logits(), inputs)
        read("forward_peak", torch.cuda.max_memory_allocated())
        read("held", torch.cuda.memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        inputs.backward(outputs)
        read("backward_peak", torch.cuda.max_memory_allocated())
    inputs.received.clear()
    return found


def _empty_cache(plan: Plan) -> None:
    if plan.device != "cpu":
        gc.collect()
        torch.cuda.empty_cache()
