"""GRPO on a Megatron GPT, on the CPU: kept sets of the rollout replayed in training, the loss compiled as one graph.

    python examples/04_grpo_megatron.py                      two tensor-parallel ranks, under three minutes on two cores
    python examples/04_grpo_megatron.py --tp 1 --seed 7 --out runs/b
    python examples/04_grpo_megatron.py --no-replay          as frameworks do that drop the kept sets
    python examples/04_grpo_megatron.py --kill-at 25         dies in the middle of a step; then go on with --resume
    python examples/04_grpo_megatron.py --compare runs/a runs/b

Runs with another number of ranks agree to 1e-7 until a rounding tips one sampled token, which in float32 happens after
a dozen steps; with --float64 it does not happen.

A two-layer GPT learns to sort digits: demonstrations until one answer in eight is right, then reinforcement. A step
samples 8 answers to each of 32 prompts with top-p 0.9 and takes two optimizer steps on them, with

    ratio = exp(log_prob - old_log_prob)        A = (reward - mean of the 8) / std of the 8
    loss  = token mean of -min(ratio A, clip(ratio, 0.8, 1.28) A) + beta KL(policy || reference) - c entropy

The engine samples from a kept set, so old_log_prob is normalised over it. With the same set in training, the first
update's ratio is 1; without, it is off by the tail's probability. log_prob comes straight from the model's
vocabulary-parallel logits: one all-gather of six numbers a token, and prompt tokens (`ignore_index`) are not read.

Checked, with exit status 1 where it fails: the first step's ratio is 1 within 1e-5 for every token (with the replay);
no graph is compiled after the third step; all ranks end with the same replicated weights; a full run starts below a
reward of 0.3 and ends above 0.8. Needs megatron-core, and matplotlib for the plot.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from grpo_megatron import records
from grpo_megatron.rollout import (
    ANSWER,
    IGNORE,
    PROMPT,
    VOCAB_SIZE,
    Rollout,
    draw_demonstrations,
    draw_problems,
    sample,
)
from torch import Tensor, nn
from torch._dynamo.utils import counters

import ppo_ops
from ppo_ops import losses

LAYERS, HIDDEN, HEADS = 2, 128, 4
TOP_P, SAMPLES, UPDATES = 0.9, 8, 2
CLIP_LOW, CLIP_HIGH, DUAL_CLIP, BETA, ENTROPY_BONUS = 0.2, 0.28, 3.0, 0.01, 3e-4
WARM_UP_RATE, WARM_UP_REWARD, RATE, MAX_NORM = 5e-4, 0.125, 3e-4, 1.0
STEPS = 120  # the rate falls linearly to a tenth over them

# Rollout and training run the same float32 model on sequences of other lengths: log-probs differ by some roundings.
RATIO_TOLERANCE = 1e-5


class GRPOLoss(nn.Module):
    """Everything from the logits to the loss; also the token means of what is worth watching."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(
        self,
        logits: Tensor,
        target: Tensor,
        old_log_prob: Tensor,
        ref_log_prob: Tensor,
        advantage: Tensor,
        keep_ids: Tensor | None,
        keep_offsets: Tensor | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        log_prob, entropy = ppo_ops.logprob_entropy(
            logits, target, keep_ids=keep_ids, keep_offsets=keep_offsets, ignore_index=IGNORE, group=self.group
        )
        mask = target != IGNORE
        log_ratio = log_prob - old_log_prob
        policy = losses.clipped_policy_loss(
            log_ratio, advantage, clip_low=CLIP_LOW, clip_high=CLIP_HIGH, dual_clip=DUAL_CLIP
        )
        kl = losses.kl_estimate(log_prob, ref_log_prob)
        loss = losses.token_mean(policy + BETA * kl - ENTROPY_BONUS * entropy, mask)
        off = torch.where(mask, (log_ratio.exp() - 1.0).abs(), 0.0).detach()
        means = {"entropy": losses.token_mean(entropy, mask).detach(), "kl": losses.token_mean(kl, mask).detach()}
        return loss, {**means, "ratio_off": off.max(), "moved": losses.token_mean(off, mask)}


