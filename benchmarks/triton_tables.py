"""Markdown tables of what the Triton kernels compile to; see `triton_compile`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from benchmarks.triton_compile import (
    ROWS,
    VOCABULARY,
    block_shape,
    compiled,
    in_flight,
    other_architectures,
    specs,
    traffic,
    vector_loads,
)

README = Path(__file__).parents[1] / "README.md"
MARKS = ("<!-- compiled kernels: python -m benchmarks.triton_compile --readme -->\n", "\n<!-- end -->")


def compile_report() -> str:
    """A markdown table of what all kernels compile to."""
    lines = [
        f"{ROWS} x {VOCABULARY:,} logits; Triton {_version()}, no device needed.",
        "",
        *_header("kernel", "architecture", "registers", "spilled", "shared, bytes", "in flight an SM, KiB", "traffic"),
    ]
    for spec, capability in [*((s, 90) for s in specs()), *other_architectures()]:
        result = compiled(spec, capability)
        flight, moved = "", ""
        if spec.kernel != "merge":
            flight, moved = f"{in_flight(spec, result.registers) / 1024:.0f}", f"{traffic(spec):.4f}"
        cells = (spec, f"sm_{capability}", result.registers, result.stack + result.local, result.shared, flight, moved)
        lines.append(_line(*cells))
    return "\n".join(lines)


def readme_table() -> str:
    """The aligned kernels, a line each; registers, and whatever else is not the same, for the three architectures."""
    names = ("kernel", "registers: sm_80 / sm_90 / sm_100", "spilled", "shared", "`ex2` / elements", "128-bit loads")
    lines = [*_header(*names, "in flight an SM, KiB", "traffic")]
    others = set(other_architectures())
    for spec in specs():
        if spec.kernel == "merge" or spec.layout != "aligned" or not spec.temperature or spec.upstream != "both":
            continue
        results = [compiled(spec, c) if c == 90 or (spec, c) in others else None for c in (80, 90, 100)]
        made = [result for result in results if result is not None]
        loads, vector, _ = block_shape(spec)
        bodies = 2 if spec.kernel == "forward" else 1
        exponentials = _one_of(str(result.count(r"\bex2\.")) for result in made)
        cells = (
            " / ".join("-" if result is None else str(result.registers) for result in results),
            _one_of(str(result.stack + result.local) for result in made),
            _one_of(str(result.shared) for result in made),
            "-" if spec.dtype == torch.float64 else f"{exponentials} / {bodies * loads * vector}",
            _one_of(str(vector_loads(result, spec.dtype)) for result in made),
            f"{in_flight(spec, compiled(spec, 90).registers) / 1024:.0f}",
            f"{traffic(spec):.4f}",
        )
        lines.append(_line(spec, *cells))
    return "\n".join(lines)


def _one_of(values: Iterable[str]) -> str:
    return " / ".join(dict.fromkeys(values))


def _header(*names: str) -> tuple[str, str]:
    return _line(*names), "|" + "---|" * len(names)


def _line(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def write_readme() -> None:
    """Put the table between the marks."""
    text = README.read_text()
    begin, end = (text.index(mark) for mark in MARKS)
    README.write_text(text[: begin + len(MARKS[0])] + readme_table() + text[end:])


def _version() -> str:
    import triton

    return str(triton.__version__)
