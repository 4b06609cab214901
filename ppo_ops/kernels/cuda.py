"""CUDA launchers: the Triton kernels, imported when the first CUDA tensor arrives."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ppo_ops.kernels import kept, launch


def vocab_stats(logits: Tensor, *args: Any) -> None:
    """See `launch.vocab_stats`."""
    from ppo_ops.kernels import triton

    launch.vocab_stats(triton, logits, *args)


def logits_grad(logits: Tensor, *args: Any) -> None:
    """See `launch.logits_grad`."""
    from ppo_ops.kernels import triton

    launch.logits_grad(triton, logits, *args)


def kept_vocab_stats(logits: Tensor, *args: Any) -> None:
    """See `kept.vocab_stats`."""
    from ppo_ops.kernels import triton

    def reduce(x: Tensor, found: kept.Entries, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
        return triton.softmax_of_entries(x, found.offsets, temperature)

    kept.vocab_stats(vocab_stats, logits, *args, reduce=reduce)


def kept_logits_grad(logits: Tensor, *args: Any) -> None:
    """See `kept.logits_grad`."""
    kept.logits_grad(logits_grad, logits, *args)
