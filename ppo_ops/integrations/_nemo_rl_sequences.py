"""NeMo-RL's functions of whole and packed sequences: the shift to the next token, and context parallelism.

`nemo_rl.py` is the module to import; it describes the arguments that all of them share.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ppo_ops.functional import Group, logprob
from ppo_ops.integrations._shared import check_chunk_size

_IGNORED = -100


def shard_log_prob(
    logits: Tensor, target: Tensor, vocab_start_index: int, vocab_end_index: int, group: Group, inference_only: bool
) -> Tensor:
    """Log-probability ``[...]`` of each target, from this rank's columns."""
    columns = logits.shape[-1]
    if vocab_end_index - vocab_start_index != columns:
        raise ValueError(
            f"vocab_end_index - vocab_start_index must be the {columns} columns of the logits, got "
            f"{vocab_end_index} - {vocab_start_index}"
        )
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        return logprob(logits, target, vocab_start=vocab_start_index, group=group)


def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Group,
    inference_only: bool = False,
    cp_group: Any = None,
    chunk_size: int | None = None,
    sampling_params: Any = None,
    *,
    shift_targets: bool = True,
) -> Tensor:
    """Computes the log-probability of each next token.

        out[:, t] = log_prob(target[:, t + 1] | logits[:, t])

    Args:
        vocab_parallel_logits: ``[B, S / CP, V_local]`` floating point. With context parallelism, this rank's two chunks
            of the sequence (rank r of n holds chunks r and 2n - 1 - r of 2n), padded to whole chunks.
        target: ``[B, S]`` global token ids, whole and not shifted.
        vocab_start_index, vocab_end_index, tp_group, inference_only, chunk_size: see the module.
        cp_group: the group that shares the sequence; None or a group of one: logits hold all of it.
        sampling_params: None, or NeMo-RL's with top-k and top-p off.
        shift_targets: False: ``out[:, t] = log_prob(target[:, t] | logits[:, t])``, for diffusion models.

    Returns:
        log_prob: ``[B, S - 1]``, or ``[B, S]`` without the shift; float32 (float64 for float64 logits), the same bits
        on every rank.

    Raises:
        ValueError: for vocabulary indices, a chunk_size or a sequence length that do not fit, naming them, and for
            sampling_params that filter. (`patch` leaves filtered calls to NeMo-RL.)

    Cost:
        One all-gather of 3 numbers a row in forward, none in backward; with context parallelism one more each way, of
        one number a row. The last position, which has no next token, is not read (NeMo-RL computes and drops it).

    Example:
        >>> import torch
        >>> from ppo_ops.integrations.nemo_rl import from_parallel_logits_to_logprobs
        >>> logits = torch.tensor([[[0.0, 0.0], [0.0, 2.0], [9.0, 9.0]]])
        >>> log_prob = from_parallel_logits_to_logprobs(logits, torch.tensor([[0, 1, 1]]), 0, 2, None)
        >>> print([f"{x:.4f}" for x in log_prob[0].tolist()])
        ['-0.6931', '-0.1269']

    Source:
        NeMo-RL, `nemo_rl/distributed/model_utils.py`, commits 8c6d533 and 0433dae.
    """
    check_chunk_size(chunk_size)
    _check_sampling(sampling_params)
    cp_size = 1 if cp_group is None else dist.get_world_size(cp_group)
    length, padded = target.shape[1], vocab_parallel_logits.shape[1] * cp_size
    if padded < length:
        raise ValueError(f"target must be no longer than the {padded} positions of the logits, got {length}")
    shift = int(shift_targets)
    following = torch.nn.functional.pad(target[:, shift:], (0, padded - length + shift), value=_IGNORED)
    if cp_size > 1:
        following = _own_chunks(following, dist.get_rank(cp_group), cp_size)
    log_prob = shard_log_prob(
        vocab_parallel_logits, following, vocab_start_index, vocab_end_index, tp_group, inference_only=inference_only
    )
    if cp_size > 1:
        log_prob = _GatherSequence.apply(log_prob, cp_group)  # type: ignore[no-untyped-call,unused-ignore]
    return log_prob[:, : length - shift]


