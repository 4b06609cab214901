"""Kept sets as ragged rows: conversions, and the set that an engine's top-p / top-k sampling keeps.

A kept set is ``keep_ids [M]`` and ``keep_offsets [N + 1]`` (CSR): row ``i`` keeps
``keep_ids[keep_offsets[i] : keep_offsets[i + 1]]``; an empty row is unrestricted. Plain helpers for one rank that holds
the whole vocabulary; they read sizes on the host. `as_tensors` is what lets the Python functions take a set as a jagged
nested tensor or as lists.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def keep_sets_from_mask(keep_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Lists the kept columns of each row of a mask.

    A row that keeps nothing becomes an empty row, and an empty row is unrestricted; as a mask it would have kept the
    target alone.

    Args:
        keep_mask: ``[..., V]`` bool, True keeps.

    Returns:
        keep_ids ``[M]`` int32, increasing within a row, and keep_offsets ``[N + 1]`` int64.

    Cost:
        One pass over the mask; synchronises the device.

    Example:
        >>> import torch, ppo_ops
        >>> ids, offsets = ppo_ops.keep_sets_from_mask(torch.tensor([[True, False, True], [False, True, False]]))
        >>> ids.tolist(), offsets.tolist()
        ([0, 2, 1], [0, 2, 3])
    """
    rows = keep_mask.reshape(keep_mask.shape[:-1].numel(), keep_mask.shape[-1])
    keep_ids = rows.nonzero()[:, 1].to(torch.int32)
    return keep_ids, _offsets(rows.sum(-1))


def keep_sets_to_mask(keep_ids: Tensor, keep_offsets: Tensor, vocab_size: int) -> Tensor:
    """Expands ragged rows to a mask; an empty row, which is unrestricted, becomes all True.

    Args:
        keep_ids: ``[M]`` int32 or int64.
        keep_offsets: ``[N + 1]`` int32 or int64.
        vocab_size: V, the number of columns.

    Returns:
        ``[N, V]`` bool.

    Raises:
        IndexError: on the CPU, an id outside ``[0, V)``.

    Cost:
        N V bytes.

    Example:
        >>> import torch, ppo_ops
        >>> ppo_ops.keep_sets_to_mask(torch.tensor([2, 0]), torch.tensor([0, 2, 2]), 3).tolist()
        [[True, False, True], [True, True, True]]
    """
    sizes = keep_offsets.diff()
    row = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes, output_size=len(keep_ids))
    mask = (sizes == 0).unsqueeze(1).repeat(1, vocab_size)
    ids = keep_ids.to(torch.int64)
    mask[row, ids.where(ids >= 0, vocab_size)] = True  # a negative index would count from the end
    return mask


def top_p_keep_sets(logits: Tensor, top_p: float, top_k: int | None = None) -> tuple[Tensor, Tensor]:
    """Lists what top-k and then top-p sampling keeps of each row.

    Top-k keeps the k largest logits. Top-p keeps the fewest most probable ones whose probability, renormalised over
    what top-k left, reaches `top_p`; at least one. Ties go to the smaller id.

    Args:
        logits: ``[..., V]`` floating point, already divided by the sampling temperature.
        top_p: in (0, 1].
        top_k: at least 1, or None for no limit.

    Returns:
        keep_ids ``[M]`` int32, most probable first, and keep_offsets ``[N + 1]`` int64. A row that keeps the whole
        vocabulary is listed in full.

    Raises:
        ValueError: top_p or top_k out of range.

    Cost:
        Sorts each row; a few float32 tensors of the size of the logits. Synchronises the device.

    Example:
        >>> import torch, ppo_ops
        >>> ids, offsets = ppo_ops.top_p_keep_sets(torch.tensor([[0.0, 3.0, 2.0, -4.0]]), 0.9)
        >>> ids.tolist(), offsets.tolist()
        ([1, 2], [0, 2])

    Source:
        Holtzman et al., arXiv:1904.09751 (nucleus sampling).
    """
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1 or None, got {top_k}")
    rows = logits.detach().reshape(logits.shape[:-1].numel(), logits.shape[-1]).float()
    values, ids = rows.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        values, ids = values[:, :top_k], ids[:, :top_k]
    probabilities = values.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    kept = (before < top_p) & (values > -torch.inf)
    if top_p == 1.0:
        kept = values > -torch.inf
    kept[:, :1] = True
    return ids[kept].to(torch.int32), _offsets(kept.sum(-1))


