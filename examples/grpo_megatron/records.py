"""What a run leaves on disk: checkpoints that are whole or absent, a JSON log, a plot."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

KEPT_CHECKPOINTS = 2


def save_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Writes one file a rank into a folder that gets its name only when all of them are on disk."""
    final = folder / f"step_{step:06d}"
    partial = final.with_suffix(".partial")
    partial.mkdir(parents=True, exist_ok=True)
    with open(partial / f"rank_{dist.get_rank()}.pt", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    dist.barrier()
    if dist.get_rank() == 0:
        partial.rename(final)
        for old in _complete(folder)[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(old)
    dist.barrier()


def _complete(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step_*") if path.suffix != ".partial")


def newest_checkpoint(folder: Path) -> Path | None:
    return complete[-1] if (complete := _complete(folder)) else None


def remove_checkpoints(folder: Path) -> None:
    """Of an earlier run in the same folder."""
    for old in folder.glob("step_" + "[0-9]" * 6 + "*"):
        shutil.rmtree(old)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """This rank's state; a checkpoint belongs to one number of ranks."""
    if (files := len(list(path.iterdir()))) != dist.get_world_size():
        raise SystemExit(f"{path} was written by {files} ranks, not {dist.get_world_size()}")
    return torch.load(path / f"rank_{dist.get_rank()}.pt")


def fingerprint(module: nn.Module) -> str:
    """SHA-256 of this rank's parameters, bit for bit."""
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def write_log(path: Path, log: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(log, indent=1) + "\n")
    os.replace(partial, path)


def compare(first: Path, second: Path, steps: int, tolerance: float) -> bool:
    """Prints how far two runs are apart: their losses over the first `steps` steps, and their final parameters."""
    a, b = (json.loads((folder / "log.json").read_text()) for folder in (first, second))
    pairs = list(zip(a["steps"][:steps], b["steps"][:steps], strict=True))
    loss = max(abs(x["loss"] - y["loss"]) for x, y in pairs)
    same_samples = sum(x["reward"] == y["reward"] for x, y in pairs)
    near = loss <= tolerance
    print(f"largest difference of the loss over {len(pairs)} steps: {loss:.2e} (allowed {tolerance:.0e})")
    print(f"steps with the same mean reward: {same_samples} of {len(pairs)}")
    if a["tp"] == b["tp"]:
        print(f"final parameters, bit for bit: {'same' if a['parameters'] == b['parameters'] else 'different'}")
        near = near and (a["parameters"] == b["parameters"] or tolerance > 0)
    return near


def draw(path: Path, log: dict[str, Any]) -> bool:
    """Reward, entropy, KL and ratio against the step; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = log["steps"]
    x = [row["step"] for row in steps]

    def column(name: str) -> list[float]:
        return [row[name] for row in steps]

    figure, ((reward, entropy), (kl, ratio)) = plt.subplots(2, 2, figsize=(10, 6), sharex=True, layout="constrained")
    reward.plot(x, column("reward"), color="black")
    reward.set(title="share of right answers", ylim=(0, 1))
    entropy.plot(x, column("entropy"), color="#0072B2")
    entropy.set(title="entropy, nats a token", ylim=(0, None))
    kl.plot(x, column("kl"), color="#009E73")
    kl.set(title="KL to the reference (k3), nats a token", ylim=(0, None), xlabel="step")
    ratio.plot(x, column("ratio_off"), color="black", label="first update, as trained")
    ratio.plot(x, column("ratio_off_without_replay"), color="#D55E00", label="first update, without the kept sets")
    ratio.plot(x, column("ratio_moved"), color="#0072B2", linestyle=":", label="last update, as trained")
    ratio.set(title="greatest |ratio - 1|", yscale="log", xlabel="step")
    ratio.legend()
    for axis in (reward, entropy, kl, ratio):
        axis.grid(alpha=0.3)
    figure.suptitle(f"GRPO, seed {log['seed']}, {log['tp']} rank(s)")
    figure.savefig(path, dpi=110)
    return True