def from_parallel_logits_to_logprobs_packed_sequences(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    cu_seqlens_padded: Tensor,
    unpacked_seqlen: int,
    vocab_start_index: int,
    vocab_end_index: int,
    group: Group,
    inference_only: bool = False,
    cp_group: Any = None,
    chunk_size: int | None = None,
    sampling_params: Any = None,
    target_is_pre_rolled: bool = False,
) -> Tensor:
    """Computes the log-probability of each next token of packed sequences, and unpacks them.

    Args:
        vocab_parallel_logits: ``[1, T, V_local]`` floating point, sequences one after the other.
        target: ``[1, T]`` global token ids, not shifted; with `target_is_pre_rolled` shifted by one in each sequence.
        cu_seqlens_padded: ``[B + 1]`` where each sequence begins, and where the last ends.
        unpacked_seqlen: width of the result plus 1; what is longer is cut off.
        vocab_start_index, vocab_end_index, group, inference_only, chunk_size: see the module.
        cp_group: None or a group of one; packed sequences split over ranks are not implemented.
        sampling_params: None, or NeMo-RL's with top-k and top-p off.

    Returns:
        log_prob: ``[B, unpacked_seqlen - 1]`` float32 (float64 for float64 logits); 0 behind a sequence's end.

    Raises:
        ValueError: for a `cp_group` of more than one rank; else as `from_parallel_logits_to_logprobs`.

    Cost:
        As `from_parallel_logits_to_logprobs`. `cu_seqlens_padded` stays on its device: no synchronisation (NeMo-RL: two
        a sequence).

    Example:
        >>> import torch
        >>> from ppo_ops.integrations.nemo_rl import from_parallel_logits_to_logprobs_packed_sequences
        >>> target, ends = torch.tensor([[0, 1, 1, 0, 1]]), torch.tensor([0, 2, 5])
        >>> logits = torch.zeros(1, 5, 2)
        >>> log_prob = from_parallel_logits_to_logprobs_packed_sequences(logits, target, ends, 3, 0, 2, None)
        >>> print([[f"{x:.4f}" for x in row] for row in log_prob.tolist()])
        [['-0.6931', '0.0000'], ['-0.6931', '-0.6931']]

    Source:
        NeMo-RL, `nemo_rl/distributed/model_utils.py`, commits 8c6d533 and 0433dae.
    """
    check_chunk_size(chunk_size)
    if cp_group is not None and dist.get_world_size(cp_group) > 1:
        raise ValueError(f"cp_group must be None or of one rank, got {dist.get_world_size(cp_group)} ranks")
    _check_sampling(sampling_params)
    flat = target.reshape(-1)
    starts, ends = cu_seqlens_padded[:-1], cu_seqlens_padded[1:]
    position = torch.arange(len(flat), device=flat.device)
    # A position is the last of its sequence where the next one is some sequence's end.
    last = torch.isin(position + 1, ends.to(position.dtype))
    following = flat if target_is_pre_rolled else torch.nn.functional.pad(flat[1:], (0, 1), value=_IGNORED)
    following = following.masked_fill(last, _IGNORED)
    log_prob = shard_log_prob(
        vocab_parallel_logits.squeeze(0), following, vocab_start_index, vocab_end_index, group, inference_only
    )
    column = torch.arange(unpacked_seqlen - 1, device=flat.device)
    index = starts.unsqueeze(1) + column
    inside = index < (ends - 1).unsqueeze(1)
    return torch.where(inside, log_prob[index.clamp(max=len(flat) - 1)], 0.0)


def _check_sampling(sampling_params: Any) -> None:
    """Raise `ValueError` for top-k or top-p; None, 0 and -1 turn top-k off, None and 1 top-p."""
    top_k, top_p = (getattr(sampling_params, name, None) for name in ("top_k", "top_p"))
    if (top_k is not None and top_k > 0) or (top_p is not None and top_p != 1):
        raise ValueError(
            f"sampling_params must not filter, got top_k={top_k}, top_p={top_p}; ppo_ops.logprob takes kept sets"
        )


def _own_chunks(whole: Tensor, rank: int, size: int) -> Tensor:
    """Chunks `rank` and ``2 size - 1 - rank`` of 2 size, along dimension 1."""
    chunks = whole.chunk(2 * size, 1)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], 1)


class _GatherSequence(torch.autograd.Function):
    """All ranks' chunks in the order of the sequence. Its backward adds up the upstream gradients of all ranks, as
    NeMo-RL does: there each rank's loss is its share of the whole."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own.contiguous(), group=group)
        heads, tails = zip(*(part.chunk(2, 1) for part in parts), strict=True)
        return torch.cat([*heads, *reversed(tails)], 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return _own_chunks(grad, dist.get_rank(ctx.group), dist.get_world_size(ctx.group)), None
