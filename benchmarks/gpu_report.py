"""Table, promises and plot of `python -m benchmarks.gpu`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from benchmarks.bounds import INPLACE, MAIN, OURS, Bound
from benchmarks.gate import OVERWRITES
from benchmarks.gpu_cells import DTYPES, MAIN_ROWS, MAIN_VOCAB
from benchmarks.report import number, table

Row = dict[str, Any]
# Percent of the copy's bandwidth, at the main shape.
FORWARD, BACKWARD = 85.0, 82.0
TOY = "TOY RUN in Triton's interpreter: the milliseconds, rates and promises below mean nothing."
HEADER = ["forward ms", "GB/s", "% of copy", "backward ms", "GB/s", "% of copy", "memory forward", "held", "backward"]
KEYS = ("forward_ms", "forward_gbs", "forward_percent", "backward_ms", "backward_gbs", "backward_percent")


def cell_line(row: Row) -> str:
    """A row as one line of progress."""
    text = f"{row['rows']} x {row['vocab']} {row['dtype']} {row['what']}: {row['provider']}: "
    if not row["ok"]:
        return text + str(row["remark"])
    steps = (f"{step} {row[f'{step}_ms']:.4g} ms {row[f'{step}_percent']:.3g} %" for step in ("forward", "backward"))
    return text + ", ".join(steps) + (f" ({row['remark']})" if row["remark"] else "")


def markdown(results: Row) -> str:
    """Facts, then one table of all cells, the fastest of a cell first, then what was tuned."""
    facts = [f"{key} {value}" for key, value in results["machine"].items() if value]
    lines = [TOY] if results["toy"] else []
    lines += [", ".join(facts), "Providers: " + ", ".join(f"{k} {v}" for k, v in results["packages"].items())]
    lines += [f"Absent: {name} ({reason})" for name, reason in results["absent"].items()]
    lines += [f"Not reached in time: {name}" for name in results["not reached"]]
    body = []
    for name, group in _cells(results["rows"]).items():
        copy = next((row["copy_gbs"] for row in group if row["ok"]), math.nan)
        for row in sorted(group, key=lambda row: float(row.get("total_ms", math.inf))):
            memory = [number(row.get(key)) for key in ("forward_peak", "held", "backward_peak")]
            values = [number(row.get(key)) for key in KEYS]
            body.append([f"{name}; copy {number(copy)} GB/s", row["provider"], *values, *memory, str(row["remark"])])
    lines += ["", table(["cell", "provider", *HEADER, "remark"], body)]
    if results["tune"]:
        keys = ("rows", "vocab", "dtype", "step", "loads", "columns", "threads", "ms", "present")
        rows = [[number(row[key], 4) if key == "ms" else str(row[key]) for key in keys] for row in results["tune"]]
        lines += ["", table(list(keys), rows)]
    return "\n".join(lines)


def _cells(rows: list[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(f"{row['what']}, {row['dtype']}, {row['rows']} x {row['vocab']:,}", []).append(row)
    return found


def bounds_of(rows: list[Row]) -> list[Bound]:
    """The promises: shares of the copy's bandwidth at the main shape, and every peer's time in every cell."""
    found = []
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        wanted = {"rows": MAIN_ROWS, "vocab": MAIN_VOCAB, "dtype": name, "what": MAIN, "provider": OURS, "ok": True}
        row = next((row for row in rows if all(row[key] == value for key, value in wanted.items())), {})
        for step, least in (("forward", FORWARD), ("backward", BACKWARD)):
            value = row.get(f"{step}_percent", math.nan)
            found.append(Bound(f"{name} {step}, percent of copy", value, least, at_least=True))
    for name, group in _cells([row for row in rows if row["ok"]]).items():
        found += _against_peers(name, group)
    return found


def _against_peers(name: str, group: list[Row]) -> list[Bound]:
    """Time over the fastest peer's, step by step; one that overwrites the logits competes with our gradient in place.

    Such a peer may make the gradient in forward, so only its total is compared.
    """
    ours = {row["provider"]: row for row in group}
    peers = [row for row in group if not row["provider"].startswith(OURS)]
    tame = [row for row in peers if OVERWRITES not in row["remark"]]
    found = []
    for mine, others, steps in ((OURS, tame, ("forward", "backward", "total")), (INPLACE, peers, ("total",))):
        for step in steps if mine in ours and others else ():
            best = min(others, key=lambda row: float(row[f"{step}_ms"]))
            ratio = ours[mine][f"{step}_ms"] / best[f"{step}_ms"]
            found.append(Bound(f"{name} {step}: {mine} / fastest peer", ratio, 1.0, note=best["provider"]))
    return found


def draw(results: Row, path: Path) -> list[Path]:
    """Percent of the copy's bandwidth, a bar a provider and step, a panel a cell; nothing without matplotlib."""
    groups = _cells([row for row in results["rows"] if row["ok"]])
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return []
    if not groups:
        return []
    figure, axes = plt.subplots(-(-len(groups) // 2), 2, figsize=(12, 2.6 * len(groups)), layout="constrained")
    for axis, (name, group) in zip(axes.flat, groups.items(), strict=False):
        for offset, (step, colour) in enumerate((("forward", "#0072B2"), ("backward", "#E69F00"))):
            places = [place + 0.4 * offset for place in range(len(group))]
            axis.barh(places, [row[f"{step}_percent"] for row in group], height=0.38, color=colour, label=step)
        axis.axvline(100, color="#999999", linewidth=1)
        axis.set(title=name, yticks=[place + 0.2 for place in range(len(group))], xlabel="% of a copy's bandwidth")
        axis.set_yticklabels([row["provider"] for row in group])
        axis.invert_yaxis()
    axes.flat[0].legend(frameon=False)
    if results["toy"]:
        figure.suptitle(TOY)
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return [path]
