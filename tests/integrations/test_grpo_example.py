"""Example 04 in small: two ranks train on kept sets with a compiled loss, are killed, and resume to the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

ROOT = Path(__file__).parents[2]
TIME_LIMIT = 120.0
STEPS = 3
# Hardly any warm-up and 32 samples a step: what is tested here is not what the model learns.
SMALL = ("--steps", str(STEPS), "--warm-up", "5", "--prompts", "4", "--save-every", "1")


def _run(folder: Path, out: str, *arguments: str) -> tuple[int, str]:
    """Exit status and output of the example; the runs of one test share a compile cache."""
    with subprocess.Popen(
        [
            sys.executable,
            str(ROOT / "examples" / "04_grpo_megatron.py"),
            *SMALL,
            "--out",
            str(folder / out),
            *arguments,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")},
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=TIME_LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the ranks, too
            raise
    return process.returncode, output


def _log(folder: Path, out: str) -> dict[str, Any]:
    return json.loads((folder / out / "log.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.training
def test_replay_and_resume(tmp_path: Path) -> None:
    status, output = _run(tmp_path, "whole")
    assert status == 0, output
    assert output.endswith("OK\n"), output
    whole = _log(tmp_path, "whole")
    assert len(whole["steps"]) == STEPS
    for row in whole["steps"]:
        # On the same weights and kept sets the ratio is 1 but for some roundings of log-probs near 5 (spacing 5e-7).
        assert row["ratio_off"] <= 1e-5
        # The tail that top-p 0.9 cut off has a probability of up to 0.1, and the model has hardly any zeros yet.
        assert 0.05 < row["ratio_off_without_replay"] <= 0.1 + 1e-5
        assert row["ratio_moved"] > 1e-3  # the second update is off-policy, so the numbers above are not a constant
        assert row["graphs"] == 1
    assert len(set(whole["parameters"])) == 2  # two ranks, two shards

    status, output = _run(tmp_path, "killed", "--kill-at", "2")
    assert status == 1, output
    assert "SIGKILL" in output, output
    assert not (tmp_path / "killed" / "log.json").exists()
    status, output = _run(tmp_path, "killed", "--resume")
    assert status == 0, output
    assert "resumed from" in output, output
    resumed = _log(tmp_path, "killed")
    assert resumed["parameters"] == whole["parameters"]
    for row, expected in zip(resumed["steps"], whole["steps"], strict=True):
        assert {**row, "seconds": 0} == {**expected, "seconds": 0}
