"""Peak memory, each number from a fresh process, as a multiple of the logits' bytes and beyond the logits themselves.

forward    peak during forward
held       what is still allocated after forward, for backward
backward   peak during backward, with what was held
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import gate
from benchmarks.inputs import Cell, Inputs
from benchmarks.providers import load
from benchmarks.sections import DTYPES, HEADLINE, Row, Settings

TIMEOUT_S = 300


class _Meter:
    """Current and peak bytes: of the process on the CPU, of torch's allocator on CUDA."""

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")

    def now(self) -> int:
        return int(torch.cuda.memory_allocated()) if self.cuda else _status("VmRSS")

    def peak(self) -> int:
        return int(torch.cuda.max_memory_allocated()) if self.cuda else _status("VmHWM")

    def reset(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return 1024 * int(line.split()[1])


def worker(provider_name: str, package: str, rows: int, vocab: int, dtype: str, device: str, entropy: bool) -> Row:
    """Measure one provider in this process; it must be a fresh one."""
    providers, _, absent = load(device, [package])
    matching = [provider for provider in providers if provider.name == provider_name]
    if not matching:
        raise RuntimeError(f"{provider_name} is absent: {absent}")
    provider = matching[0]
    cell = Cell(rows, vocab, getattr(torch, dtype), device, entropy=entropy)
    # A tenth of the rows first: loads code, starts threads, compiles. Then the gate on the rows to be measured.
    small = Inputs(Cell(max(2, rows // 10), vocab, cell.dtype, device, entropy=entropy))
    gate.errors_of(provider, small, gate.truth_of(small, 1))
    inputs = Inputs(cell)
    ok, remark = gate.check(provider, inputs, gate.truth_of(inputs, 1))
    row: Row = {**cell.row(), "provider": provider.name, "ok": ok, "remark": remark}
    if not ok:
        return row
    inputs.restore()
    meter, logits_bytes = _Meter(device), inputs.work.nbytes
    base = meter.now()
    with provider.context():
        meter.reset()
        outputs = provider.function(inputs.logits(), inputs)
        row["forward"] = (meter.peak() - base) / logits_bytes
        row["held"] = (meter.now() - base) / logits_bytes
        meter.reset()
        inputs.backward(outputs)
        row["backward"] = (meter.peak() - base) / logits_bytes
    return row


def memory(settings: Settings, only: tuple[str, ...] = ()) -> Iterator[Row]:
    """A fresh process for each provider and dtype."""
    rows, vocab = settings.size(*HEADLINE)
    for dtype in DTYPES:
        for provider in settings.providers:
            cell = Cell(rows, vocab, dtype, settings.device, entropy=provider.entropy)
            if not provider.can(cell) or (only and provider.name not in only):
                continue
            arguments = [provider.name, provider.package, rows, vocab, cell.dtype_name, cell.device, provider.entropy]
            yield _fresh_process(arguments, {**cell.row(), "provider": provider.name, "ok": False})


def _fresh_process(arguments: list[object], failed: Row) -> Row:
    command = [sys.executable, "-m", "benchmarks.memory", json.dumps(arguments)]
    environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "0"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired:
        return {**failed, "remark": f"failed: no answer in {TIMEOUT_S} s"}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {**failed, "remark": f"failed: exit {done.returncode}: {last[:120]}"}
    row: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return row


if __name__ == "__main__":
    print(json.dumps(worker(*json.loads(sys.argv[1]))))