class Trainer:
    """One rank: the policy, the frozen reference, the optimizer, and the generator that all ranks share."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from grpo_megatron.model import Policy, start_megatron

        self.arguments = arguments
        self.group = start_megatron()
        torch.manual_seed(arguments.seed)
        self.generator = torch.Generator().manual_seed(arguments.seed)
        shape = (VOCAB_SIZE, PROMPT + ANSWER, LAYERS, HIDDEN, HEADS)
        self.policy, self.reference = (Policy(*shape).to(arguments.dtype) for _ in range(2))
        self.reference.requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)
        self.loss = GRPOLoss(self.group)
        self.compiled_loss = self.loss if arguments.eager else torch.compile(self.loss, fullgraph=True)
        self.log: dict[str, Any] = {"seed": arguments.seed, "tp": arguments.tp, "replay": arguments.replay, "steps": []}

    def rollout(self, prompts: int, samples: int) -> Rollout:
        problems = draw_problems(prompts, self.generator)
        return sample(self.policy, problems, samples, TOP_P, self.generator, self.group)

    def optimize(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        self._clip_gradients()
        optimizer.step()

    def _clip_gradients(self) -> None:
        """By the norm over the whole model: slices of all ranks, replicated weights once."""
        squares = {sharded: torch.zeros((), dtype=self.arguments.dtype) for sharded in (True, False)}
        for parameter in self.policy.parameters():
            squares[_is_sharded(parameter)] += parameter.grad.square().sum()
        dist.all_reduce(squares[True], group=self.group)
        norm = (squares[True] + squares[False]).sqrt()
        torch._foreach_mul_([p.grad for p in self.policy.parameters()], (MAX_NORM / norm).clamp(max=1.0))

    def warm_up(self, say: Callable[[str], None]) -> None:
        """Demonstrations until some sampled answers are right, so that there is something to reinforce."""
        optimizer = torch.optim.AdamW(self.policy.parameters(), lr=WARM_UP_RATE, betas=(0.9, 0.98), weight_decay=0.0)
        step, reward = 0, 0.0
        while step < self.arguments.warm_up and reward < WARM_UP_REWARD:
            tokens, target = draw_demonstrations(64, self.generator)
            log_prob = ppo_ops.logprob(self.policy(tokens), target, ignore_index=IGNORE, group=self.group)
            self.optimize(optimizer, losses.token_mean(-log_prob, target != IGNORE))
            step += 1
            if step % 5 == 0:
                reward = self.rollout(128, 1).reward.mean().item()
        self.reference.load_state_dict(self.policy.state_dict())
        say(f"warm-up: {step} steps, reward {reward:.3f}")

    def step(self) -> dict[str, Any]:
        """One rollout and `UPDATES` optimizer steps on it."""
        begin, number = time.perf_counter(), len(self.log["steps"])
        batch = self.rollout(self.arguments.prompts, SAMPLES)
        mask = batch.target != IGNORE
        kept = (batch.keep_ids, batch.keep_offsets) if self.arguments.replay else (None, None)
        if self.arguments.replay:
            torch._dynamo.mark_dynamic(
                batch.keep_ids, 0
            )  # the sets' total size is another each step: one graph for all
        advantage = losses.group_normalized_advantage(batch.reward, SAMPLES).unsqueeze(1)
        with torch.no_grad():
            ref_log_prob = ppo_ops.logprob(
                self.reference(batch.tokens),
                batch.target,
                None,
                keep_ids=kept[0],
                keep_offsets=kept[1],
                group=self.group,
            )
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * max(0.1, 1.0 - 0.9 * number / STEPS)
        fixed = (batch.target, batch.log_prob, ref_log_prob, advantage, *kept)
        row: dict[str, Any] = {"step": number, "reward": batch.reward.mean().item()}
        for update in range(UPDATES):
            logits = self.policy(batch.tokens)
            loss, seen = self.compiled_loss(logits, *fixed)
            if update == 0:
                row |= {"loss": loss.item(), **{name: value.item() for name, value in seen.items() if name != "moved"}}
                with torch.no_grad():
                    whole = ppo_ops.logprob(logits, batch.target, group=self.group)
                off = ((whole - batch.log_prob).exp() - 1.0).abs()
                row["ratio_off_without_replay"] = off[mask].max().item()
            if update == UPDATES - 1:
                row["ratio_moved"] = seen["ratio_off"].item()
                row["ratio_moved_mean"] = seen["moved"].item()
            if number == self.arguments.kill_at and update == UPDATES - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            self.optimize(self.optimizer, loss)
        row["kept"] = len(batch.keep_ids) / int(mask.sum())
        row["graphs"] = counters["stats"]["unique_graphs"]
        row["seconds"] = time.perf_counter() - begin
        row["example"] = batch.example
        return row

    def state(self) -> dict[str, Any]:
        parts = {"policy": self.policy, "reference": self.reference, "optimizer": self.optimizer}
        saved: dict[str, Any] = {name: part.state_dict() for name, part in parts.items()}
        return {**saved, "generator": self.generator.get_state(), "log": self.log}

    def restore(self, state: dict[str, Any]) -> None:
        self.policy.load_state_dict(state["policy"])
        self.reference.load_state_dict(state["reference"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.log = state["log"]

    def replicated_weights_agree(self) -> bool:
        for parameter in self.policy.parameters():
            if not _is_sharded(parameter):
                others = [torch.empty_like(parameter) for _ in range(self.group.size())]
                dist.all_gather(others, parameter.detach(), group=self.group)
                if not all(torch.equal(parameter, other) for other in others):
                    return False
        return True


def _is_sharded(parameter: nn.Parameter) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def train(trainer: Trainer, say: Callable[[str], None]) -> None:
    arguments, begin = trainer.arguments, time.perf_counter()
    checkpoint = records.newest_checkpoint(arguments.out) if arguments.resume else None
    if checkpoint is not None:
        trainer.restore(records.load_checkpoint(checkpoint))
        say(f"resumed from {checkpoint}")
    else:
        trainer.warm_up(say)
        records.save_checkpoint(arguments.out, 0, trainer.state())
    steps: list[dict[str, Any]] = trainer.log["steps"]
    while len(steps) < arguments.steps:
        row = trainer.step()
        steps.append(row)
        say(
            f"step {row['step']:3d}  reward {row['reward']:.3f}  loss {row['loss']:+.5f}  "
            f"entropy {row['entropy']:.3f}  kl {row['kl']:.4f}  "
            f"|ratio-1| {row['ratio_off']:.1e} then {row['ratio_moved_mean']:.1e}  "
            f"kept {row['kept']:.1f}  {row['seconds']:.2f} s  {row['example']}"
        )
        if len(steps) % arguments.save_every == 0:
            records.save_checkpoint(arguments.out, len(steps), trainer.state())
    say(f"{len(steps)} steps; {time.perf_counter() - begin:.0f} s in this process")


def report(trainer: Trainer, say: Callable[[str], None]) -> bool:
    """Whether everything that the head of this file lists came true; writes the log and the plot."""
    arguments, log = trainer.arguments, trainer.log
    steps = log["steps"]
    agree = trainer.replicated_weights_agree()
    parameters: list[str] = [""] * arguments.tp
    dist.all_gather_object(parameters, records.fingerprint(trainer.policy), group=trainer.group)
    log["parameters"] = parameters
    first, last, late = steps[0], steps[-10:], [row["graphs"] for row in steps[2:]]
    start, end = first["reward"], sum(row["reward"] for row in last) / len(last)
    # A resumed process compiles anew, at its own first step, so only the steps of one process tell.
    recompiled = not (arguments.eager or arguments.resume) and len(set(late)) > 1
    exact = first["ratio_off"] <= RATIO_TOLERANCE
    learned = start < 0.3 and end > 0.8
    worst = max(row["ratio_off"] for row in steps)
    without = first["ratio_off_without_replay"]
    say(
        f"first step, greatest |ratio - 1| of any token: {first['ratio_off']:.1e} as trained, {without:.1e} without "
        f"the kept sets; as trained at any later step's first update: {worst:.1e}"
    )
    say(f"mean reward: {start:.3f} at the first step, {end:.3f} over the last {len(last)}")
    say(f"graphs compiled: {steps[-1]['graphs']}" + (", some after the third step" if recompiled else ""))
    say(f"replicated weights equal on all ranks: {agree}")
    say("parameters of each rank: " + " ".join(digest[:16] for digest in parameters))
    if dist.get_rank() == 0:
        records.write_log(arguments.out / "log.json", log)
        drawn = records.draw(arguments.out / "grpo.png", log)
        say(f"wrote {arguments.out}/log.json" + (" and grpo.png" if drawn else "; no plot without matplotlib"))
    full = arguments.replay and arguments.steps >= STEPS
    return agree and not recompiled and (exact or not arguments.replay) and (learned or not full)


def run(rank: int, arguments: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="megatron")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=arguments.tp, timeout=timedelta(seconds=240)
    )

    def say(line: str) -> None:
        if rank == 0:
            print(line, flush=True)

    trainer = Trainer(arguments)
    train(trainer, say)
    ok = report(trainer, say)
    dist.barrier()
    dist.destroy_process_group()
    if not ok:
        raise SystemExit(1)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GRPO on a tensor-parallel Megatron GPT, on the CPU")
    parser.add_argument("--tp", type=int, default=2, choices=(1, 2, 4), help="ranks that share the vocabulary")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS, help="rollouts, each with two optimizer steps")
    parser.add_argument("--prompts", type=int, default=32, help="prompts a step")
    parser.add_argument("--warm-up", type=int, default=200, help="most supervised steps")
    parser.add_argument("--eager", action="store_true", help="do not compile the loss")
    parser.add_argument("--float64", dest="dtype", action="store_const", default=torch.float32, const=torch.float64)
    parser.add_argument("--no-replay", dest="replay", action="store_false", help="train without the kept sets")
    parser.add_argument("--out", type=Path, default=Path("build/grpo"), help="folder for log, plot and checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--kill-at", type=int, default=-1, help="kill all ranks in the middle of this step")
    parser.add_argument("--compare", type=Path, nargs=2, metavar="FOLDER", help="compare two runs instead")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="of the loss in --compare; 0: the same bits")
    return parser.parse_args(arguments)


def main() -> int:
    arguments = parse()
    if arguments.compare:
        return 0 if records.compare(*arguments.compare, steps=20, tolerance=arguments.tolerance) else 1
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not arguments.resume:
        records.remove_checkpoints(arguments.out)
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(run, args=(arguments, str(Path(folder) / "store")), nprocs=arguments.tp)
        except mp.ProcessExitedException as error:
            print(f"FAILED: {error}")
            return 1
    print("OK")
    return 0


if __name__ == "__main__":
    sys.exit(main())
