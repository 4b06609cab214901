"""The numbers that this project promises for 512 x 151,936 on two cores, each pass or fail."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gate import GRADIENT, OUTPUTS, OVERWRITES

Row = dict[str, Any]
Sections = dict[str, list[Row]]

OURS, INPLACE, PLAIN = "ppo_ops", "ppo_ops, in place", "torch eager"
# float32, bfloat16
FORWARD, SPEEDUP, BACKWARD, IN_PLACE = (1.7, 3.0), (15.0, 25.0), (1.15, 1.3), (1.1, 2.5)
KEPT, IGNORED, THREADS, MEMORY, DISPATCH = 1.6, 0.6, 1.7, 0.12, 2.0
# Linear: the dearest element over the cheapest in a series of sizes.
LINEAR = 1.3
# Errors below one unit in the last place of float32 are equal: which is smaller is luck.
ROUNDING = 2.0**-23
DTYPES = ("float32", "bfloat16")
MAIN = "log-prob + entropy"
STEPS = ("forward", "backward", "total")


@dataclass(frozen=True)
class Bound:
    """One promise: `value` must be at most (`at_least`: at least) `limit`. NaN, that is not measured, fails."""

    name: str
    value: float
    limit: float
    at_least: bool = False
    note: str = ""

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        return f"{'pass' if self.met else 'MISS'}  {self.name}: {self.value:.3g} ({sign} {self.limit:g}) {self.note}"


def _value(rows: list[Row], key: str, **wanted: Any) -> float:
    """The number `key` of the first row that matches, NaN where there is none."""
    for row in rows:
        if row.get("ok") and key in row and all(row.get(name) == value for name, value in wanted.items()):
            return float(row[key])
    return math.nan


def headline_bounds(rows: list[Row]) -> list[Bound]:
    """Ratios at 512 x 151,936."""
    found = []
    for index, dtype in enumerate(DTYPES):
        forward = {"dtype": dtype, "grad": False}
        ours = _value(rows, "forward_ms", what=MAIN, provider=OURS, **forward)
        plain = _value(rows, "forward_ms", what=MAIN, provider=PLAIN, **forward)
        kept = _value(rows, "forward_ms", what=f"{MAIN}, kept set", provider=OURS, **forward)
        ignored = _value(rows, "forward_ms", what=f"{MAIN}, half ignored", provider=OURS, **forward)
        read = _value(rows, "forward_ratio", what=MAIN, provider=OURS, **forward)
        backward = {"dtype": dtype, "grad": True, "what": MAIN}
        fresh = _value(rows, "backward_ratio", provider=OURS, **backward)
        inplace = _value(rows, "backward_ratio", provider=INPLACE, **backward)
        found += [
            Bound(f"{dtype} forward / read", read, FORWARD[index]),
            Bound(f"{dtype} forward, times as fast as plain torch", plain / ours, SPEEDUP[index], at_least=True),
            Bound(f"{dtype} backward / fresh copy", fresh, BACKWARD[index]),
            Bound(f"{dtype} in-place backward / copy_", inplace, IN_PLACE[index]),
            Bound(f"{dtype} kept-set forward / forward", kept / ours, KEPT),
            Bound(f"{dtype} half of the rows ignored / full forward", ignored / ours, IGNORED),
        ]
    return found


def thread_bounds(rows: list[Row]) -> list[Bound]:
    """Speed-up of all threads over one. Backward is held to what the machine's own copy gains, where that is less."""
    most = max((row["threads"] for row in rows if row.get("ok")), default=0)
    found = []
    for dtype in DTYPES:
        for name, provider, step, grad in (
            ("forward", OURS, "forward", False),
            ("in-place backward", INPLACE, "backward", True),
            ("backward", OURS, "backward", True),
        ):
            wanted = {"dtype": dtype, "provider": provider, "grad": grad, "what": MAIN}
            gain, limit = (
                _value(rows, key, threads=1, **wanted) / _value(rows, key, threads=most, **wanted)
                for key in (f"{step}_ms", f"{step}_limit_ms")
            )
            least = THREADS if step == "forward" else min(THREADS, limit)
            note = f"the limit itself {limit:.2f}"
            found.append(Bound(f"{dtype} {name}: {most} threads over one", gain, least, at_least=True, note=note))
    return found


def linear_bounds(rows: list[Row]) -> list[Bound]:
    """Time per element over sizes, beside what the machine's own read or copy of the same logits varies by."""
    found = []
    for dtype in DTYPES:
        for over in ("rows", "vocab"):
            series = [row for row in rows if row["dtype"] == dtype and row["over"] == over]
            for step in ("forward", "backward"):
                ours, limit = (_spread([row[f"{step}{part}_ps"] for row in series]) for part in ("", "_limit"))
                name = f"{dtype} {step}, time per element over {over}, largest / smallest"
                found.append(Bound(name, ours, LINEAR, note=f"the limit itself {limit:.2f}"))
    return found


def _spread(values: list[float]) -> float:
    """Largest over smallest, NaN where nothing was measured."""
    return max(values) / min(values) if values else math.nan


