"""The benchmark's own promises, at toy sizes: a wrong provider gets no number; tables, JSON and bounds come out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import __main__ as command
from benchmarks import bounds, report
from benchmarks.inputs import Cell, Inputs
from benchmarks.providers import Outputs, Provider, load, plain
from benchmarks.sections import Row, Settings, measure

CELL = Cell(4, 64, torch.float32)


@pytest.fixture(autouse=True, scope="module")
def no_group_is_left() -> Iterator[None]:
    """The providers start a process group of one rank; other tests of this process start their own."""
    yield
    if dist.is_initialized():
        if "megatron.core.parallel_state" in sys.modules:
            sys.modules["megatron.core.parallel_state"].destroy_model_parallel()
        dist.destroy_process_group()


def _plain(logits: Tensor, inputs: Inputs) -> Outputs:
    return plain(logits, inputs.target, inputs.keep_mask, inputs.ignored, inputs.cell.entropy)


def _entropy_in_bits(logits: Tensor, inputs: Inputs) -> Outputs:
    log_prob, entropy = _plain(logits, inputs)
    assert entropy is not None
    return log_prob, entropy * 1.4427


def _detached_entropy(logits: Tensor, inputs: Inputs) -> Outputs:
    log_prob, entropy = _plain(logits, inputs)
    assert entropy is not None
    return log_prob, entropy.detach().requires_grad_()


def _one_nan(logits: Tensor, inputs: Inputs) -> Outputs:
    log_prob, entropy = _plain(logits, inputs)
    return log_prob.where(torch.arange(len(log_prob)) > 0, torch.nan), entropy


def _raises(logits: Tensor, inputs: Inputs) -> Outputs:
    raise NotImplementedError("no such kernel")


def _measured(function: Callable[[Tensor, Inputs], Outputs]) -> tuple[Row, Row]:
    """Rows of an honest provider and of one under suspicion, timed in the same cell."""
    providers = [Provider("honest", _plain), Provider("suspect", function)]
    rows = {row["provider"]: row for row in measure(Settings(providers, rounds=3), CELL)}
    return rows["honest"], rows["suspect"]


@pytest.mark.parametrize(
    ("function", "remark"),
    [
        (_entropy_in_bits, "entropy off by"),
        (_detached_entropy, "gradient off by"),
        (_one_nan, "log_prob off by nan"),
        (_raises, "failed: NotImplementedError: no such kernel"),
    ],
)
def test_a_wrong_provider_gets_no_number(function: Callable[[Tensor, Inputs], Outputs], remark: str) -> None:
    honest, suspect = _measured(function)
    assert honest["ok"]
    assert honest["forward_ms"] > 0
    assert honest["backward_ms"] > 0
    assert not suspect["ok"]
    assert remark in suspect["remark"]
    assert not any(key.endswith(("_ms", "_ratio")) for key in suspect)


def _exponentials_in_place(logits: Tensor, inputs: Inputs) -> Outputs:
    outputs = _plain(logits, inputs)
    inputs.work.exp_()
    return outputs


def test_a_provider_that_overwrites_the_logits_is_marked() -> None:
    honest, suspect = _measured(_exponentials_in_place)
    assert honest["remark"] == ""
    assert suspect["ok"]
    assert suspect["remark"] == "overwrites the logits"


def test_timed_runs_are_made_in_the_context_of_their_provider() -> None:
    inside = [False]
    timed: list[bool] = []

    @contextmanager
    def context() -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    def noting(logits: Tensor, inputs: Inputs) -> Outputs:
        timed.append(inside[0])
        return _plain(logits, inputs)

    list(measure(Settings([Provider("noting", noting, context=context)], rounds=3), CELL))
    assert len(timed) >= 4  # the gate and three rounds
    assert all(timed)


def test_a_peer_that_is_not_installed_is_reported_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def loader(device: str) -> list[Provider]:
        raise ImportError("No module named 'peer'")

    monkeypatch.setattr("benchmarks.providers.LOADERS", {"peer": loader})
    assert load("cpu") == ([], {}, {"peer": "ImportError: No module named 'peer'"})


def test_the_command_writes_json_and_prints_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cpu.json"
    arguments = ["--toy", "--packages", "ppo-ops", "--out", str(path)]
    assert command.main([*arguments, "--sections", "headline"]) == 0
    first = json.loads(path.read_text())
    assert command.main([*arguments, "--sections", "dispatch"]) == 0
    second = json.loads(path.read_text())
    assert list(second["sections"]) == ["headline", "dispatch"], "earlier sections are kept"
    assert second["sections"]["headline"] == first["sections"]["headline"]
    whats = {row["what"] for row in first["sections"]["headline"] if row["ok"]}
    assert whats == {
        "log-prob + entropy",
        "log-prob + entropy, kept set",
        "log-prob + entropy, half ignored",
        "log-prob",
    }
    capsys.readouterr()
    assert command.main(["--report", "--out", str(path)]) == 0
    tables = capsys.readouterr().out
    assert "| provider | forward ms | / limit | backward ms | / limit | total ms | / limit | remark |" in tables
    assert "| ppo_ops" in tables


def test_quick_fails_where_a_promise_is_missed() -> None:
    row = {"ok": True, "provider": bounds.OURS, "dtype": "float32", "grad": False, "what": bounds.MAIN}
    row |= {"rows": 512, "vocab": 151_936, "threads": 2}
    good = bounds.headline_bounds([{**row, "forward_ms": 10.0, "forward_ratio": 1.6}])
    bad = bounds.headline_bounds([{**row, "forward_ms": 10.0, "forward_ratio": 1.8}])
    assert good[0].met
    assert not bad[0].met
    assert not good[1].met, "what was not measured is not met"


def _series(ours: list[float], read: list[float]) -> list[Row]:
    """Rows of one size each, as the linearity section makes them; picoseconds an element."""
    even = {"backward_ps": 1.0, "backward_limit_ps": 1.0}
    return [
        {"dtype": dtype, "over": over, "forward_ps": a, "forward_limit_ps": b, **even}
        for dtype in bounds.DTYPES
        for over in ("rows", "vocab")
        for a, b in zip(ours, read, strict=True)
    ]


def test_linear_says_what_the_machine_itself_varies_by() -> None:
    """Beside the bound, which stays."""
    uneven = [150.0, 120.0, 100.0]
    found = bounds.linear_bounds(_series([140.0, 110.0, 100.0], uneven))
    assert [b.met for b in found] == [False, True] * 4, "backward is even"
    assert str(found[0]).endswith(f"1.4 (<= {bounds.LINEAR}) the limit itself 1.50")


def test_what_a_section_did_not_measure_is_missed() -> None:
    """A refusal, a failed worker or an empty section must not pass by leaving nothing to judge."""
    for name, promises in (("linearity", 8), ("memory", 2), ("dispatch", 1), ("quick", 12)):
        found = bounds.all_bounds({name: []})
        assert [bound.met for bound in found] == [False] * promises, name
    row = {"ok": True, "provider": bounds.INPLACE, "dtype": "float32", "forward": 0.0}
    assert not bounds.memory_bounds([row])[0].met, "the peak of backward is missing"
    row = {"dtype": "float32", "class": "-inf", "what": bounds.MAIN, "rows": 8, "vocab": 9}
    plain = {**row, "ok": True, "provider": bounds.PLAIN, "log_prob": 1e-7, "entropy": float("nan"), "gradient": 1e-7}
    refused = bounds.accuracy_bounds([{**row, "ok": False, "provider": bounds.OURS}, plain])
    assert [bound.met for bound in refused] == [False] * 3
    wrong = {**row, "ok": True, "provider": bounds.OURS, "log_prob": 1e-7, "entropy": 1e-3, "gradient": 1e-7}
    assert [bound.met for bound in bounds.accuracy_bounds([wrong, plain])] == [True, False, True], "NaN excuses nothing"


def test_a_collective_too_many_is_missed() -> None:
    row = {"ok": True, "provider": bounds.OURS, "dtype": "float32", "what": bounds.MAIN, "backward_collectives": 0}
    rows = [{**row, "world": world, "collectives": 1} for world in (1, 2)]
    assert [bound.met for bound in bounds.collective_bounds(rows)] == [False, True, True, True]


def test_fastest_compares_like_with_like() -> None:
    """A peer that overwrites the logits competes with the in-place gradient, any other with both."""
    row = {"ok": True, "dtype": "float32", "grad": True, "what": "log-prob", "rows": 8, "vocab": 9, "threads": 2}

    def timed(provider: str, ms: float, remark: str = "") -> Row:
        return {
            **row,
            "provider": provider,
            "remark": remark,
            **{f"{s}_ms": ms for s in ("forward", "backward", "total")},
        }

    ours = [timed(bounds.OURS, 10.0), timed(bounds.INPLACE, 4.0)]
    keeps, overwrites = timed("peer", 8.0), timed("eager peer", 5.0, "overwrites the logits")
    met = [bound.met for bound in bounds.fastest_bounds([*ours, keeps, overwrites])]
    assert met == [False, True] * 3, "ours against the one that keeps them, in place against both"
    assert [best["provider"] for _, best in bounds.rivals([*ours, keeps, overwrites], "total")] == [
        "peer",
        "eager peer",
    ]


def test_a_row_is_marked_with_the_steps_that_it_loses() -> None:
    cell = {"ok": True, "dtype": "float32", "grad": True, "what": "log-prob", "rows": 8, "vocab": 9, "world": 2}
    mine = {**cell, "provider": bounds.OURS, "remark": "", "forward_ms": 1.0, "backward_ms": 3.0, "total_ms": 4.0}
    peer = {**mine, "provider": "peer", "forward_ms": 2.0, "backward_ms": 1.0, "total_ms": 3.0}
    slow = {**peer, "world": 1, "backward_ms": 9.0, "total_ms": 11.0}
    tables = report.markdown({"sections": {"parallel": [mine, peer, {**mine, "world": 1}, slow]}})
    assert tables.count("is faster") == 1
    assert "[backward, total: peer is faster]" in tables


def test_numbers_in_tables() -> None:
    assert [report.number(value) for value in (None, float("nan"), 0.12345, 12.345, 1234.5)] == [
        "-",
        "NaN",
        "0.123",
        "12.3",
        "1234",
    ]