def _offsets(sizes: Tensor) -> Tensor:
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).to(torch.int64)


def as_tensors(keep_ids: Any, keep_offsets: Tensor | None, target: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the ids and offsets that the operators take, from any way to give a kept set.

    Args:
        keep_ids: ``[M]`` (then keep_offsets belongs to it and both are returned as they are); a jagged nested tensor
            ``[N, j]``; or N lists of ids, 1-D int32 or int64 tensors or NumPy arrays, one a row of target in its order.
        keep_offsets: None for a nested tensor and for lists, which say themselves where rows begin.
        target: ``[...]``, N elements; lists are copied to its device.

    Returns:
        keep_ids ``[M]`` and keep_offsets ``[N + 1]``. Of a nested tensor the parts themselves, without a copy; of lists
        new int64 tensors.

    Raises:
        TypeError: keep_ids of another kind; lists while a compiler traces.
        ValueError: keep_offsets beside a nested tensor or lists; a nested tensor that is not ``[N, j]``; another number
            of lists than N.
    """
    if isinstance(keep_ids, Tensor):
        return _of_nested(keep_ids, keep_offsets) if keep_ids.is_nested else (keep_ids, keep_offsets)
    if not isinstance(keep_ids, (list, tuple)):
        raise TypeError(
            f"keep_ids must be a tensor, a jagged nested tensor or one list of ids a row, got {type(keep_ids)}"
        )
    if keep_offsets is not None:
        raise ValueError("keep_offsets must be None where keep_ids is one list of ids a row, got both")
    if torch.compiler.is_compiling():
        raise TypeError(
            "keep_ids must be a tensor or a jagged nested tensor under torch.compile, got a list, whose ids would be "
            "constants of the graph"
        )
    rows = [_of_row(row, index).to(target.device) for index, row in enumerate(keep_ids)]
    if len(rows) != target.numel():
        raise ValueError(f"keep_ids must be one list for each of target's {target.numel()} rows, got {len(rows)} lists")
    offsets = torch.tensor([0, *(len(row) for row in rows)], device="cpu").cumsum(0)
    return torch.cat([target.new_empty(0, dtype=torch.int64), *rows]), offsets.to(target.device)


def _of_nested(keep_ids: Any, keep_offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    if keep_offsets is not None:
        raise ValueError("keep_offsets must be None where keep_ids is a nested tensor, got both")
    if keep_ids.layout != torch.jagged:
        raise ValueError(f"keep_ids must have layout torch.jagged where it is nested, got {keep_ids.layout}")
    if keep_ids.dim() != 2 or keep_ids._ragged_idx != 1:
        raise ValueError(f"keep_ids must have the shape [N, j] with ragged j where it is nested, got {keep_ids.shape}")
    if keep_ids.lengths() is not None:  # a view that leaves holes between its rows
        keep_ids = keep_ids.contiguous()
    return keep_ids.values(), keep_ids.offsets()


def _of_row(row: Any, index: int) -> Tensor:
    """One row's ids, ``[m]`` int64."""
    ids = row if isinstance(row, Tensor) else torch.as_tensor(row, device="cpu")
    if not ids.numel():
        ids = ids.to(torch.int64)
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"keep_ids[{index}] must be a list of ids or a 1-D int32 or int64 tensor, got {ids.dtype} of shape "
            f"{tuple(ids.shape)}"
        )
    return ids.to(torch.int64)
