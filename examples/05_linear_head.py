"""The output head of example 01's model, swapped for `ppo_ops.linear_logprob`: the same training, less memory.

    python examples/05_linear_head.py

The network of example 01 reads bytes of this repository's README and docstrings, and predicts the next two bytes at
once: 65,536 tokens, as many as a small real vocabulary. It is trained twice from the same weights, once through logits
and once without them. The losses must agree at every step, and on Linux the second run's peak memory must be a fraction
of the first's. Exits non-zero where a check fails.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ppo_ops
from ppo_ops import linear

STEPS, BATCH, LENGTH = 6, 16, 48
TOKENS = 256 * 256
WORKSPACE = 16 << 20
# Losses are float32 numbers near 10 from sums in another order; a wrong gradient moves the next one by 0.01 or more.
LOSS_TOLERANCE = 1e-4

Head = Callable[[Tensor, nn.Linear, Tensor], Tensor]


def example_01() -> Any:
    """The module `01_single_device`, whose name is no identifier."""
    path = Path(__file__).with_name("01_single_device.py")
    spec = importlib.util.spec_from_file_location("single_device", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def through_logits(hidden: Tensor, head: nn.Linear, target: Tensor) -> Tensor:
    return ppo_ops.logprob(head(hidden), target)


def without_logits(hidden: Tensor, head: nn.Linear, target: Tensor) -> Tensor:
    return ppo_ops.linear_logprob(hidden, head.weight, target, head.bias)


def train(single_device: Any, corpus: Tensor, log_prob_of: Head) -> tuple[list[float], float | None]:
    """The loss of every step, and the peak of memory beyond what was there before the first, in MiB."""
    torch.manual_seed(0)
    model = single_device.ByteModel()
    model.head = nn.Linear(model.head.in_features, TOKENS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    before = start_of_peak()
    for _ in range(STEPS):
        starts = torch.randint(len(corpus) - LENGTH - 1, (BATCH, 1))
        window = corpus[starts + torch.arange(LENGTH + 2)]
        target = 256 * window[:, 1:-1] + window[:, 2:]
        hidden, _ = model.recurrent(model.embedding(window[:, :-2]))
        loss = -log_prob_of(hidden, model.head, target).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, None if before is None else (memory("VmHWM") - before) / 1024


def memory(field: str) -> int:
    """A figure of this process, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def start_of_peak() -> int | None:
    """Forget the peak so far; memory in use in KiB, or None where the system does not tell."""
    if not sys.platform.startswith("linux"):
        return None
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def main() -> int:
    single_device = example_01()
    corpus = single_device.to_bytes(single_device.repository_text())
    linear.set_workspace_bytes(WORKSPACE)
    logits = BATCH * LENGTH * TOKENS * 4 / 2**20
    print(f"{BATCH * LENGTH} rows of {TOKENS} tokens: {logits:.0f} MiB of logits, workspace {WORKSPACE >> 20} MiB\n")

    fused, fused_peak = train(single_device, corpus, without_logits)
    plain, plain_peak = train(single_device, corpus, through_logits)
    print("step  loss through logits  loss without")
    for step, pair in enumerate(zip(plain, fused, strict=True)):
        print(f"{step:4d}  {pair[0]:19.6f}  {pair[1]:12.6f}")
    difference = max(abs(a - b) for a, b in zip(plain, fused, strict=True))
    print(f"\nlargest difference {difference:.1e} (allowed {LOSS_TOLERANCE:.0e})")
    ok = difference <= LOSS_TOLERANCE and fused[-1] < fused[0]
    if fused_peak is not None and plain_peak is not None:
        print(f"peak memory of training: through logits {plain_peak:.0f} MiB, without {fused_peak:.0f} MiB")
        # Without: workspace and the head's gradient (33 MiB); through logits: the logits and their gradient.
        ok = ok and plain_peak > logits and fused_peak < logits / 2 + WORKSPACE / 2**20
    print("OK" if ok else "FAILED")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
