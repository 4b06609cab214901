"""The figures of README.md are those of the saved results, rounded to the digits that it prints."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from typing import Any

import pytest
import torch

from benchmarks import bounds, linear
from benchmarks.gate import OVERWRITES
from tests.test_readme import ROOT, section

RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]
SECTIONS: dict[str, list[Row]] = json.loads((RESULTS / "cpu.json").read_text())["sections"]
MEASURED: dict[str, dict[str, str]] = json.loads((RESULTS / "cpu.json").read_text())["measured"]
LINEAR: Row = json.loads((RESULTS / "linear.json").read_text())
COSTS, HIDDEN = section("What it costs"), section("From hidden states")
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()

SPEED = {
    "ppo_ops": bounds.OURS,
    "ppo_ops, `inplace_backward`": bounds.INPLACE,
    "plain formula under torch.compile": "torch.compile",
    "verl 0.9.1, vocab-parallel": "verl vocab-parallel",
    "trl 1.16.0": "trl",
    "plain formula, eager": bounds.PLAIN,
}
ACCURACY = {
    "ppo_ops": bounds.OURS,
    "plain formula": bounds.PLAIN,
    "trl": "trl",
    "verl, vocab-parallel": "verl vocab-parallel",
    "megatron-core, fused": "megatron fused",
}
CLASSES = {
    "random": "random",
    "one token 30 higher": "peaked",
    "all 1e4 higher": "offset 1e4",
    "a quarter -inf": "-inf",
}
HEADS = {
    "torch linear_cross_entropy (no entropy)": "torch linear_cross_entropy",
    "the same, chunked": "torch linear_cross_entropy, chunked",
}


def rounds_to(value: float | None, text: str) -> bool:
    """Whether `text` is `value` to the last digit of `text`; a dash is no value."""
    if value is None or text == "-":
        return value is None and text == "-"
    if math.isnan(value) or text == "NaN":
        return math.isnan(value) and text == "NaN"
    printed = Decimal(text)
    exponent = printed.as_tuple().exponent
    assert isinstance(exponent, int)
    return abs(printed - Decimal(value)) <= Decimal(5).scaleb(exponent - 1)


def assert_rounded(values: Iterable[float | None], texts: Sequence[str]) -> None:
    wrong = [(value, text) for value, text in zip(values, texts, strict=True) if not rounds_to(value, text)]
    assert not wrong


def tables(text: str) -> list[list[dict[str, str]]]:
    """The markdown tables, each row by the names of its columns."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        header, _, *body = [
            [cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()
        ]
        found.append([dict(zip(header, cells, strict=True)) for cells in body])
    return found


def table_with(text: str, column: str) -> list[dict[str, str]]:
    (table,) = [table for table in tables(text) if column in table[0]]
    return table


def only(table: list[Row], /, **wanted: Any) -> Row:
    (row,) = [row for row in table if all(row[key] == value for key, value in wanted.items())]
    return row


def figures(pattern: str, text: str) -> tuple[str, ...]:
    """The groups of the one place where the pattern, in which a space is any white space, occurs."""
    (match,) = re.finditer(pattern.replace(" ", r"\s+"), text)
    return match.groups()


@pytest.mark.parametrize(
    ("value", "text", "same"),
    [
        (1.3635, "1.36", True),
        (1.3635, "1.37", False),
        (81.6, "82", True),
        (81.4, "82", False),
        (3.24e-7, "3e-7", True),
        (3.6e-7, "3e-7", False),
        (9.58e-6, "0.00001", True),
        (math.nan, "NaN", True),
        (math.nan, "1", False),
        (None, "-", True),
        (1.0, "-", False),
    ],
)
def test_rounds_to(value: float | None, text: str, same: bool) -> None:
    assert rounds_to(value, text) == same


def test_speed_table() -> None:
    table = table_with(COSTS, "forward / limit")
    assert [row["log-prob and entropy"] for row in table] == list(SPEED)
    for shown, name in zip(table, SPEED.values(), strict=True):
        row = only(SECTIONS["headline"], what=bounds.MAIN, grad=True, dtype="float32", provider=name)
        texts = (shown["forward / limit"], shown["backward / limit"])
        assert_rounded((row["forward_ratio"], row["backward_ratio"]), texts)


