"""The vocabulary split over processes: times, and collectives counted by the profiler.

Each rank is a process with its share of the cores. A step's time is that of the slowest rank, from a barrier on; the
median is over rounds in which all providers take turns. World size 1 runs the same code.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import gate
from benchmarks.inputs import Cell, Inputs
from benchmarks.providers import Provider, load, start_group
from benchmarks.sections import DTYPES, HEADLINE, Row, Settings
from benchmarks.timing import COPY, FRESH, READ, Run, limit_runs, synchronize, timed_columns

WORLDS = (1, 2)
TIMEOUT_S = 900


def tensor_parallel(settings: Settings) -> Iterator[Row]:
    """Every world size and dtype, one group of processes a world size."""
    rows, vocab = settings.size(*HEADLINE)
    for world in WORLDS:
        if settings.device.startswith("cuda") and torch.cuda.device_count() < world:
            continue
        with tempfile.TemporaryDirectory() as folder:
            packages = sorted({provider.package for provider in settings.providers})
            arguments = (world, folder, rows, vocab, settings.device, packages, settings.rounds, settings.threads)
            context = mp.start_processes(_worker, arguments, world, join=False, start_method="spawn")
            try:
                end = time.monotonic() + TIMEOUT_S
                while not context.join(timeout=1.0):
                    if time.monotonic() > end:
                        raise TimeoutError(f"{world} ranks did not finish in {TIMEOUT_S} s")
            except Exception as error:
                yield {"world": world, "ok": False, "provider": "", "remark": f"failed: {str(error)[-200:]}"}
            finally:
                for process in context.processes:
                    process.kill()
            for line in _lines(Path(folder) / "rows"):
                yield json.loads(line)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _worker(
    rank: int,
    world: int,
    folder: str,
    rows: int,
    vocab: int,
    device: str,
    packages: list[str],
    rounds: int,
    threads: int,
) -> None:
    torch.set_num_threads(max(1, threads // world))
    if device.startswith("cuda"):
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    start_group(rank, world, dist.FileStore(f"{folder}/store", world), device)
    providers, _, _ = load(device, packages)
    for dtype in DTYPES:
        for entropy in (True, False):
            cell = Cell(rows, vocab - vocab % world, dtype, device, entropy=entropy)
            found = _cell(cell, [p for p in providers if p.can(cell, world=2)], rank, world, rounds)
            if rank == 0:
                with open(f"{folder}/rows", "a") as out:
                    out.writelines(json.dumps(row) + "\n" for row in found)
    dist.barrier()
    dist.destroy_process_group()


def _cell(cell: Cell, providers: list[Provider], rank: int, world: int, rounds: int) -> list[Row]:
    inputs = Inputs(cell, rank, world)
    truth = gate.truth_of(inputs)
    rows: list[Row] = []
    passed: list[Provider] = []
    for provider in providers:
        ok, remark = _agree(*gate.check(provider, inputs, truth), cell.device)
        rows.append({**cell.row(), "world": world, "provider": provider.name, "ok": ok, "remark": remark})
        if ok:
            passed.append(provider)
            rows[-1]["collectives"], rows[-1]["backward_collectives"] = _collectives(provider, inputs)
    slices = [(limit.name, partial(_limit_once, limit, inputs)) for limit in limit_runs(inputs)]
    slices += [(provider.name, partial(_once, provider, inputs)) for provider in passed]
    times: dict[str, list[list[float]]] = {name: [] for name, _ in slices}
    for turn in range(rounds):
        offset = turn % len(slices)
        for name, once in slices[offset:] + slices[:offset]:
            times[name].append(_slowest(once(), cell.device))
    medians = {name: [median(step) for step in zip(*found, strict=True)] for name, found in times.items()}
    read = medians[READ][0] * cell.dtype.itemsize / 4
    for row in rows:
        if row["ok"]:
            row |= timed_columns(row["provider"], medians[row["provider"]], read, medians[COPY][0], medians[FRESH][0])
    return rows


def _limit_once(limit: Run, inputs: Inputs) -> list[float]:
    start = _barrier(inputs)
    result = limit.steps[0](None)
    synchronize(inputs.cell.device)
    seconds = time.perf_counter() - start
    del result
    return [seconds]


def _agree(ok: bool, remark: str, device: str) -> tuple[bool, str]:
    """All ranks pass or none."""
    verdicts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(verdicts, (ok, remark))
    refusals = [verdict for verdict in verdicts if not verdict[0]]
    return refusals[0] if refusals else (ok, remark)


def _once(provider: Provider, inputs: Inputs) -> list[float]:
    inputs.restore()
    with provider.context():
        start = _barrier(inputs)
        outputs = provider.function(inputs.logits(), inputs)
        synchronize(inputs.cell.device)
        forward = time.perf_counter() - start
        start = _barrier(inputs)
        inputs.backward(outputs)
        synchronize(inputs.cell.device)
        return [forward, time.perf_counter() - start]


def _barrier(inputs: Inputs) -> float:
    dist.barrier()
    synchronize(inputs.cell.device)
    return time.perf_counter()


def _slowest(times: list[float], device: str) -> list[float]:
    slowest = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return list(slowest.tolist())


def _collectives(provider: Provider, inputs: Inputs) -> tuple[int, int]:
    """Collectives of forward and of backward, counted where the backend runs them."""
    counts = []
    inputs.restore()
    with provider.context():
        with torch.profiler.profile() as forward:
            outputs = provider.function(inputs.logits(), inputs)
            synchronize(inputs.cell.device)
        with torch.profiler.profile() as backward:
            inputs.backward(outputs)
            synchronize(inputs.cell.device)
    for profile in (forward, backward):
        names = [event.name for event in profile.events()]
        counts.append(sum(name.startswith(("gloo:", "nccl:")) for name in names))
    return counts[0], counts[1]
