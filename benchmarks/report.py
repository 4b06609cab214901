"""Markdown tables from the saved results."""

from __future__ import annotations

import math
from typing import Any

from benchmarks import bounds

Row = dict[str, Any]


def line(row: Row) -> str:
    """A row of results as one line of progress."""
    size = f"{row.get('rows')} x {row.get('vocab')} {row.get('dtype')} {row.get('what', '')}"
    size += "" if row.get("grad", True) else ", no grad"
    size += f", {row['class']}" if "class" in row else f", {row['threads']} threads" if "threads" in row else ""
    text = f"{size}: {row['provider']}:"
    if not row["ok"]:
        return f"{text} {row['remark']}"
    for key, unit in (("forward_ms", "ms"), ("backward_ms", "ms"), ("us", "us")):
        if key in row:
            text += f" {key.split('_')[0]} {row[key]:.4g} {unit}"
    for key in ("forward_ratio", "backward_ratio", "forward", "held", "backward", "log_prob", "entropy", "gradient"):
        if row.get(key) is not None:
            text += f" {key} {row[key]:.3g}"
    return text + (f" ({row['remark']})" if row.get("remark") else "")


def markdown(results: Row, only: list[str] | None = None) -> str:
    """All tables, or those of some sections."""
    parts = [_facts(results)]
    for name, rows in results["sections"].items():
        if rows and (only is None or name in only):
            parts.append(f"### {TITLES.get(name, name)}\n\n" + TABLES.get(name, _timed)(rows))
    return "\n\n".join(part for part in parts if part) + "\n"


def _facts(results: Row) -> str:
    measured = list(results.get("measured", {}).values())
    lines = []
    if measured:
        lines.append(", ".join(f"{key} {value}" for key, value in measured[-1].items() if value))
    if results.get("packages"):
        lines.append("Providers: " + ", ".join(f"{name} {version}" for name, version in results["packages"].items()))
    for name, reason in results.get("absent", {}).items():
        lines.append(f"Absent: {name} ({reason})")
    return "\n".join(lines)


def table(header: list[str], body: list[list[str]]) -> str:
    """A markdown table."""
    rows = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def number(value: float | None, digits: int = 3) -> str:
    """A number with so many significant digits, or a dash."""
    if value is None:
        return "-"
    if math.isnan(value):
        return "NaN"
    return f"{value:.{digits}g}" if value < 1000 else f"{value:.0f}"


def _groups(rows: list[Row], keys: tuple[str, ...]) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(key) for key in keys), []).append(row)
    return found


def _remark(row: Row) -> str:
    return str(row.get("remark") or "")


def _slower(row: Row, rows: list[Row]) -> str:
    """Marks a row of this library where another provider is faster, with the steps in which it is."""
    together = bounds.cells(rows).get(bounds.cell_of(row), []) if row["ok"] else []
    steps: dict[str, list[str]] = {}
    for step in bounds.STEPS if row.get("grad") else bounds.STEPS[:1]:
        for mine, best in bounds.rivals(together, step):
            if mine is row and best[f"{step}_ms"] < row[f"{step}_ms"]:
                steps.setdefault(best["provider"], []).append(step)
    return "".join(f" [{', '.join(lost)}: {provider} is faster]" for provider, lost in steps.items())


def _timed(rows: list[Row]) -> str:
    """Milliseconds and ratios to the limit, a table a cell; the fastest total first."""
    parts = []
    for key, group in _groups(rows, ("dtype", "rows", "vocab", "what", "grad")).items():
        dtype, n, vocab, what, grad = key
        group = sorted(group, key=lambda row: row.get("total_ms", math.inf))
        steps = ["forward", "backward", "total"] if grad else ["forward"]
        limit = next((row for row in group if row["ok"]), None)
        several = len({row.get("threads") for row in group if row["ok"]}) > 1
        header = ["provider", *(["threads"] if several else [])]
        header += [text for step in steps for text in (f"{step} ms", "/ limit")] + ["remark"]
        body = []
        for row in group:
            cells = [row["provider"], *([str(row.get("threads", "-"))] if several else [])]
            for step in steps:
                cells += [number(row.get(f"{step}_ms")), number(row.get(f"{step}_ratio"))]
            body.append([*cells, (_remark(row) + _slower(row, group)).strip()])
        title = f"{what}, {dtype}, {n} x {vocab:,}" + (", forward and backward" if grad else ", forward without grad")
        if limit:
            title += f"; limit {number(limit['forward_limit_ms'])} ms"
            title += f" + {number(limit['backward_limit_ms'])} ms" if grad and "backward_limit_ms" in limit else ""
        parts.append(f"**{title}**\n\n{table(header, body)}")
    return "\n\n".join(parts)


