"""slime's `calculate_log_probs_and_entropy` and `get_log_probs_and_entropy`, computed by `torch.ops.ppo`.

    log_prob = z_target - log sum_{v kept} e^z_v        entropy = log sum_v e^z_v - sum_v p_v z_v        (nats)

To use them, `ppo_ops.integrations.patch("slime")`, which replaces the functions of the same name in
`slime.utils.ppo_utils` and `slime.backends.megatron_utils.loss` and wherever slime imported them. slime itself is not
imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ppo_ops.functional import Group, logprob, logprob_entropy
from ppo_ops.integrations._shared import context_parallel_size, megatron_group

_IGNORE = -100


def calculate_log_probs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    tp_group: Group,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: Tensor | None = None,
    with_entropy_grad: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Computes the log-probability of each token and, if wanted, the entropy of each row.

    Args:
        logits: ``[N, V_local]`` floating point, already divided by the temperature, as slime does; not modified.
        tokens: ``[N]`` any integer dtype, global token ids.
        tp_group: ProcessGroup (1-D DeviceMesh, name) that shares the vocabulary. None: logits hold all of it, also
            where `torch.distributed` is initialized; slime takes the world group then.
        with_entropy: whether to compute the entropy.
        chunk_size: has no effect. slime bounds the memory of a forward pass with it; here forward makes nothing of
            the size of the logits, so every value gives the same bits at the same cost.
        log_prob_keep_mask: ``[N, V_local]`` bool, True keeps. Restricts log_prob alone; the token is always kept.
        with_entropy_grad: False gives an entropy that does not require grad.

    Returns:
        log_prob: ``[N, 1]`` float32 (float64 for float64 logits); ``[0]`` for N = 0, with a grad_fn like any other.
        entropy: ``[N]`` in the same dtype, or None without `with_entropy`.

    Raises:
        ValueError: naming the shape expected and the one that came, for logits that are not 2-D.
        TypeError, ValueError, IndexError: as `ppo_ops.logprob_entropy`.

    Cost:
        One all-gather of 3 numbers a row (4 with entropy, 6 with entropy and a mask, none for one rank) in forward,
        none in backward. Saves the logits themselves and as many numbers a row.

    Example:
        >>> import torch
        >>> from ppo_ops.integrations.slime import calculate_log_probs_and_entropy
        >>> logits, tokens = torch.zeros(2, 4), torch.tensor([0, 3])
        >>> log_prob, entropy = calculate_log_probs_and_entropy(logits, tokens, None, with_entropy=True)
        >>> print(tuple(log_prob.shape), tuple(entropy.shape), f"{log_prob[0].item():.4f} {entropy[0].item():.4f}")
        (2, 1) (2,) -1.3863 1.3863

    Source:
        Signature and shapes of slime's `slime/utils/ppo_utils.py` since its pull request 2144, which 0.3.1 contains.
    """
    if logits.dim() != 2:
        raise ValueError(f"logits must have the shape [N, V_local], got {tuple(logits.shape)}")
    entropy = None
    if with_entropy:
        log_prob, entropy = logprob_entropy(logits, tokens, log_prob_keep_mask, group=tp_group)
        if not with_entropy_grad:
            entropy = entropy.detach()
    else:
        log_prob = logprob(logits, tokens, log_prob_keep_mask, group=tp_group)
    return log_prob.unsqueeze(-1) if logits.shape[0] else log_prob, entropy