def memory_bounds(rows: list[Row]) -> list[Bound]:
    """Extra memory in place, forward and backward together, as a share of the logits."""
    found = []
    for dtype in DTYPES:
        used = [_value(rows, key, dtype=dtype, provider=INPLACE) for key in ("forward", "backward")]
        most = math.nan if any(map(math.isnan, used)) else max(used)
        found.append(Bound(f"{dtype} extra memory in place / logits", most, MEMORY))
    return found


def dispatch_bounds(rows: list[Row]) -> list[Bound]:
    """A call at N = 1, V = 1000 under no_grad beside plain torch's: 60 microseconds where plain torch needs 30."""
    ours, plain = (_value(rows, "us", what=MAIN, provider=name) for name in (OURS, PLAIN))
    return [Bound("dispatch / plain torch", ours / plain, DISPATCH, note=f"{ours:.0f} us, plain torch {plain:.0f} us")]


def accuracy_bounds(rows: list[Row]) -> list[Bound]:
    """Largest errors against those of `log_softmax` in float32; where those are NaN, against the gate's tolerances."""
    found = []
    for dtype, kind in dict.fromkeys((row["dtype"], row["class"]) for row in rows):
        for key in ("log_prob", "entropy", "gradient"):
            wanted = {"dtype": dtype, "class": kind, "what": MAIN}
            ours, theirs = (_value(rows, key, provider=name, **wanted) for name in (OURS, PLAIN))
            tolerance = GRADIENT[getattr(torch, dtype)] if key == "gradient" else OUTPUTS
            limit = tolerance if math.isnan(theirs) else max(theirs, ROUNDING)
            note = f"log_softmax {theirs:.2g}"
            found.append(Bound(f"{dtype} {kind} inputs: error of {key}", ours, limit, note=note))
    return found


def collective_bounds(rows: list[Row]) -> list[Bound]:
    """One collective in forward over several ranks, none over one, and none in backward."""
    found = []
    for row in rows:
        if row["provider"] in (OURS, INPLACE):
            cell = f"{row['dtype']} {row['what']}, {row['world']} ranks: {row['provider']}"
            for step, key, most in (
                ("forward", "collectives", row["world"] > 1),
                ("backward", "backward_collectives", False),
            ):
                found.append(Bound(f"{cell}, collectives of {step}", row.get(key, math.nan), float(most)))
    return found


def fastest_bounds(rows: list[Row]) -> list[Bound]:
    """This library against the fastest of the others, cell by cell and step by step."""
    found = []
    for (dtype, what, grad, n, v, threads, world), group in cells(rows).items():
        for step in STEPS if grad else STEPS[:1]:
            for mine, best in rivals(group, step):
                ratio = mine[f"{step}_ms"] / best[f"{step}_ms"]
                size = f"{n} x {v}, " + (f"{world} ranks" if world else f"{threads} threads")
                name = (
                    f"{dtype} {what} {step}: {mine['provider']} / fastest other ({size}{'' if grad else ', no grad'})"
                )
                found.append(Bound(name, ratio, 1.0, note=f"{best['provider']} {best['remark']}".strip()))
    return found


def cell_of(row: Row) -> tuple[Any, ...]:
    """What rows have in common that were measured side by side."""
    return tuple(row.get(key) for key in ("dtype", "what", "grad", "rows", "vocab", "threads", "world"))


def cells(rows: list[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Timed rows that were measured side by side."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.get("ok"):
            groups.setdefault(cell_of(row), []).append(row)
    return groups


def rivals(group: list[Row], step: str) -> list[tuple[Row, Row]]:
    """Rows of this library, each with its fastest competitor.

    A provider that overwrites the logits to save memory competes with our in-place gradient, where there is one.
    """
    ours = {row["provider"]: row for row in group if row["provider"] in (OURS, INPLACE)}
    others = [row for row in group if not row["provider"].startswith(OURS)]
    pairs = []
    for name, row in ours.items():
        inplace_too = name == INPLACE or INPLACE not in ours
        competitors = [o for o in others if inplace_too or OVERWRITES not in o["remark"]]
        if competitors:
            pairs.append((row, min(competitors, key=lambda other: other[f"{step}_ms"])))
    return pairs


def all_bounds(sections: Sections) -> list[Bound]:
    """Every promise that the measured sections speak of. A section without rows is held against each of its own."""
    head = next((sections[name] for name in ("headline", "quick") if name in sections), None)
    found = [] if head is None else headline_bounds(head)
    if sections.get("threads"):  # empty where there is one thread, or no CPU to speak of
        found += thread_bounds(sections["threads"])
    for name, judge in (
        ("linearity", linear_bounds),
        ("memory", memory_bounds),
        ("dispatch", dispatch_bounds),
        ("accuracy", accuracy_bounds),
        ("parallel", collective_bounds),
    ):
        if name in sections:
            found += judge(sections[name])
    for name in ("headline", "quick", "options", "sweep", "threads", "parallel"):
        found += fastest_bounds(sections.get(name, []))
    return found
