"""``python -m benchmarks``: measure, check, save.

    python -m benchmarks                  everything; half an hour or more on two cores
    python -m benchmarks --quick          512 x 151,936 against the promises; exits 1 where one is missed
    python -m benchmarks --sections sweep,memory
    python -m benchmarks --report         markdown tables of the saved results, measures nothing
    python -m benchmarks --device cuda    the same on a GPU

Results go to benchmarks/results/<device>.json (<device>-quick.json) after each section, so that stopping loses nothing,
and to PNG plots beside it. Sections that are not measured again keep their saved results.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import bounds, report
from benchmarks.memory import memory
from benchmarks.providers import load, start_group
from benchmarks.sections import SECTIONS, Row, Settings, quick
from benchmarks.tensor_parallel import tensor_parallel
from ppo_ops.kernels import native

RESULTS = Path(__file__).with_name("results")
ALL: dict[str, Callable[[Settings], Iterator[Row]]] = {**SECTIONS, "memory": memory, "parallel": tensor_parallel}
QUICK: dict[str, Callable[[Settings], Iterator[Row]]] = {
    "quick": quick,
    "threads": lambda settings: SECTIONS["threads"](settings, (bounds.OURS, bounds.INPLACE)),
    "linearity": SECTIONS["linearity"],
    "dispatch": SECTIONS["dispatch"],
    "accuracy": SECTIONS["accuracy"],
    "memory": lambda settings: memory(settings, (bounds.OURS, bounds.INPLACE, bounds.PLAIN)),
}


def machine(device: str) -> dict[str, Any]:
    """What the numbers were measured on."""
    facts = {
        "date": datetime.date.today().isoformat(),
        "device": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instruction set": native.instruction_set(),
    }
    if device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name()
    else:
        with open("/proc/cpuinfo") as lines:
            facts["cpu"] = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return facts


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only what the promises speak of, about three minutes")
    parser.add_argument("--sections", help=f"comma-separated, of: {', '.join(ALL)}")
    parser.add_argument("--report", action="store_true", help="print tables of the saved results and stop")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--rounds", type=int, help="interleaved rounds of each cell (15; 9 with --quick)")
    parser.add_argument("--packages", help="comma-separated, to load only these providers")
    parser.add_argument("--out", type=Path, help="JSON file (benchmarks/results/<device>.json)")
    parser.add_argument("--toy", action="store_true", help="tiny sizes: shows that it runs, measures nothing")
    return parser.parse_args(arguments)


def say(text: str) -> None:
    """Progress, on stderr, so that stdout holds the tables only."""
    print(text, file=sys.stderr, flush=True)


def save(path: Path, results: dict[str, Any]) -> None:
    """Write the file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=1, allow_nan=True) + "\n")
    partial.replace(path)


def run_sections(chosen: dict[str, Callable[[Settings], Iterator[Row]]], settings: Settings, path: Path) -> Any:
    """Measure section by section; save after each."""
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"sections": {}}
    begin = time.monotonic()
    for name, section in chosen.items():
        rows = []
        for row in section(settings):
            rows.append(row)
            say(f"[{time.monotonic() - begin:6.0f} s] {name}: {report.line(row)}")
        results["sections"][name] = rows
        results.setdefault("measured", {})[name] = machine(settings.device)
        save(path, results)
    return results


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; 1 where a promise is missed with --quick."""
    options = parse(arguments)
    path = options.out or RESULTS / f"{options.device.split(':')[0]}{'-quick' if options.quick else ''}.json"
    if options.report:
        print(report.markdown(json.loads(path.read_text())))
        return 0
    if options.threads:
        torch.set_num_threads(options.threads)
    chosen = QUICK if options.quick else ALL
    if options.sections:
        known = {**ALL, **QUICK}
        unknown = [name for name in options.sections.split(",") if name not in known]
        if unknown:
            say(f"unknown sections {', '.join(unknown)}; there are {', '.join(known)}")
            return 2
        chosen = {name: chosen.get(name, known[name]) for name in options.sections.split(",")}
    start_group(device=options.device)
    packages = options.packages.split(",") if options.packages else None
    providers, versions, absent = load(options.device, packages)
    for package, reason in absent.items():
        say(f"absent: {package}: {reason}")
    rounds = options.rounds or (3 if options.toy else 9 if options.quick else 15)
    budget_s = 1.5 if options.quick else 4.0
    settings = Settings(providers, options.device, rounds, budget_s, options.toy)
    results = run_sections(chosen, settings, path)
    results |= {"packages": versions, "absent": absent}
    save(path, results)
    print(report.markdown(results, only=list(chosen)))
    found = bounds.all_bounds({name: results["sections"][name] for name in chosen})
    print("\n".join(str(bound) for bound in found))
    print(f"{sum(bound.met for bound in found)} of {len(found)} promises met")
    if not options.quick:
        _plot(results, path)
    return 1 if options.quick and not all(bound.met for bound in found) else 0


def _plot(results: dict[str, Any], path: Path) -> None:
    try:
        from benchmarks import plots
    except ImportError as error:
        say(f"no plots: {error}")
        return
    for file in plots.draw(results, path.parent, path.stem):
        say(f"wrote {file}")


if __name__ == "__main__":
    sys.exit(main())
