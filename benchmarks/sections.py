"""What is measured in one process. Each function yields rows of results; the caller saves them as they come."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from benchmarks import gate
from benchmarks.inputs import Cell, Inputs
from benchmarks.providers import Provider
from benchmarks.timing import (
    COPY,
    FRESH,
    READ,
    Run,
    interleave,
    limit_runs,
    limits,
    provider_run,
    synchronize,
    timed_columns,
)

Row = dict[str, Any]
HEADLINE = (512, 151_936)
DTYPES = (torch.float32, torch.bfloat16)
SWEEP_ROWS = (16, 64, 256, 1024, 4096)
SWEEP_VOCABS = (32_000, 128_256, 151_936)


@dataclass(frozen=True)
class Settings:
    """What every section needs to know."""

    providers: list[Provider]
    device: str = "cpu"
    rounds: int = 15
    budget_s: float = 4.0  # a provider stops taking part in a cell when it has spent this
    toy: bool = False  # tiny sizes: shows that everything runs, measures nothing

    def size(self, rows: int, vocab: int) -> tuple[int, int]:
        return (min(rows, 8), min(vocab, 512)) if self.toy else (rows, vocab)

    @property
    def threads(self) -> int:
        return torch.get_num_threads()


def available_bytes(device: str) -> int:
    """Memory that a cell may use."""
    if device.startswith("cuda"):
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(torch.cuda.mem_get_info()[0]) + cached
    with open("/proc/meminfo") as lines:
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def _fits(provider: Provider, cell: Cell) -> bool:
    """Whether there is room for what the provider needs beside the inputs, which exist already."""
    return cell.elements * provider.bytes_per_element < 0.85 * available_bytes(cell.device)


def admitted(
    settings: Settings, inputs: Inputs, providers: list[Provider]
) -> tuple[list[tuple[Provider, str]], list[Row]]:
    """Providers that may be timed with their remarks, and a row without numbers for each that may not."""
    cell = inputs.cell
    truth = gate.truth_of(inputs)
    passed, refused = [], []
    for provider in providers:
        if not _fits(provider, cell):
            ok, remark = False, "skipped: would not fit in memory"
        else:
            ok, remark = gate.check(provider, inputs, truth)
        if ok:
            passed.append((provider, remark))
        else:
            refused.append({**cell.row(), "provider": provider.name, "ok": False, "remark": remark})
    return passed, refused


def measure(
    settings: Settings,
    *cells: Cell,
    only: tuple[str, ...] = (),
    threads: tuple[int, ...] = (),
    cold: bool = False,
) -> Iterator[Row]:
    """Some cells side by side: gate, then limits and providers of all of them, with each thread count, interleaved.

    Cells of one size and dtype share their logits and their limits, so that ratios between them mean something. `cold`:
    with caches emptied before each run.
    """
    counts = threads or (settings.threads,)
    limit_of: dict[tuple[Any, ...], list[Run]] = {}
    shared: dict[tuple[Any, ...], Inputs] = {}
    timed: list[tuple[Cell, int, Run, str]] = []
    for cell in cells:
        size = (cell.rows, cell.vocab, cell.dtype)
        inputs = Inputs(cell, values=shared[size].full if size in shared else None)
        chosen = [p for p in settings.providers if p.can(cell) and (not only or p.name in only)]
        passed, refused = admitted(settings, inputs, chosen)
        yield from refused
        for count in counts:
            if size not in shared:
                limit_of[(*size, count)] = limit_runs(inputs, count)
            timed += [(cell, count, provider_run(p, inputs, count), remark) for p, remark in passed]
        shared.setdefault(size, inputs)
    runs = [run for group in limit_of.values() for run in group] + [run for _, _, run, _ in timed]
    for run in runs:
        run.cold = cold
    interleave(runs, settings.rounds, settings.budget_s)
    for cell, count, run, remark in timed:
        floor = limits(limit_of[cell.rows, cell.vocab, cell.dtype, count], cell.dtype.itemsize)
        yield _timed_row(cell, run, floor, count, remark)


def _timed_row(cell: Cell, run: Run, floor: dict[str, float], threads: int, remark: str) -> Row:
    row = {**cell.row(), "provider": run.name, "ok": True, "threads": threads, "rounds": len(run.times)}
    return row | timed_columns(run.name, run.medians(), floor[READ], floor[COPY], floor[FRESH]) | {"remark": remark}


def headline(settings: Settings) -> Iterator[Row]:
    """The table of the promises: every option at 512 x 151,936."""
    yield from _options(settings, *HEADLINE)


def options(settings: Settings) -> Iterator[Row]:
    """Every option at the other vocabularies."""
    for vocab in SWEEP_VOCABS[:-1]:
        yield from _options(settings, HEADLINE[0], vocab)


def _variants(cell: Cell) -> list[Cell]:
    return [cell, replace(cell, kept=True), replace(cell, ignored=True), replace(cell, entropy=False)]


def _options(settings: Settings, rows: int, vocab: int) -> Iterator[Row]:
    rows, vocab = settings.size(rows, vocab)
    for dtype in DTYPES:
        for grad in (False, True):
            yield from measure(settings, *_variants(Cell(rows, vocab, dtype, settings.device, grad=grad)))


def quick(settings: Settings) -> Iterator[Row]:
    """The cells of the headline that the promises speak of."""
    rows, vocab = settings.size(*HEADLINE)
    for dtype in DTYPES:
        cell = Cell(rows, vocab, dtype, settings.device, grad=False)
        yield from measure(settings, *_variants(cell))
        yield from measure(settings, replace(cell, grad=True))


def sweep(settings: Settings) -> Iterator[Row]:
    """Forward, and forward with backward, over rows and vocabularies."""
    for dtype in DTYPES:
        for vocab in SWEEP_VOCABS:
            for rows in SWEEP_ROWS:
                cell = Cell(*settings.size(rows, vocab), dtype, settings.device, grad=False)
                yield from measure(settings, cell)
                yield from measure(settings, replace(cell, grad=True))
                yield from measure(settings, replace(cell, entropy=False, grad=True))


def threads(settings: Settings, only: tuple[str, ...] = ()) -> Iterator[Row]:
    """One thread beside all of them, interleaved."""
    if settings.device.startswith("cuda") or settings.threads == 1:
        return
    counts = (1, settings.threads)
    for dtype in DTYPES:
        cell = Cell(*settings.size(*HEADLINE), dtype, settings.device)
        yield from measure(settings, replace(cell, grad=False), cell, only=only, threads=counts)


def linearity(settings: Settings) -> Iterator[Row]:
    """Time per element over rows and over the vocabulary, the sizes of a series side by side, the gradient in place.

    The smallest has 65 MB of bfloat16, so that none of them lives in a cache of the last level. Caches are emptied
    first: writing back what the preparation left in them took 2 ms of any size's forward.
    """
    series = {"rows": [(rows, 32_000) for rows in (1024, 2048, 4096, 8192)]}
    series["vocab"] = [(1024, vocab) for vocab in (32_000, 64_000, 128_000, 256_000)]
    for dtype in DTYPES:
        for over, sizes in series.items():
            # Toy sizes are all the same; only one of them is then measured.
            cells = {Cell(*settings.size(*size), dtype, settings.device): None for size in sizes}
            for row in measure(settings, *cells, only=("ppo_ops, in place",), cold=True):
                if row["ok"]:
                    elements = row["rows"] * row["vocab"]
                    steps = ("forward", "forward_limit", "backward", "backward_limit")
                    yield {**row, "over": over, **{f"{s}_ps": 1e9 * row[f"{s}_ms"] / elements for s in steps}}


def dispatch(settings: Settings) -> Iterator[Row]:
    """Microseconds a call where there is next to nothing to compute: N = 1, V = 1000, no grad."""
    for entropy in (True, False):
        inputs = Inputs(Cell(1, 1000, torch.float32, settings.device, entropy=entropy, grad=False))
        passed, refused = admitted(settings, inputs, [p for p in settings.providers if p.can(inputs.cell)])
        yield from refused
        inputs.restore()
        times: dict[str, list[float]] = {provider.name: [] for provider, _ in passed}
        for _ in range(3 if settings.toy else 15):
            for provider, _remark in passed:
                times[provider.name].append(_seconds_a_call(provider, inputs, 20 if settings.toy else 100))
        for provider, remark in passed:
            microseconds = 1e6 * median(times[provider.name])
            yield {**inputs.cell.row(), "provider": provider.name, "ok": True, "us": microseconds, "remark": remark}


def _seconds_a_call(provider: Provider, inputs: Inputs, calls: int) -> float:
    with torch.no_grad(), provider.context():
        synchronize(inputs.cell.device)
        start = time.perf_counter()
        for _ in range(calls):
            provider.function(inputs.work, inputs)
        synchronize(inputs.cell.device)
        return (time.perf_counter() - start) / calls


def accuracy(settings: Settings) -> Iterator[Row]:
    """Largest errors against float64 on four classes of inputs; nobody is refused here."""
    rows, vocab = settings.size(64, 32_000)
    generator = torch.Generator().manual_seed(1)
    random = torch.randn(rows, vocab, generator=generator) * 2
    peaked = random.clone()
    peaked[:, vocab // 2] += 30
    holes = random.masked_fill(torch.rand(rows, vocab, generator=generator) < 0.25, -torch.inf)
    classes = {"random": random, "peaked": peaked, "offset 1e4": random + 1e4, "-inf": holes}
    for dtype in DTYPES:
        for name, values in classes.items():
            for entropy in (True, False):
                inputs = Inputs(Cell(rows, vocab, dtype, settings.device, entropy=entropy), values=values)
                # A target of probability 0 has log_prob -inf: no error to speak of.
                finite = torch.isfinite(inputs.full.cpu())
                inputs.target.copy_(
                    torch.where(
                        finite.gather(1, inputs.target.cpu()[:, None])[:, 0],
                        inputs.target.cpu(),
                        finite.int().argmax(1),
                    )
                )
                truth = gate.truth_of(inputs, rows)
                for provider in settings.providers:
                    if provider.can(inputs.cell) and (entropy or not provider.entropy):
                        yield {**inputs.cell.row(), "class": name, **_errors(provider, inputs, truth)}


def _errors(provider: Provider, inputs: Inputs, truth: gate.Truth) -> Row:
    row: Row = {"provider": provider.name, "ok": True, "remark": ""}
    try:
        return row | vars(gate.errors_of(provider, inputs, truth))
    except Exception as error:
        return row | {"ok": False, "remark": f"failed: {type(error).__name__}"}


SECTIONS = {
    "headline": headline,
    "options": options,
    "threads": threads,
    "linearity": linearity,
    "dispatch": dispatch,
    "accuracy": accuracy,
    "sweep": sweep,
}