def get_log_probs_and_entropy(
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    top_p_token_ids: Sequence[Any] | None = None,
    top_p_token_offsets: Sequence[Any] | None = None,
    tp_group: Group = None,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Computes the log-probability, and if wanted the entropy, of each response token of a packed micro-batch.

    Sample after sample, ``T = sum(total_lengths)`` tokens and perhaps padding: the logits at ``t - 1`` are those of
    token ``t``. The kept sets of top-p sampling are replayed as ragged rows: no mask is made, and rows that predict no
    response token are not read.

    Args:
        logits: ``[1, T, V_local]`` or ``[T, V_local]`` floating point, not divided by the temperature; not modified.
        args: slime's arguments; `rollout_temperature`, `entropy_coef` (0: the entropy requires no grad) and
            `allgather_cp` are read where they are there. `log_probs_chunk_size` has no effect.
        unconcat_tokens: ``[total_length]`` integer, prompt and response of each sample.
        total_lengths, response_lengths: of each sample; a response has a token before it.
        with_entropy: whether to compute the entropy.
        non_loss_data: has no effect, as in slime.
        top_p_token_ids, top_p_token_offsets: for each sample flat ids (a list, an integer tensor or slime's reference
            to one) and where the ids of each response token begin, with the end: ``ids[offsets[r] : offsets[r + 1]]``
            for token ``r``. Tokens past the last offset are unrestricted. A token whose recorded set is empty was not
            sampled (an environment's); it alone is kept, so its log-prob is 0, as in slime.
        tp_group: the group that shares the vocabulary; None: Megatron's tensor-parallel group. "" names logits that are
            not sharded.

    Returns:
        An empty tensor, and a dict of lists with ``[response_length]`` float32 for each sample: "log_probs", and
        "entropy" with `with_entropy`.

    Raises:
        ValueError: naming the sample, for lengths, tokens and offsets that do not fit together, and for context
            parallelism, which cuts samples. (`patch` leaves those calls to slime's own function.)
        TypeError, ValueError, IndexError: as `ppo_ops.logprob_entropy`.

    Cost:
        One call, so one all-gather of 3 numbers a row (4 with entropy, 6 with entropy and kept sets) for the whole
        micro-batch. With kept sets and without entropy only kept logits are read.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> from ppo_ops.integrations.slime import get_log_probs_and_entropy
        >>> tokens = [torch.tensor([0, 1, 3]), torch.tensor([2, 2])]
        >>> lengths = {"total_lengths": [3, 2], "response_lengths": [2, 1]}
        >>> kept = {"top_p_token_ids": [[1, 2, 3], [2]], "top_p_token_offsets": [[0, 2, 3], [0, 1]]}
        >>> args = SimpleNamespace(rollout_temperature=0.7)
        >>> _, found = get_log_probs_and_entropy(
        ...     torch.zeros(1, 5, 4), args=args, unconcat_tokens=tokens, **lengths, **kept, tp_group=""
        ... )
        >>> [[f"{x:.4f}" for x in log_prob.tolist()] for log_prob in found["log_probs"]]
        [['-0.6931', '0.0000'], ['0.0000']]

    Source:
        Names, layout and results of slime's `slime/backends/megatron_utils/loss.py` with top-p replay, commit 00c2d6d.
    """
    if samples_are_cut(logits, args=args):
        raise ValueError(
            f"context parallelism must be of one rank and args.allgather_cp False, as it cuts samples, got "
            f"{context_parallel_size()} and {getattr(args, 'allgather_cp', False)}"
        )
    if logits.dim() == 3 and logits.shape[0] == 1:
        logits = logits.squeeze(0)  # a view; the gradient of an index would be a copy
    if logits.dim() != 2:
        raise ValueError(f"logits must have the shape [1, T, V_local] or [T, V_local], got {tuple(logits.shape)}")
    rows = _response_rows(logits.shape[0], total_lengths, response_lengths)
    kept: dict[str, Any] = {}
    unsampled: Tensor | None = None
    if top_p_token_ids is not None and top_p_token_offsets is not None:
        ids, offsets, unsampled = _kept_rows(logits.shape[0], rows, top_p_token_ids, top_p_token_offsets)
        kept = {"keep_ids": ids.to(logits.device), "keep_offsets": offsets.to(logits.device)}
    elif top_p_token_ids is not None or top_p_token_offsets is not None:
        raise ValueError("top_p_token_ids and top_p_token_offsets must be given together, got one of them")
    target = _targets(logits, unconcat_tokens, total_lengths, rows)
    options: dict[str, Any] = {"temperature": getattr(args, "rollout_temperature", 1.0), "ignore_index": _IGNORE}
    group = megatron_group(tp_group)
    found: dict[str, list[Tensor]] = {}
    if with_entropy:
        log_prob, entropy = logprob_entropy(logits, target, **kept, **options, group=group)
        if getattr(args, "entropy_coef", 0.0) == 0:
            entropy = entropy.detach()
        found["entropy"] = [entropy[row] for row in rows]
    else:
        log_prob = logprob(logits, target, **kept, **options, group=group)
    if unsampled is not None:
        log_prob = log_prob.masked_fill(unsampled.to(log_prob.device), 0.0)
    return log_prob.new_empty(0), {"log_probs": [log_prob[row] for row in rows], **found}


def samples_are_cut(logits: Tensor, *, args: Any, **_: Any) -> bool:
    """Whether `get_log_probs_and_entropy`, called like this, would find samples that context parallelism cut."""
    return context_parallel_size() > 1 or bool(getattr(args, "allgather_cp", False))


def _response_rows(size: int, total_lengths: Sequence[int], response_lengths: Sequence[int]) -> list[slice]:
    """Rows of the packed logits that predict each sample's response tokens."""
    if len(total_lengths) != len(response_lengths):
        raise ValueError(
            f"response_lengths must be {len(total_lengths)}, as total_lengths, got {len(response_lengths)}"
        )
    rows, end = [], 0
    for sample, (total, response) in enumerate(zip(total_lengths, response_lengths, strict=True)):
        if not 0 <= response < max(total, 1):
            raise ValueError(f"response_lengths[{sample}] must be in [0, {total}), below its total, got {response}")
        end += total
        rows.append(slice(end - 1 - response, end - 1) if response else slice(0, 0))
    if end > size:
        raise ValueError(
            f"logits must have a row for each of the {end} tokens in total_lengths, got {size} (context parallelism, "
            f"which cuts samples, is not supported)"
        )
    return rows


def _targets(logits: Tensor, tokens: Sequence[Tensor], total_lengths: Sequence[int], rows: list[slice]) -> Tensor:
    """``[T]`` int64: the next token where it is a response's, ignored elsewhere."""
    if len(tokens) != len(rows):
        raise ValueError(f"unconcat_tokens must be {len(rows)}, as total_lengths, got {len(tokens)}")
    target = torch.full((logits.shape[0],), _IGNORE, dtype=torch.int64, device=logits.device)
    for sample, (ids, total, row) in enumerate(zip(tokens, total_lengths, rows, strict=True)):
        if ids.shape != (total,):
            raise ValueError(f"unconcat_tokens[{sample}] must have the shape ({total},), got {tuple(ids.shape)}")
        target[row] = ids[total - (row.stop - row.start) :].to(target)
    return target


def _on_cpu(values: Any) -> Tensor:
    """A list, a tensor, or what slime loads only when it is needed."""
    return torch.as_tensor(values.load() if hasattr(values, "load") else values).to("cpu", torch.int64)


def _kept_rows(
    size: int, rows: list[slice], ids: Sequence[Any], offsets: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Every sample's kept sets as ragged rows of the packed logits, those without one empty; ``[size]`` True where the
    recorded set is empty, None where none is."""
    for name, given in (("top_p_token_ids", ids), ("top_p_token_offsets", offsets)):
        if len(given) != len(rows):
            raise ValueError(f"{name} must be {len(rows)}, as total_lengths, got {len(given)}")
    flat = [_on_cpu(sample) for sample in ids]
    sizes = torch.zeros(size + 1, dtype=torch.int64, device="cpu")
    unsampled = torch.zeros(size, dtype=torch.bool, device="cpu")
    for sample, (row, given) in enumerate(zip(rows, offsets, strict=True)):
        begins = _on_cpu(given)
        found = begins.diff()
        first, last = (int(begins[0]), int(begins[-1])) if len(begins) else (0, 0)
        if first != 0 or last != len(flat[sample]) or bool((found < 0).any()):
            raise ValueError(
                f"top_p_token_offsets[{sample}] must rise from 0 to the number of top_p_token_ids[{sample}], "
                f"{len(flat[sample])}, got {first} to {last}"
            )
        if len(found) > row.stop - row.start:
            raise ValueError(
                f"top_p_token_offsets[{sample}] must be at most {row.stop - row.start + 1}, one more than its response "
                f"tokens, got {len(begins)}"
            )
        sizes[row.start + 1 : row.start + 1 + len(found)] = found
        unsampled[row.start : row.start + len(found)] = found == 0
    return torch.cat([sizes.new_empty(0), *flat]), sizes.cumsum(0), unsampled if unsampled.any() else None
