"""``python -m ppo_ops``, in fresh processes: complete, quick, right about what is missing, and able to fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ppo_ops
from ppo_ops import self_check
from ppo_ops.kernels import native

HOME = Path(ppo_ops.__file__).parents[1]
# Seconds that the self-check may take, as promised. It needs two; tests that run beside it may cost one run the rest.
PROMISED, TRIES = 5.0, 3


def _run(code: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The report, after `code` has run in the same process."""
    paths = {"PYTHONPATH": os.pathsep.join([str(HOME), os.environ.get("PYTHONPATH", "")])}
    start = f"{code}\nimport runpy; runpy.run_module('ppo_ops', run_name='__main__')"
    command = [sys.executable, "-c", start] if code else [sys.executable, "-m", "ppo_ops"]
    return subprocess.run(
        command, env={**os.environ, **paths, **environment}, capture_output=True, text=True, timeout=120, check=False
    )


def _seconds(report: str) -> float:
    """How long the self-check took."""
    (seconds,) = re.findall(r"^self-check, (\S+) s$", report, re.MULTILINE)
    return float(seconds)


def _missing(report: str) -> list[str]:
    """The names of what is missing."""
    return re.findall(r"^missing  (.*?):", report, re.MULTILINE)


def test_report() -> None:
    done = _run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert f"ppo_ops      {ppo_ops.__version__} in " in done.stdout
    assert f"torch        {torch.__version__}, " in done.stdout
    assert re.search(r"^  triton       (\d\S*|not installed)$", done.stdout, re.MULTILINE)
    assert done.stdout.endswith("everything works\n")
    assert _seconds(done.stdout) < PROMISED or min(_seconds(_run().stdout) for _ in range(TRIES - 1)) < PROMISED
    checks = re.findall(r"^  (.*) \(cpu\) +ok$", done.stdout, re.MULTILINE)
    assert checks == list(self_check.CHECKS)
    if native.available():
        assert re.search(rf"^  cpu float32, bfloat16, float16 +native, {native.instruction_set()}$", done.stdout, re.M)
        assert re.search(r"^  cpu float64 +ATen$", done.stdout, re.M)
    assert ("native CPU kernels" in _missing(done.stdout)) is not native.available()
    assert ("CUDA" in _missing(done.stdout)) is not torch.cuda.is_available()


def test_native_kernels_turned_off() -> None:
    done = _run(PPO_OPS_NATIVE="0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "missing  native CPU kernels: turned off by PPO_OPS_NATIVE=0. The CPU runs the ATen kernels" in done.stdout
    assert re.search(r"^  cpu float32, bfloat16, float16, float64 +ATen$", done.stdout, re.MULTILINE)


def test_library_and_packages_absent() -> None:
    """Without the compiled library, triton and the frameworks; the checks pass on what is left, without a warning."""
    code = """
import importlib.util, pathlib
exists, find_spec = pathlib.Path.exists, importlib.util.find_spec
pathlib.Path.exists = lambda self, **more: self.suffix != ".so" and exists(self, **more)
hidden = ("triton", "verl", "trl", "megatron")
importlib.util.find_spec = lambda name, *rest: None if name in hidden else find_spec(name, *rest)
"""
    done = _run(code)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "does not exist: no C compiler worked when ppo_ops was installed" in done.stdout
    assert {"native CPU kernels", "triton", "verl, trl, megatron-core"} <= set(_missing(done.stdout))
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("code", "failed"),
    [
        ("ppo_ops.logprob_entropy = lambda *a, f=ppo_ops.logprob_entropy, **k: tuple(1.001 * x for x in f(*a, **k))",
         ["forward", "kept set"]),
        ("from ppo_ops.kernels import cpu\n"
         "def broken(*args): raise RuntimeError('no such kernel')\n"
         "cpu.logits_grad = broken", ["gradient", "in place"]),
    ],
    ids=["wrong values", "broken kernel"],
)  # fmt: skip
def test_a_wrong_installation_fails(code: str, failed: list[str]) -> None:
    done = _run(f"import torch, ppo_ops\n{code}")
    assert done.returncode == 1, done.stdout + done.stderr
    for name in failed:
        assert re.search(rf"^  {name} \(cpu\) +FAILED: ", done.stdout, re.MULTILINE), done.stdout
    assert done.stdout.endswith("the self-check FAILED: do not trust results of this installation\n")
