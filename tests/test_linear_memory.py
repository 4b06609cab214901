"""Peak memory of the fused output layer, of the whole process, in a fresh interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ppo_ops

HOME = Path(ppo_ops.__file__).parents[1]
MEBIBYTE = 1 << 20

# Peaks only grow, so the steps run from the smallest to the largest. `python -m benchmarks.linear --memory` measures
# the same at the size of a real model (N = 8192, H = 512, V = 151,936).
PROGRAM = """
import json, sys
import torch, ppo_ops
from ppo_ops import linear

V, H, workspace = 32768, 128, 32 << 20
dtype = getattr(torch, sys.argv[1])
linear.set_workspace_bytes(workspace)
hidden = torch.randn(2048, H).to(dtype).requires_grad_()
weight = torch.randn(V, H).to(dtype).requires_grad_()
target = torch.randint(V, (2048,))

def kilobytes(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))

def outputs(rows, weight=weight):
    return ppo_ops.linear_logprob_entropy(hidden[:rows], weight, target[:rows])

small = [torch.randn(n, 8).to(dtype).requires_grad_() for n in (3, 5)]
loss = ppo_ops.linear_logprob_entropy(*small, torch.arange(3))[0].sum()
loss.backward()  # what loads once
before = kilobytes("VmHWM")
report = {"hidden": before - kilobytes("VmRSS")}

def step(name, function):
    function()
    report[name] = kilobytes("VmHWM") - before

def without_gradient(rows):
    with torch.no_grad():
        outputs(rows)

step("forward of few rows", lambda: without_gradient(256))
step("forward", lambda: without_gradient(2048))
step("hidden alone", lambda: torch.autograd.grad(outputs(2048, weight.detach())[0].sum(), hidden))
step("all", lambda: torch.autograd.grad(sum(o.sum() for o in outputs(2048)), (hidden, weight)))
print(json.dumps({name: 1024 * value for name, value in report.items()}))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_extra_peak_memory(dtype: str) -> None:
    """The logits would be 256 MiB in float32; the workspace is 32, weight's gradient 16, hidden's 1."""
    # Large tensors as mappings of their own: glibc would keep up to 64 MiB of freed memory.
    paths = os.pathsep.join([str(HOME), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "MALLOC_MMAP_THRESHOLD_": str(MEBIBYTE)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, dtype],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = {name: value / MEBIBYTE for name, value in json.loads(done.stdout).items()}
    assert report.pop("hidden") < 8, "an earlier peak would hide the steps'"
    # MKL packs matrices into 7 MiB of its own, hidden states of a chunk are 0.1 MiB. Flat in N.
    slack = 12
    assert 24 < report["forward of few rows"] < 32 + slack, report
    assert report["forward"] < 32 + slack, report
    assert report["hidden alone"] < 32 + 1 + slack, report
    # A bfloat16 weight's gradient is summed in float32 (16 MiB) and then rounded (8 MiB).
    gradients = 17 if dtype == "float32" else 16 + 8 + 1
    assert gradients + 24 < report["all"] < 32 + gradients + slack, report
