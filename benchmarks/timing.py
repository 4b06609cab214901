"""Interleaved rounds, medians, and the limits of the machine.

All runs of a cell take turns, in an order that rotates, so that whatever else the machine does meets all of them
alike. Results are kept until the clock has stopped, for the limits and the providers alike: freeing memory is not
timed, obtaining it is.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.inputs import Inputs
from benchmarks.providers import Provider

# Twice a last-level cache of 32 MiB.
COLD_BYTES = 64 << 20
READ, COPY, FRESH = "limit: read (amax)", "limit: copy_", "limit: fresh copy"


@dataclass
class Run:
    """One provider or limit in one cell: `steps` are timed one by one, each given what the step before returned."""

    name: str
    steps: list[Callable[[Any], Any]]
    prepare: Callable[[], None] = lambda: None
    device: str = "cpu"
    threads: int | None = None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    cold: bool = False
    times: list[list[float]] = field(default_factory=list)
    spent: float = 0.0

    def once(self) -> None:
        """Run all steps and note their seconds."""
        begin = time.perf_counter()
        if self.threads is not None and self.threads != torch.get_num_threads():
            torch.set_num_threads(self.threads)
        self.prepare()
        if self.cold and self.device == "cpu":
            _empty_caches()
        result, kept, times = None, [], []
        with self.context():
            for step in self.steps:
                synchronize(self.device)
                start = time.perf_counter()
                result = step(result)
                synchronize(self.device)
                times.append(time.perf_counter() - start)
                kept.append(result)
        self.times.append(times)
        del result, kept
        self.spent += time.perf_counter() - begin

    def medians(self) -> list[float]:
        """Median seconds of each step."""
        return [median(step) for step in zip(*self.times, strict=True)]


@functools.cache
def _large() -> Tensor:
    return torch.zeros(COLD_BYTES // 4)


def _empty_caches() -> None:
    """Replace what the last level holds, and above all what it still has to write back, by lines that nobody needs."""
    _large().sum()


def synchronize(device: str) -> None:
    """Wait for the device's queue; nothing to do on the CPU."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def interleave(runs: list[Run], rounds: int, budget_s: float, least: int = 3) -> None:
    """Time the runs in turns: `rounds` rounds, less (but at least `least`) for a run that has spent `budget_s`.

    The gate has warmed the providers up; the median takes care of the limits' first round.
    """
    threads = torch.get_num_threads()
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            offset = turn % len(runs)
            for run in runs[offset:] + runs[:offset]:
                if turn < least or run.spent < budget_s:
                    run.once()
    finally:
        gc.enable()
        torch.set_num_threads(threads)


def provider_run(provider: Provider, inputs: Inputs, threads: int | None = None, name: str = "") -> Run:
    """Forward, and backward where the cell has a gradient, as two timed steps."""

    def forward(_: Any) -> tuple[Tensor, Tensor | None]:
        with torch.set_grad_enabled(inputs.cell.grad):
            return provider.function(inputs.logits(), inputs)

    steps: list[Callable[[Any], Any]] = [forward]
    if inputs.cell.grad:
        steps.append(inputs.backward)
    return Run(name or provider.name, steps, inputs.restore, inputs.cell.device, threads, provider.context)


def limit_runs(inputs: Inputs, threads: int | None = None) -> list[Run]:
    """Read, copy and fresh copy of this cell's logits.

    The read is `amax(-1)` of as many float32 logits; of its time `limits` takes the share of the bytes, because `amax`
    of bfloat16 is itself slower than memory.
    """
    probe = inputs.source if inputs.source.dtype == torch.float32 else inputs.source.float()
    device = inputs.cell.device

    def read(_: Any) -> Tensor:
        return probe.amax(-1)

    def copy(_: Any) -> Tensor:
        return inputs.work.copy_(inputs.source)

    def fresh(_: Any) -> Tensor:
        return torch.empty_like(inputs.source).copy_(inputs.source)

    steps = {READ: read, COPY: copy, FRESH: fresh}
    return [Run(name, [step], device=device, threads=threads) for name, step in steps.items()]


def limits(runs: list[Run], itemsize: int) -> dict[str, float]:
    """Seconds of the three limits; the read is scaled from float32 to the item size."""
    seconds = {run.name: run.medians()[0] for run in runs if run.name.startswith("limit:")}
    seconds[READ] *= itemsize / 4
    return seconds


def timed_columns(name: str, seconds: list[float], read: float, copy: float, fresh: float) -> dict[str, float]:
    """Milliseconds of forward and backward, beside the limits that they are held against, and their sums."""
    limit = [read, copy if name.endswith("in place") else fresh][: len(seconds)]
    columns = {}
    for step, time_s, limit_s in zip(("forward", "backward"), seconds, limit, strict=False):
        columns |= {f"{step}_ms": 1e3 * time_s, f"{step}_limit_ms": 1e3 * limit_s, f"{step}_ratio": time_s / limit_s}
    return {**columns, "total_ms": 1e3 * sum(seconds), "total_ratio": sum(seconds) / sum(limit)}
