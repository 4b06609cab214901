"""Two processes share the vocabulary; both get the same bits, and each its own slice of the gradient.

    python examples/02_vocab_parallel.py

A vocabulary of 50,257 tokens, padded to 50,304 columns as Megatron does, is cut in two. Every rank computes log-prob
and entropy of 64 tokens from its 25,152 columns, and the gradient of a loss of both. Checked: the ranks' outputs are
equal bit for bit, and outputs and gradient equal those of one process that holds all the logits. Exits non-zero where a
check fails. The processes talk over gloo and find each other through a file.
"""

from __future__ import annotations

import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import ppo_ops

RANKS = 2
ROWS, VOCAB_SIZE, COLUMNS = 64, 50_257, 50_304

# Both runs compute in float32 and differ in the order of one sum a row: a few units in the last place of numbers
# below 16 (spacing 9.5e-7).
OUTPUT_TOLERANCE = 4e-6
# Gradient entries are below 1 (spacing 6e-8) and are made from outputs that differ as above.
GRADIENT_TOLERANCE = 1e-6


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """The same logits, targets and advantages on every rank."""
    generator = torch.Generator().manual_seed(0)
    logits = 3.0 * torch.randn(ROWS, COLUMNS, generator=generator)
    target = torch.randint(VOCAB_SIZE, (ROWS,), generator=generator)
    advantage = torch.randn(ROWS, generator=generator).clamp(-1.0, 1.0)
    return logits, target, advantage


def outputs_and_gradient(
    logits: Tensor, target: Tensor, advantage: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """log_prob, entropy, and the gradient of a policy-gradient loss with an entropy bonus."""
    logits.requires_grad_()
    log_prob, entropy = ppo_ops.logprob_entropy(logits, target, vocab_size=VOCAB_SIZE, group=group)
    loss = -(advantage * log_prob + 0.01 * entropy).sum()
    loss.backward()
    assert logits.grad is not None
    return log_prob.detach(), entropy.detach(), logits.grad


def same_bits_everywhere(tensor: Tensor) -> bool:
    everywhere = [torch.empty_like(tensor) for _ in range(RANKS)]
    dist.all_gather(everywhere, tensor)
    return all(torch.equal(other.view(torch.int32), tensor.view(torch.int32)) for other in everywhere)


def largest_difference(ours: Tensor, truth: Tensor) -> float:
    return (ours - truth).abs().max().item()


def run(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    logits, target, advantage = inputs()
    width = COLUMNS // RANKS
    columns = slice(rank * width, (rank + 1) * width)
    shard = logits[:, columns].clone()

    log_prob, entropy, grad = outputs_and_gradient(shard, target, advantage, dist.group.WORLD)
    same_bits = same_bits_everywhere(log_prob) and same_bits_everywhere(entropy)

    whole_log_prob, whole_entropy, whole_grad = outputs_and_gradient(logits, target, advantage, None)
    output_difference = max(largest_difference(log_prob, whole_log_prob), largest_difference(entropy, whole_entropy))
    gradient_difference = largest_difference(grad, whole_grad[:, columns])

    for turn in range(RANKS):
        dist.barrier()
        if turn != rank:
            continue
        print(f"rank {rank} holds token ids {columns.start} to {columns.stop - 1}")
        print("  log_prob", " ".join(f"{x:.6f}" for x in log_prob[:5].tolist()), "...")
        print("  entropy ", " ".join(f"{x:.6f}" for x in entropy[:5].tolist()), "...")
        print(f"  the same bits on both ranks: {'yes' if same_bits else 'NO'}")
        print(f"  largest difference from one process: outputs {output_difference:.1e}", end="")
        print(f" (allowed {OUTPUT_TOLERANCE:.0e}), gradient slice {gradient_difference:.1e}", end="")
        print(f" (allowed {GRADIENT_TOLERANCE:.0e})", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    if not same_bits or output_difference > OUTPUT_TOLERANCE or gradient_difference > GRADIENT_TOLERANCE:
        raise SystemExit(1)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(run, args=(str(Path(folder) / "store"),), nprocs=RANKS)
        except mp.ProcessExitedException as error:
            print(f"FAILED: {error}")
            return 1
    print("OK: both ranks have the same bits, and each gradient slice equals that of one process")
    return 0


if __name__ == "__main__":
    sys.exit(main())
