"""PNG plots of the saved results: speed against rows, and memory bars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Row = dict[str, Any]
DTYPES = ("float32", "bfloat16")
MAIN = "log-prob + entropy"
# Okabe-Ito colours, legible for the colour-blind; this library in black.
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#8B6914", "#5D3A9B"]


def draw(results: Row, folder: Path, stem: str) -> list[Path]:
    """Draw what was measured; returns the files written."""
    sections, written = results["sections"], []
    if any(row["ok"] for row in sections.get("sweep", [])):
        written.append(_speed(sections["sweep"], folder / f"{stem}_speed.png"))
    if any(row["ok"] for row in sections.get("memory", [])):
        written.append(_memory(sections["memory"], folder / f"{stem}_memory.png"))
    return written


def _styles(names: list[str]) -> dict[str, dict[str, Any]]:
    """Colour and line of each provider; ours stand out."""
    others = iter(COLOURS * 2)
    styles: dict[str, dict[str, Any]] = {}
    for name in names:
        ours = name.startswith("ppo_ops")
        styles[name] = {"color": "black" if ours else next(others), "linewidth": 2.2 if ours else 1.3}
        if ours:
            styles[name]["linestyle"] = {"ppo_ops": "-", "ppo_ops, in place": "--"}.get(name, ":")
    return styles


def _speed(rows: list[Row], path: Path) -> Path:
    """Elements of the logits a second against N at the largest vocabulary; higher is better."""
    vocab = max(row["vocab"] for row in rows)
    panels = [
        (False, MAIN, "forward, no grad"),
        (True, MAIN, "forward and backward"),
        (True, "log-prob", "log-prob, forward and backward"),
    ]
    styles = _styles(list(dict.fromkeys(row["provider"] for row in rows)))
    figure, axes = plt.subplots(2, 3, figsize=(13, 7), sharex=True, layout="constrained")
    for line, dtype in zip(axes, DTYPES, strict=True):
        for axis, (grad, what, title) in zip(line, panels, strict=True):
            chosen = [r for r in rows if r["ok"] and r["dtype"] == dtype and r["vocab"] == vocab]
            chosen = [r for r in chosen if r["grad"] == grad and r["what"] == what]
            for name, style in styles.items():
                points = sorted(
                    (r["rows"], r["rows"] * vocab / r["total_ms"] / 1e6) for r in chosen if r["provider"] == name
                )
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name, **style)
            limit = {
                r["rows"]: r["rows"] * vocab * r["total_ratio"] / r["total_ms"] / 1e6
                for r in chosen
                if "in place" not in r["provider"]
            }
            if limit:
                sizes = sorted(limit)
                axis.plot(
                    sizes,
                    [limit[n] for n in sizes],
                    color="#bbbbbb",
                    linewidth=5,
                    zorder=0,
                    label="limit of the machine",
                )
            axis.set(title=f"{title}, {dtype}", xscale="log", yscale="log")
            axis.grid(True, which="both", alpha=0.2)
    for axis in axes[:, 0]:
        axis.set_ylabel("billion logits a second")
    for axis in axes[-1]:
        axis.set_xlabel(f"rows N (V = {vocab:,})")
    handles = {
        label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _memory(rows: list[Row], path: Path) -> Path:
    """Peak memory of forward and backward beyond the logits, a bar each; lower is better."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 5), sharey=True, layout="constrained")
    names = list(dict.fromkeys(row["provider"] for row in rows if row["ok"]))
    for axis, dtype in zip(axes, DTYPES, strict=True):
        by_name = {row["provider"]: row for row in rows if row["ok"] and row["dtype"] == dtype}
        for place, name in enumerate(names):
            for offset, (key, colour) in enumerate(
                (("forward", "#56B4E9"), ("held", "#E69F00"), ("backward", "#0072B2"))
            ):
                value = by_name.get(name, {}).get(key)
                if value is not None:
                    bar = axis.barh(place + 0.27 * (offset - 1), value, height=0.25, color=colour)
                    axis.bar_label(bar, fmt="%.2f", fontsize=7, padding=2)
        axis.set(title=dtype, xlabel="memory beyond the logits / logits", yticks=range(len(names)), yticklabels=names)
        axis.margins(x=0.1)
        axis.grid(True, axis="x", alpha=0.2)
    axes[0].invert_yaxis()
    labels = {"#56B4E9": "forward peak", "#E69F00": "held for backward", "#0072B2": "backward peak"}
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in labels]
    figure.legend(handles, labels.values(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
