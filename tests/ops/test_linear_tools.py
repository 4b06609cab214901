"""Example 05 and the benchmark of the fused output layer: they pass, and they notice what is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import linear as benchmark
from tests.test_examples import run

WRONG_GRADIENT = """
import ppo_ops
original = ppo_ops.linear_logprob
def wrong(hidden, weight, target, bias):
    return original(hidden.detach() + 0.9 * (hidden - hidden.detach()), weight, target, bias)
ppo_ops.linear_logprob = wrong
"""


@pytest.mark.training
def test_example(tmp_path: Path) -> None:
    status, output = run("05_linear_head.py", tmp_path)
    assert status == 0, output
    assert output.endswith("OK\n"), output


@pytest.mark.training
def test_example_notices_a_wrong_gradient(tmp_path: Path) -> None:
    """The gradient of the hidden states a tenth too small; values and the head's gradient are right."""
    status, output = run("05_linear_head.py", tmp_path, preamble=WRONG_GRADIENT)
    assert status == 1, output
    (difference,) = re.findall(r"^largest difference (\S+) ", output, re.MULTILINE)
    assert float(difference) > 1e-4


def test_benchmark_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "linear.json"
    assert benchmark.main(["--toy", "--sections", "errors,time,large", "--out", str(path)]) == 0
    results = json.loads(path.read_text())
    ours = [row for row in results["errors"] if row["provider"] == benchmark.OURS]
    assert {row["dtype"] for row in ours} == {"float32", "bfloat16"}
    # Logits of size 30: two roundings of float32.
    assert all(row["log_prob"] < 1e-4 for row in ours)
    assert all(row["forward_s"] > 0 for row in results["time"])
    assert results["large"][0]["ok"]
