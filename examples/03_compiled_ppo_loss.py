"""The clipped PPO loss with an entropy bonus, from vocabulary-parallel logits, compiled as one graph.

    python examples/03_compiled_ppo_loss.py            two ranks
    python examples/03_compiled_ppo_loss.py --ranks 1

    ratio = exp(log_prob - old_log_prob)
    loss  = mean( -min(ratio A, clip(ratio, 1 - eps, 1 + eps) A) - beta entropy )

`torch.compile(fullgraph=True)` takes the whole loss; Inductor fuses everything around the operator. Checked on every
rank: the loss and this rank's slice of its gradient equal plain torch in float64 on the whole vocabulary; forward ran
one collective (none on one rank), backward none; a graph from `torch.export` keeps the operator as one node. Exits
non-zero where a check fails. A first run compiles for some tens of seconds and needs a C++ compiler, as Inductor does
on the CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import ppo_ops
from ppo_ops import reference

ROWS, VOCAB_SIZE = 64, 8192
CLIP, BETA = 0.2, 0.01

# The loss is a float32 mean of terms below 2 (spacing 1.2e-7); ratios carry the rounding of log-probs near 9.
LOSS_TOLERANCE = 2e-6
# Gradient entries are below 1.2 / ROWS = 0.02 (spacing 1.9e-9), with the relative rounding of the ratio, about 1e-6.
GRADIENT_TOLERANCE = 1e-7


def clipped_loss(log_prob: Tensor, entropy: Tensor, old_log_prob: Tensor, advantage: Tensor) -> Tensor:
    ratio = (log_prob - old_log_prob).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return (-surrogate - BETA * entropy).mean()


class PPOLoss(nn.Module):
    """logits ``[N, V_local]``, target, old_log_prob and advantage ``[N]`` -> scalar loss."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, logits: Tensor, target: Tensor, old_log_prob: Tensor, advantage: Tensor) -> Tensor:
        log_prob, entropy = ppo_ops.logprob_entropy(logits, target, group=self.group)
        return clipped_loss(log_prob, entropy, old_log_prob, advantage)


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same on every rank. The policy has moved a little since the samples were drawn, so some ratios clip."""
    generator = torch.Generator().manual_seed(0)
    logits = 2.0 * torch.randn(ROWS, VOCAB_SIZE, generator=generator)
    target = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
    log_prob, _ = reference.logprob_entropy(logits, target)
    old_log_prob = log_prob.float() + 0.2 * torch.randn(ROWS, generator=generator)
    advantage = torch.randn(ROWS, generator=generator).clamp(-1.0, 1.0)
    return logits, target, old_log_prob, advantage


def collectives_of(call: Callable[[], Any]) -> list[str]:
    """Names of the collectives that a call runs, as the profiler saw them."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        call()
    names = [event.name for event in profiled.events()]
    return [name for name in names if name.startswith("_c10d_functional::") and "wait_tensor" not in name]


def check(rank: int, group: dist.ProcessGroup) -> tuple[list[str], bool]:
    """Lines to print, and whether all is as promised."""
    ranks = dist.get_world_size(group)
    logits, target, old_log_prob, advantage = inputs()
    columns = slice(rank * VOCAB_SIZE // ranks, (rank + 1) * VOCAB_SIZE // ranks)
    shard = logits[:, columns].clone().requires_grad_()
    module = PPOLoss(group)
    arguments = (shard, target, old_log_prob, advantage)

    compiled = torch.compile(module, fullgraph=True)
    compiled(*arguments).backward()  # compiles
    shard.grad = None
    loss: list[Tensor] = []
    in_forward = collectives_of(lambda: loss.append(compiled(*arguments)))
    in_backward = collectives_of(lambda: loss[0].backward())

    exact_logits = logits.double().requires_grad_()
    exact_loss = clipped_loss(
        *reference.logprob_entropy(exact_logits, target), old_log_prob.double(), advantage.double()
    )
    (exact_grad,) = torch.autograd.grad(exact_loss, exact_logits)
    loss_error = (loss[0].double() - exact_loss).abs().item()
    grad_error = (shard.grad.double() - exact_grad[:, columns]).abs().max().item()

    exported = torch.export.export(module, arguments)
    nodes = [node for node in exported.graph.nodes if str(node.target).startswith("ppo.")]

    ok = (
        in_forward == ["_c10d_functional::all_gather_into_tensor"] * (ranks > 1)
        and in_backward == []
        and [str(node.target) for node in nodes] == ["ppo.logprob_entropy.default"]
        and loss_error <= LOSS_TOLERANCE
        and grad_error <= GRADIENT_TOLERANCE
    )
    lines = [
        f"rank {rank} of {ranks}: loss {loss[0].item():.6f}, float64 on the whole vocabulary {exact_loss.item():.6f}",
        f"  difference {loss_error:.1e} (allowed {LOSS_TOLERANCE:.0e}), "
        f"gradient {grad_error:.1e} (allowed {GRADIENT_TOLERANCE:.0e})",
        " ".join(["  collectives in forward: ", str(len(in_forward)), *in_forward]),
        " ".join(["  collectives in backward:", str(len(in_backward)), *in_backward]),
        *(f"  node in the exported graph: {node.format_node()}" for node in nodes),
    ]
    return lines, ok


def run(rank: int, ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=240)
    )
    lines, ok = check(rank, dist.group.WORLD)
    for turn in range(ranks):
        dist.barrier()
        if turn == rank:
            print("\n".join(lines), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    if not ok:
        raise SystemExit(1)


def main() -> int:
    parser = argparse.ArgumentParser(description="clipped PPO loss from vocabulary-parallel logits, compiled")
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2))
    ranks = parser.parse_args().ranks
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # for the processes started below: no log lines of the profiler
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(run, args=(ranks, str(Path(folder) / "store")), nprocs=ranks)
        except mp.ProcessExitedException as error:
            print(f"FAILED: {error}")
            return 1
    print("OK: one compiled graph, " + ("one collective" if ranks > 1 else "no collective"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
