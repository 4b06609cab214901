"""What several adapters need: an entropy without a target, and arguments that have no effect here."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from ppo_ops.functional import Group, logprob_entropy


def entropy_of(logits: Tensor, group: Group = None) -> Tensor:
    """Entropy ``[...]`` of ``logits [..., V_local]``; its backward makes no log-prob term."""
    # The operator wants a target in each row. Token 0 is in every vocabulary, and nothing is allocated a row.
    target = torch.zeros((), dtype=torch.int64, device=logits.device).expand(logits.shape[:-1])
    return logprob_entropy(logits, target, group=group)[1]


def check_chunk_size(chunk_size: int | None) -> None:
    """Raise `ValueError` for what a framework could not chunk by either. Chunks change neither bits nor memory here."""
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"chunk_size must be a positive integer, got {chunk_size!r}")


def megatron_group(tp_group: Group) -> Any:
    """`tp_group`, or for None the tensor-parallel group of Megatron's parallel state."""
    if tp_group is not None:
        return tp_group
    try:
        from megatron.core import parallel_state  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        raise ImportError("tp_group must be given where megatron-core is not installed") from error
    return parallel_state.get_tensor_model_parallel_group()


def context_parallel_size() -> int:
    """Ranks that share a sequence by Megatron's parallel state; 1 where nobody imported or initialised it."""
    state = sys.modules.get("megatron.core.parallel_state")
    group = None if state is None else state.get_context_parallel_group(check_initialized=False)
    return 1 if group is None else int(group.size())


def may_overwrite(logits: Tensor) -> bool:
    """Whether the operator takes `inplace_backward`: it refuses leaves, their views, and gaps in memory."""
    if torch.compiler.is_compiling() or not logits.requires_grad or not logits.is_contiguous():
        return False
    return not (logits.is_leaf or (logits._base is not None and logits._base.is_leaf))
