"""What `import ppo_ops` does, each in a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ppo_ops

# Where this very package lies, checkout or installed.
HOME = Path(ppo_ops.__file__).parents[1]


def _python(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HOME), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_registers_the_operators_and_imports_nothing_heavy() -> None:
    """Neither Triton, Megatron nor Inductor; modules that torch itself brings do not count. Starts no process group."""
    code = """
import sys, torch
import torch.distributed as dist
assert not [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("ppo::")]
before = set(sys.modules)
import ppo_ops
heavy = ("triton", "megatron", "torch._inductor", "torch._dynamo", "numpy")
new = set(sys.modules) - before
print(sorted(name for name in new if name.startswith(heavy)), "ppo_ops" in new, dist.is_initialized())
logits, target = torch.zeros(2, 4), torch.tensor([0, 3])
print(*(f"{x:.4f}" for x in torch.ops.ppo.logprob(logits, target)), torch.ops.ppo.logprob_entropy(logits, target)[1])
"""
    assert _python(code).splitlines() == ["[] True False", "-1.3863 -1.3863 tensor([1.3863, 1.3863])"]


def test_can_be_imported_again() -> None:
    """Also after its modules were dropped, as notebooks and reloaders do."""
    code = """
import importlib, sys, torch
import ppo_ops
import ppo_ops
first = ppo_ops.logprob_entropy
def names():
    return sorted(n for n in torch._C._dispatch_get_all_op_names() if n.startswith("ppo::"))
before = names()
for _ in range(2):
    for name in [name for name in sys.modules if name.partition(".")[0] == "ppo_ops"]:
        del sys.modules[name]
    import ppo_ops
    importlib.reload(ppo_ops)
assert ppo_ops.logprob_entropy is not first
assert names() == before
logits = torch.zeros(2, 4, requires_grad=True)
for function in (first, ppo_ops.logprob_entropy):
    log_prob, entropy = function(logits, torch.tensor([0, 3]), temperature=0.5)
    (grad,) = torch.autograd.grad(log_prob.sum() + entropy.sum(), logits)
    print(log_prob.tolist() == [-torch.tensor(4.0).log().item()] * 2, grad[0].tolist())
"""
    assert _python(code).splitlines() == ["True [1.5, -0.5, -0.5, -0.5]"] * 2