def test_speed_without_a_gradient() -> None:
    value = {bound.name: bound.value for bound in bounds.headline_bounds(SECTIONS["headline"])}
    texts = figures(
        r"takes ([\d.]+) times its read in float32, ([\d.]+) times less than the plain formula, and ([\d.]+) times in "
        r"bfloat16, ([\d.]+) times less\.",
        COSTS,
    )
    names = [f"{d} forward{w}" for d in bounds.DTYPES for w in (" / read", ", times as fast as plain torch")]
    assert_rounded([value[name] for name in names], texts)


def test_small_call() -> None:
    texts = figures(r"takes ([\d.]+) microseconds where the plain formula takes ([\d.]+) \(", COSTS)
    names = (bounds.OURS, bounds.PLAIN)
    assert_rounded([only(SECTIONS["dispatch"], what=bounds.MAIN, provider=name)["us"] for name in names], texts)


def test_unsteady_backward() -> None:
    texts = figures(r"takes (\d+) ms in one section of `benchmarks/results/cpu.json` and (\d+) in another", COSTS)
    cell = {"what": bounds.MAIN, "grad": True, "dtype": "float32", "provider": bounds.OURS, "threads": 2}
    assert_rounded([only(SECTIONS[name], **cell)["backward_ms"] for name in ("headline", "threads")], texts)


def test_dates() -> None:
    first, last = figures(r"AVX-512, (\d{4}-\d\d-\d\d) and (\d\d)\)", COSTS)
    assert {facts["date"] for facts in MEASURED.values()} == {first, first[:-2] + last}


def test_lost_comparisons_are_counted() -> None:
    found = [bound for bound in bounds.all_bounds(SECTIONS) if " / fastest other " in bound.name]
    counts = (str(len(found)), str(sum(not bound.met for bound in found)))
    for text in (COSTS, CHANGELOG):
        pattern = r"(?i:of (?:the file's )?(\d+) comparisons with the fastest other provider (\d+) are lost)"
        assert figures(pattern, text) == counts


def lost_comparisons() -> Iterator[tuple[str, Row, Row]]:
    """Each step in which a row of this library is behind, and the row that it is behind."""
    for rows in SECTIONS.values():
        for group in bounds.cells(rows).values() if "forward_ms" in rows[0] else ():
            for step in bounds.STEPS if group[0]["grad"] else bounds.STEPS[:1]:
                for mine, best in bounds.rivals(group, step):
                    if mine[f"{step}_ms"] > best[f"{step}_ms"]:
                        yield step, mine, best


def test_lost_comparisons_are_those_that_it_explains() -> None:
    """Small logits, log-prob backward beside what overwrote the logits in forward, or fresh memory."""
    for step, mine, best in lost_comparisons():
        behind_ms = mine[f"{step}_ms"] - best[f"{step}_ms"]
        size = mine["rows"] * mine["vocab"] * getattr(torch, mine["dtype"]).itemsize
        small = size <= 5e6 and behind_ms <= 0.2
        overwrites = mine["what"] == "log-prob" and step == "backward" and OVERWRITES in best["remark"]
        overwrites = overwrites and best["forward_ms"] - mine["forward_ms"] > behind_ms
        fresh_memory = mine["provider"] == bounds.OURS and step != "forward" and size > 1e8
        assert small or overwrites or fresh_memory, (step, mine, best)


def test_threads() -> None:
    gains = {bound.name: bound for bound in bounds.thread_bounds(SECTIONS["threads"])}
    texts = figures(
        r"Two threads are ([\d.]+) \(float32\) and ([\d.]+) \(bfloat16\) times as fast as one in forward, where "
        r"reading alone gains ([\d.]+) and ([\d.]+)\. The bfloat16 backward into fresh memory gains ([\d.]+), where a "
        r"copy gains ([\d.]+)\.",
        COSTS,
    )
    forward = [gains[f"{dtype} forward: 2 threads over one"] for dtype in bounds.DTYPES]
    missed = gains["bfloat16 backward: 2 threads over one"]
    assert [bound for bound in gains.values() if not bound.met] == [missed]
    reading = [float(bound.note.split()[-1]) for bound in forward]
    assert_rounded([*(bound.value for bound in forward), *reading, missed.value, missed.limit], texts)


