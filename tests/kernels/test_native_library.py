"""The native library: how it is chosen, built, missed, and what a fork does to it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ppo_ops.kernels import native

ROOT = Path(__file__).parents[2]

if not native.available():
    pytest.skip(f"native kernels: {native.why_unavailable()}", allow_module_level=True)


def test_environment_switches(monkeypatch):
    monkeypatch.setenv("PPO_OPS_NATIVE_ISA", "vax")
    assert native._load() == (None, "this CPU does not run PPO_OPS_NATIVE_ISA=vax")
    monkeypatch.setenv("PPO_OPS_NATIVE_ISA", "baseline")
    assert native._load()[1] == "baseline"
    monkeypatch.setenv("PPO_OPS_NATIVE", "0")
    assert native._load() == (None, "turned off by PPO_OPS_NATIVE=0")
    native._library.ppo_choose(native.instruction_set().encode())
    assert native.supports(torch.float16)
    assert not native.supports(torch.float64)
    monkeypatch.setattr(native, "_library", None)
    assert not native.available()
    assert not native.supports(torch.float16)


def test_missing_library(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "_native.so")
    assert "no C compiler worked" in native._load()[1]
    native.LIBRARY.write_text("not a library")
    assert native._load()[0] is None


def test_a_forked_child_does_not_hang():
    """The pool's threads are not in the child; it makes its own."""
    code = """
import os, torch
from ppo_ops.kernels import native
torch.set_num_threads(2)
logits, target, out = torch.zeros(64, 32000), torch.zeros(64, dtype=torch.int64), torch.empty(3, 64)
run = lambda: native.vocab_stats(logits, target, None, None, out, ignore_index=-100, vocab_start=0, columns=32000)
run()
child = os.fork()
if child == 0:
    run()
    os._exit(0 if (out[1] == 32000).all() else 1)
print(os.waitpid(child, 0)[1])
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "0", run.stderr


def test_install_survives_a_broken_compiler(tmp_path):
    build = [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path / "lib"), "-t", str(tmp_path / "tmp")]
    result = subprocess.run(
        build, cwd=ROOT, env={**os.environ, "CC": "false"}, capture_output=True, text=True, timeout=120, check=True
    )
    assert "ATen kernels" in result.stdout + result.stderr
    assert not list(tmp_path.rglob("*.so"))
