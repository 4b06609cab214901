"""``python -m benchmarks.gpu``: one script for a GPU that is lent for minutes. Correctness first, then speed.

    python -m benchmarks.gpu --minutes 4          the cells in order of importance, until the time is up
    python -m benchmarks.gpu --minutes 4 --tune   which of a few tile sizes is the fastest, too
    python -m benchmarks.gpu --toy                tiny sizes in Triton's interpreter, no GPU: shows that it runs

Where this library gets a small cell wrong it prints what is wrong and no figure, and exits 2. JSON goes to
benchmarks/results/gpu.json after each cell, a plot beside it at the end. Exits 1 where a promise is missed.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from benchmarks import gpu_peers, providers
from benchmarks.__main__ import RESULTS, machine, save, say
from benchmarks.gpu_cells import Plan, main_cells, measure, other_cells, refused
from benchmarks.gpu_report import TOY, bounds_of, cell_line, draw, markdown
from benchmarks.gpu_tune import tune
from benchmarks.inputs import Cell
from benchmarks.providers import Provider

# Printing, plotting and what a cell may take longer than it should.
RESERVE_S = 10.0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=4.0, help="time limit (4)")
    parser.add_argument("--rounds", type=int, help="interleaved rounds of each cell (25)")
    parser.add_argument("--packages", help=f"comma-separated, of: {', '.join(gpu_peers.PACKAGES)}")
    parser.add_argument("--tune", action="store_true", help="time a few tile sizes after the cells")
    parser.add_argument(
        "--toy", action="store_true", help="tiny sizes in Triton's interpreter; the figures mean nothing"
    )
    parser.add_argument("--out", type=Path, help="JSON file (benchmarks/results/gpu.json)")
    return parser.parse_args(arguments)


@contextmanager
def interpreted() -> Iterator[ModuleType]:
    """The Triton kernels in the interpreter, in place of the CPU's, with programs of one warp, which is quicker."""
    from ppo_ops.kernels import cpu
    from tests.kernels.triton_tools import interpreted_kernels

    kernels = interpreted_kernels()
    with mock.patch.object(kernels, "LANES", 32), mock.patch.object(cpu, "_kernels", return_value=kernels):
        yield kernels


@contextmanager
def compiled() -> Iterator[ModuleType]:
    """The Triton kernels."""
    from ppo_ops.kernels import triton

    yield triton


def load(device: str, only: list[str], toy: bool) -> Any:
    """Providers, versions and reasons of absence; a toy run compiles with torch's quickest backend."""
    compile_ = mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="eager"))
    with mock.patch.dict(providers.LOADERS, gpu_peers.LOADERS), compile_ if toy else nullcontext():
        return providers.load(device, only)


def run(options: argparse.Namespace, plan: Plan, kernels: ModuleType, path: Path) -> int:
    """Check, measure, save and print."""
    only = options.packages.split(",") if options.packages else gpu_peers.PACKAGES
    chosen, versions, absent = load(plan.device, only, plan.toy)
    for package, reason in absent.items():
        say(f"absent: {package}: {reason}")
    wrong = refused(plan, chosen)
    if wrong:
        print("wrong, so nothing is timed:\n" + "\n".join(wrong))
        return 2
    say(f"[{plan.left():4.0f} s left] every option is right")
    facts = {**machine(plan.device), "triton": importlib.metadata.version("triton")}
    results: dict[str, Any] = {"toy": plan.toy, "machine": facts, "packages": versions, "absent": absent}
    results |= {"rows": [], "tune": [], "not reached": []}
    run_cells(plan, main_cells(plan), chosen, results, path)
    for row in tune(plan, kernels) if options.tune else ():
        results["tune"].append(row)
        save(path, results)
    run_cells(plan, other_cells(plan), chosen, results, path)
    print(markdown(results))
    found = bounds_of(results["rows"])
    print("\n".join(str(bound) for bound in found))
    print(TOY if plan.toy else f"{sum(bound.met for bound in found)} of {len(found)} promises met; {path}")
    for file in draw(results, path.with_suffix(".png")):
        say(f"wrote {file}")
    return 0 if plan.toy or all(bound.met for bound in found) else 1


def run_cells(plan: Plan, cells: list[Cell], chosen: list[Provider], results: dict[str, Any], path: Path) -> None:
    """Measure the cells that the time limit allows; save after each."""
    for cell in cells:
        if plan.left() <= 0:
            results["not reached"].append(f"{cell.what}, {cell.dtype_name}, {cell.rows} x {cell.vocab}")
        else:
            for row in measure(plan, cell, [provider for provider in chosen if provider.can(cell)]):
                results["rows"].append(row)
                say(f"[{plan.left():4.0f} s left] {cell_line(row)}")
        save(path, results)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    begin = time.monotonic()
    options = parse(arguments)
    if not options.toy and not torch.cuda.is_available():
        say("there is no GPU; --toy shows that the script runs")
        return 2
    device = "cpu" if options.toy else "cuda"
    rounds = options.rounds or (3 if options.toy else 25)
    deadline = begin + 60 * options.minutes - (0.0 if options.toy else RESERVE_S)
    plan = Plan(device, options.toy, deadline, rounds, budget_s=0.5)
    with interpreted() if options.toy else compiled() as kernels:
        return run(options, plan, kernels, options.out or RESULTS / ("gpu-toy.json" if options.toy else "gpu.json"))


if __name__ == "__main__":
    sys.exit(main())