def test_time_an_element() -> None:
    texts = figures(
        r"varies by at most ([\d.]+) from 1024 to 8192 rows and from 32,000 to 256,000 columns, but in bfloat16 over "
        r"columns by ([\d.]+) in forward and ([\d.]+) in backward",
        COSTS,
    )
    series = bounds.linear_bounds(SECTIONS["linearity"])
    columns = [bound.value for bound in series if re.match("bfloat16 .* over vocab", bound.name)]
    assert [bound.value for bound in series if not bound.met] == columns
    assert_rounded([max(bound.value for bound in series if bound.met), *columns], texts)


def test_accuracy_table() -> None:
    table = table_with(COSTS, "one token 30 higher")
    assert {row[""] for row in table} == set(ACCURACY)
    for shown in table:
        name = ACCURACY[shown[""]]
        what = "log-prob" if name == "megatron fused" else bounds.MAIN
        for column, kind in CLASSES.items():
            wanted = {"class": kind, "dtype": shown["logits"], "what": what, "provider": name}
            row = only(SECTIONS["accuracy"], **wanted)
            assert_rounded([row[key] for key in ("log_prob", "entropy", "gradient")], shown[column].split(" / "))


def test_output_layer_table() -> None:
    table = table_with(HIDDEN, "log_prob error, nats, bfloat16 inputs")
    assert {HEADS.get(row[""], row[""]) for row in table} == {row["provider"] for row in LINEAR["time"]}
    for shown in table:
        times, peaks, error = list(shown.values())[1:]
        name = HEADS.get(shown[""], shown[""])
        timed = [only(LINEAR["time"], provider=name, rows=n, dtype="float32") for n in (1024, 4096, 16384)]
        assert_rounded([row["forward_s"] + row["backward_s"] for row in timed], times.split(" / "))
        held = [only(LINEAR["memory"], provider=name, rows=n) for n in (4096, 16384)]
        assert_rounded([max(r["forward"], r["backward"]) / linear.MEBIBYTE for r in held], peaks.split(" / "))
        assert_rounded([only(LINEAR["errors"], provider=name, dtype="bfloat16")["log_prob"]], [error])


def test_output_layer_rounds() -> None:
    (rounds,) = figures(r"`python -m benchmarks\.linear --rounds (\d+)`", HIDDEN)
    assert {row["rounds"] for row in LINEAR["time"]} == {int(rounds)}


def test_output_layer_products_and_peak() -> None:
    texts = figures(r"takes ([\d.]+) times \(512 x 151,936\) and ([\d.]+) times \(2048 x 32,000\) its own", HIDDEN)
    assert_rounded([row["ratio"] for row in LINEAR["gemm"]], texts)
    (row,) = LINEAR["large"]
    texts = figures(r"its peak is (\d+) MiB, of which (\d+) are gradients; the logits would be (\d+)\.", HIDDEN)
    sizes = (row["backward"], row["gradients"], 4 * row["rows"] * row["vocab"])
    assert_rounded([size / linear.MEBIBYTE for size in sizes], texts)


def test_output_layer_in_bfloat16() -> None:
    ours, error, *others = figures(
        r"([\d.]+) s at N = 4096, where a matmul and `logprob_entropy`, off by ([\d.]+) nat, take ([\d.]+), verl "
        r"([\d.]+) and TRL ([\d.]+)\.",
        HIDDEN,
    )
    names = (linear.OURS, linear.PLAIN, "verl FusedLinearForPPO", "TRL ChunkedLogProbFunction")
    rows = [only(LINEAR["time"], provider=name, rows=4096, dtype="bfloat16") for name in names]
    assert_rounded([row["forward_s"] + row["backward_s"] for row in rows], [ours, *others])
    assert_rounded([only(LINEAR["errors"], provider=linear.PLAIN, dtype="bfloat16")["log_prob"]], [error])