def _sweep(rows: list[Row]) -> str:
    """Total milliseconds over rows, a table for each dtype, vocabulary and computation."""
    parts = []
    for key, group in _groups(rows, ("dtype", "vocab", "what", "grad")).items():
        dtype, vocab, what, grad = key
        sizes = sorted({row["rows"] for row in group})
        body = []
        for (provider,), own in _groups(group, ("provider",)).items():
            by_size = {row["rows"]: row for row in own}
            cells = [
                f"{number(row['total_ms'])} ({number(row['total_ratio'])}){_slower(row, group)}"
                if (row := by_size.get(size, {})).get("ok")
                else "-"
                for size in sizes
            ]
            remarks = {_remark(row) for row in own} - {""}
            body.append([provider, *cells, "; ".join(sorted(remarks))])
        title = f"{what}, {dtype}, V = {vocab:,}, " + ("forward and backward" if grad else "forward without grad")
        header = ["ms (/ limit)", *(f"N = {size:,}" for size in sizes), "remark"]
        parts.append(f"**{title}**\n\n{table(header, body)}")
    return "\n\n".join(parts)


def _columns(rows: list[Row], keys: tuple[str, ...], values: dict[str, str], digits: int = 3) -> str:
    """One table: some keys, then some numbers."""
    body = [
        [str(row.get(key, "")) for key in keys] + [number(row.get(value), digits) for value in values] + [_remark(row)]
        for row in rows
    ]
    return table([*keys, *values.values(), "remark"], body)


def _memory(rows: list[Row]) -> str:
    return _columns(
        rows,
        ("provider", "dtype", "what"),
        {"forward": "forward peak", "held": "held for backward", "backward": "backward peak"},
    )


def _parallel(rows: list[Row]) -> str:
    marked = [{**row, "remark": (_remark(row) + _slower(row, rows)).strip()} for row in rows]
    values = {
        "forward_ms": "forward ms",
        "forward_ratio": "/ limit",
        "backward_ms": "backward ms",
        "backward_ratio": "/ limit",
        "collectives": "collectives forward",
        "backward_collectives": "backward",
    }
    return _columns(marked, ("world", "provider", "dtype", "what"), values)


def _dispatch(rows: list[Row]) -> str:
    return _columns(rows, ("provider", "what"), {"us": "microseconds a call"})


def _linearity(rows: list[Row]) -> str:
    values = {"forward_ms": "forward ms", "forward_ps": "ps an element", "forward_limit_ps": "read, ps"}
    values |= {"backward_ms": "in-place backward ms", "backward_ps": "ps an element", "backward_limit_ps": "copy_, ps"}
    return _columns(rows, ("dtype", "over", "rows", "vocab"), values)


def _accuracy(rows: list[Row]) -> str:
    values = {key: f"error of {key}" for key in ("log_prob", "entropy", "gradient")}
    return _columns(rows, ("dtype", "class", "provider"), values, 2)


TITLES = {
    "quick": "512 x 151,936",
    "headline": "512 x 151,936, every option",
    "options": "Other vocabularies, every option",
    "threads": "Threads",
    "linearity": "Time per element",
    "dispatch": "A call at N = 1, V = 1000, without grad",
    "accuracy": "Largest errors against float64",
    "sweep": "Over rows and vocabularies",
    "memory": "Memory beyond the logits, over the logits' bytes",
    "parallel": "Vocabulary split over processes",
}
TABLES = {
    "sweep": _sweep,
    "memory": _memory,
    "parallel": _parallel,
    "dispatch": _dispatch,
    "linearity": _linearity,
    "accuracy": _accuracy,
}
