"""`python -m benchmarks.gpu` end to end in Triton's interpreter; it prints nothing wrong and stops in time."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

pytest.importorskip("triton")
from benchmarks import bounds, gate, gpu, gpu_peers
from benchmarks.gpu_cells import DTYPES, MAIN_ROWS, MAIN_VOCAB, DeviceRun
from benchmarks.gpu_report import bounds_of
from benchmarks.inputs import Cell, Inputs
from benchmarks.providers import Outputs, Provider, plain

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning")
TOY = ["--toy", "--rounds", "1", "--packages", "ppo-ops,torch"]


def test_toy_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu.json"
    assert gpu.main([*TOY, "--tune", "--out", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("TOY RUN")
    assert printed.rstrip().endswith("mean nothing.")
    results = json.loads(path.read_text())
    assert results["toy"]
    assert results["not reached"] == []
    cells = {(row["what"], row["dtype"]) for row in results["rows"]}
    whats = ("log-prob + entropy", "log-prob", "log-prob + entropy, kept set")
    assert cells == {(what, dtype) for what in whats for dtype in ("bfloat16", "float32")}
    names = {row["provider"] for row in results["rows"]}
    ours = {"ppo_ops", "ppo_ops, in place", "ppo_ops, kept as ids"}
    assert names == {*ours, "torch eager", "torch.compile", "F.cross_entropy"}
    for row in results["rows"]:
        assert row["ok"] or not row["provider"].startswith("ppo_ops"), row
        assert row["ok"] == ("forward_percent" in row)
    for row in results["rows"][:1]:
        # Bytes and rates belong together: 2 rows of 264 bfloat16, read once and twice.
        assert row["forward_gbs"] == pytest.approx(2 * 264 * 2 / row["forward_ms"] * 1e-6)
        assert row["backward_gbs"] == pytest.approx(2 * row["forward_gbs"] * row["forward_ms"] / row["backward_ms"])
        assert row["forward_percent"] == pytest.approx(100 * row["forward_gbs"] / row["copy_gbs"])
    assert {row["step"] for row in results["tune"]} == {"forward", "backward"}
    assert sum(row["present"] for row in results["tune"]) == 4


def test_no_time_no_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu.json"
    assert gpu.main([*TOY, "--minutes", "0", "--out", str(path)]) == 0
    results = json.loads(path.read_text())
    assert results["rows"] == []
    assert len(results["not reached"]) == 10
    assert "Not reached in time: log-prob + entropy, bfloat16, 2 x 264" in capsys.readouterr().out


def test_nothing_is_timed_where_ours_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(logits: Tensor, inputs: Inputs) -> Outputs:
        log_prob, entropy = plain(logits, inputs.target, inputs.keep_mask, inputs.ignored, inputs.cell.entropy)
        return log_prob * 1.001, entropy

    ours = Provider("ppo_ops", wrong, "ppo-ops", kept=True, ignored=True)
    monkeypatch.setattr(gpu, "load", lambda *args: ([ours], {}, {}))
    path = tmp_path / "gpu.json"
    assert gpu.main([*TOY, "--out", str(path)]) == 2
    printed = capsys.readouterr().out
    assert "ppo_ops, log-prob + entropy, bfloat16, 2 x 131: wrong: log_prob off by" in printed
    assert " ms" not in printed
    assert not path.exists()


def _rows(forward_percent: float, backward_percent: float) -> list[dict[str, Any]]:
    row = {"rows": MAIN_ROWS, "vocab": MAIN_VOCAB, "what": bounds.MAIN, "ok": True, "remark": ""}
    row |= {"forward_percent": forward_percent, "backward_percent": backward_percent}
    times = {"forward_ms": 1.0, "backward_ms": 2.0, "total_ms": 3.0}
    return [{**row, **times, "provider": "ppo_ops", "dtype": str(d).removeprefix("torch.")} for d in DTYPES]


def test_promises() -> None:
    assert [bound.met for bound in bounds_of(_rows(85.0, 82.0))] == [True] * 4
    assert [bound.met for bound in bounds_of(_rows(84.9, 81.9))] == [False] * 4
    assert [bound.met for bound in bounds_of([])] == [False] * 4, "what was not measured is not met"
    rows = _rows(90.0, 90.0)[:1]
    slower, faster = ({**rows[0], "provider": name, "backward_ms": ms} for name, ms in (("a", 2.1), ("b", 1.9)))
    assert all(bound.met for bound in bounds_of([*rows, slower])[4:])
    assert [bound.met for bound in bounds_of([*rows, slower, faster])[4:]] == [True, False, True]
    # A peer that makes the gradient in forward, over the logits, is compared with our gradient in place, in total.
    tricky = {**slower, "remark": gate.OVERWRITES, "backward_ms": 0.1, "total_ms": 2.9}
    found = bounds_of([*rows, {**rows[0], "provider": "ppo_ops, in place"}, tricky])[4:]
    assert [(bound.name.split(": ")[1], bound.met) for bound in found] == [("ppo_ops, in place / fastest peer", False)]


class _Event:
    """Stands for a CUDA event: a clock that ticks with each record."""

    ticks = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        _Event.ticks += 1
        self.time = _Event.ticks

    def elapsed_time(self, other: _Event) -> float:
        return float(other.time - self.time)


def test_steps_are_timed_between_their_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    happened: list[Any] = []
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: happened.append("wait"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("synchronize"))

    def step(given: Any) -> int:
        happened.append(given)
        return _Event.ticks

    run = DeviceRun("run", [step, step], lambda: happened.append("prepare"))
    run.once()
    assert happened == ["prepare", "wait", None, "wait", 1, "synchronize"]
    assert run.medians() == [1e-3, 1e-3]


def _loss(x: Tensor, target: Tensor, **options: object) -> Tensor:
    assert options.pop("reduction", "none") == "none"
    assert set(options) <= {"inplace_backward"}
    return F.cross_entropy(x.float(), target, reduction="none")


@pytest.mark.parametrize(
    ("package", "module", "function", "names"),
    [
        ("liger-kernel", "liger_kernel.transformers.functional", {"liger_cross_entropy": _loss}, ["liger"]),
        (
            "flash-attn",
            "flash_attn.ops.triton.cross_entropy",
            {"cross_entropy_loss": lambda *args, **options: (_loss(*args, **options), None)},
            ["flash-attn", "flash-attn, in place"],
        ),
        ("quack-kernels", "quack.cross_entropy", {"cross_entropy": _loss}, ["quack", "quack, in place"]),
    ],
)
def test_peers_are_called_rightly(
    package: str, module: str, function: dict[str, Any], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their kernels need a GPU; stand-ins with their signatures show sign, arguments and what is returned."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    vars(sys.modules[module]).update(function)
    providers = gpu_peers.LOADERS[package]("cuda")
    assert [provider.name for provider in providers] == names
    inputs = Inputs(Cell(4, 64, torch.float32, entropy=False))
    for provider in providers:
        assert not provider.can(Cell(4, 64, torch.float32))
        assert gate.check(provider, inputs, gate.truth_of(inputs)) == (True, "")


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu.main([]) == 2
    assert "there is no GPU" in capsys.readouterr().err
