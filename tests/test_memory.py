"""Peak memory of the whole process, in fresh interpreters, at the size of a real vocabulary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ppo_ops
from ppo_ops.kernels import native

HOME = Path(ppo_ops.__file__).parents[1]

# Peaks only grow, so the steps run from the smallest to the largest. The logits are written in place, from one row, so
# that nothing before the first step was ever larger; they are no leaf, so that backward may overwrite them.
PROGRAM = """
import json, sys
import torch, ppo_ops

N, V, dtype = 1024, 151936, getattr(torch, sys.argv[1])

def kilobytes(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))

def both(logits, **options):
    return ppo_ops.logprob_entropy(logits, target[: len(logits)], **options)

row = torch.randn(1, V).to(dtype).requires_grad_()
target = torch.randint(999, (N,))
small = row[:, :999].repeat(3, 1)
torch.autograd.grad(both(small, keep_mask=small > 0), small, (torch.ones(3), torch.ones(3)))  # what loads once
logits = torch.empty(N, V, dtype=dtype)
logits.copy_(row)
size = logits.numel() * logits.element_size() / 1024
before = kilobytes("VmRSS")
report = {"hidden": (kilobytes("VmHWM") - before) / size}

def step(name, function):
    function()
    report[name] = (kilobytes("VmHWM") - before) / size

kept = (row > 0).expand(N, V)
some = target.masked_fill(torch.arange(N) % 3 == 0, -100)
temperature = torch.full((N,), 0.7)
ones = torch.ones(N)
step("forward", lambda: both(logits))
step("options", lambda: ppo_ops.logprob_entropy(logits, some, kept, temperature=temperature, vocab_size=V - 99))
step("in place", lambda: torch.autograd.grad(both(logits, inplace_backward=True), logits, (ones, ones)))
step("forward and backward", lambda: torch.autograd.grad(both(logits), logits, (ones, ones)))
print(json.dumps(report))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
@pytest.mark.parametrize("kernels", ["aten", "native"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_extra_peak_memory(dtype: str, kernels: str) -> None:
    """Of the logits' size: forward 0.12, with backward 1.12 (one gradient in their dtype), in place 0.12."""
    if kernels == "native" and not native.available():
        pytest.skip(f"native kernels: {native.why_unavailable()}")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HOME), os.environ.get("PYTHONPATH", "")]),
        "PPO_OPS_NATIVE": "0" if kernels == "aten" else "1",
    }
    if kernels == "aten":  # as in the fixture `kernels`: many short parallel regions
        environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, dtype],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    # Else an earlier peak would hide the steps'.
    assert report.pop("hidden") < 0.05
    total = report.pop("forward and backward")
    assert max(report.values()) <= 0.12, report
    # The gradient is really made: no reading that stays at the logits' own size passes.
    assert 0.95 <= total <= 1.12, total


# All rows are one, so that the logits take no memory; the kernels read strided rows in place.
KEPT_PROGRAM = """
import torch, ppo_ops

N, V, KEPT = 8192, 151936, 200

def kilobytes(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))

logits = torch.randn(1, V).bfloat16().expand(N, V)
target = torch.randint(V, (N,))
keep_ids = torch.randint(V, (N * KEPT,), dtype=torch.int32)
keep_offsets = torch.arange(N + 1) * KEPT
few = dict(keep_ids=keep_ids[: 3 * KEPT], keep_offsets=keep_offsets[:4])
ppo_ops.logprob(logits[:3], target[:3], **few), ppo_ops.logprob_entropy(logits[:3], target[:3], **few)
before, hidden = kilobytes("VmRSS"), kilobytes("VmHWM") - kilobytes("VmRSS")
log_prob = ppo_ops.logprob(logits, target, keep_ids=keep_ids, keep_offsets=keep_offsets)
assert log_prob.isfinite().all()
print(hidden / 1024, (kilobytes("VmHWM") - before) / 1024)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
@pytest.mark.parametrize("kernels", ["native", "aten"])
def test_extra_memory_of_a_ragged_set(kernels: str) -> None:
    """8192 rows with 200 ids each: below 32 MiB, where the mask would be 1187 MiB."""
    if kernels == "native" and not native.available():
        pytest.skip("the native kernels are not there")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HOME), os.environ.get("PYTHONPATH", "")])}
    environment["PPO_OPS_NATIVE"] = "0" if kernels == "aten" else "1"
    command = [sys.executable, "-c", KEPT_PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    hidden, extra = map(float, done.stdout.split())
    assert hidden < 8  # else an earlier peak would hide the step's
    assert extra < 32, extra
