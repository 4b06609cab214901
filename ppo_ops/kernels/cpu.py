"""CPU launchers: which kernels serve which dtype.

The native kernels (`native.py`) serve float32, bfloat16 and float16 where a compiler was there at install time; the
blocked ATen kernels (`aten.py`) serve everything else, with the same semantics.
"""

from __future__ import annotations

import os
import warnings
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ppo_ops.kernels import aten, launch, native

_warned = False


def _kernels(dtype: torch.dtype) -> ModuleType:
    if native.supports(dtype):
        return native
    if not native.available() and os.environ.get("PPO_OPS_NATIVE") != "0":
        _warn_once()
    return aten


def _warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"ppo_ops uses its ATen kernels on the CPU, which are several times slower than the native ones: "
            f"{native.why_unavailable()}",
            stacklevel=2,
        )


def vocab_stats(logits: Tensor, *args: Any) -> None:
    """See `launch.vocab_stats`."""
    launch.vocab_stats(_kernels(logits.dtype), logits, *args)


def logits_grad(logits: Tensor, *args: Any) -> None:
    """See `launch.logits_grad`."""
    launch.logits_grad(_kernels(logits.dtype), logits, *args)
