"""Process groups by name, and this rank's slice of the vocabulary.

Note [No rank in a graph]
    Two ranks trace the same Dynamo graph, and the AOTAutograd cache is keyed by it. If `rank * V_local` were computed
    while tracing, the artifact of one rank would be handed to another, whose gradient would then be silently wrong. So
    only the group's name enters a graph, and `shard` asks for the rank inside the kernels, when they run. The group's
    size does enter (the all-gather's shape needs it), so the stage checks at run time that it still holds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist


def resolve(group_name: str) -> Any:
    """The process group registered under this name; `ValueError` where there is none."""
    if not dist.is_available():
        raise ValueError(f"group_name={group_name!r}: this build of torch has no torch.distributed")
    from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

    try:
        return _resolve_process_group(group_name)  # type: ignore[arg-type]
    except (RuntimeError, KeyError, ValueError) as error:
        raise ValueError(
            f"group_name must be the name of an initialized process group of this rank, or '' when logits hold the "
            f"whole vocabulary; got {group_name!r}"
        ) from error


def group_size(group_name: str) -> int:
    """Number of ranks that share the vocabulary; 1 for the empty name."""
    return int(resolve(group_name).size()) if group_name else 1


class Shard(NamedTuple):
    """This rank's part of the vocabulary: global ids `start` to `start + columns`; `end` is V, or None if unknown."""

    start: int
    columns: int
    end: int | None


def shard(
    logits: torch.Tensor, vocab_size: int | None, vocab_start: int | None, group_name: str, traced_size: int | None
) -> Shard:
    """Locate this rank's shard at run time (see Note [No rank in a graph])."""
    rank, size = 0, 1
    if group_name:
        group = resolve(group_name)
        rank, size = group.rank(), group.size()
    if traced_size is not None and traced_size != size:
        raise RuntimeError(
            f"this graph was compiled for a group of {traced_size} ranks, but group {group_name!r} has {size}: the "
            f"artifact comes from a compile cache of a run of another size; give each size its own cache folder "
            f"(TORCHINDUCTOR_CACHE_DIR)"
        )
    width = logits.shape[-1]
    start = rank * width if vocab_start is None else int(vocab_start)
    end = vocab_size
    if end is None and vocab_start is None:
        end = size * width
    columns = width if vocab_size is None else max(0, min(width, vocab_size - start))
    return Shard(start, columns, end)
