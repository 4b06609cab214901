"""The plot of `benchmarks.linear`: time, peak memory and error of every provider."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Row = dict[str, Any]
# Okabe-Ito colours, legible for the colour-blind; this library in black.
COLOURS = ["black", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00"]


def draw(results: Row, path: Path) -> None:
    """Write `path`, where matplotlib is installed and something to be drawn has been measured."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return
    rows = [row for section in ("time", "memory", "errors") for row in results.get(section, [])]
    names = list(dict.fromkeys(row["provider"] for row in rows))
    if not names:
        return
    style = dict(zip(names, COLOURS, strict=False))
    figure, (time, memory, error) = plt.subplots(1, 3, figsize=(14, 4.4), layout="constrained")
    for name in names:
        options = {"color": style[name], "label": name, "marker": "o", "markersize": 3}
        points = [
            (row["rows"], 1e6 * (row["forward_s"] + row["backward_s"]) / row["rows"])
            for row in results.get("time", [])
            if row["provider"] == name and row["dtype"] == "float32"
        ]
        time.plot(*zip(*points, strict=True), **options) if points else None
        points = [
            (row["rows"], row["backward"] / 2**20)
            for row in results.get("memory", [])
            if row["provider"] == name and "backward" in row
        ]
        memory.plot(*zip(*points, strict=True), **options) if points else None
    time.set(title="forward and backward, float32", ylabel="microseconds a row", xscale="log", ylim=0)
    memory.set(title="peak beyond inputs, with gradients, float32", ylabel="MiB", xscale="log", yscale="log")
    sizes = results.get("sizes", {})
    for axis in (time, memory):
        axis.set_xlabel(f"rows N (H = {sizes.get('hidden')}, V = {sizes.get('vocab'):,})")
        axis.grid(True, which="both", alpha=0.2)
    dtypes = ("float32", "bfloat16")
    for place, name in enumerate(names):
        found = {row["dtype"]: row["log_prob"] for row in results.get("errors", []) if row["provider"] == name}
        positions = [index + 0.12 * (place - len(names) / 2) for index in range(2) if dtypes[index] in found]
        error.bar(positions, [found[dtype] for dtype in dtypes if dtype in found], width=0.11, color=style[name])
    error.set(title="largest error of log_prob", ylabel="nats", yscale="log", xticks=[0, 1], xticklabels=list(dtypes))
    error.grid(True, axis="y", alpha=0.2)
    figure.legend(*time.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
