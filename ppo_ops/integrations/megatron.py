"""Megatron's layout ``[s, b, V_local]`` and its tensor-parallel group, computed by `torch.ops.ppo`.

    log_prob = z_target - log sum_{v kept} e^z_v        entropy = log sum_v e^z_v - sum_v p_v z_v        (nats)
    cross_entropy = -log_prob

megatron-core is imported only where no group is given.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ppo_ops.functional import Group, logprob, logprob_entropy


def _tensor_parallel_group() -> Any:
    try:
        from megatron.core import parallel_state  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        raise ImportError("tp_group must be given where megatron-core is not installed") from error
    return parallel_state.get_tensor_model_parallel_group()


def vocab_parallel_logprob_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    tp_group: Group = None,
    keep_mask: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the log-probability of each target token and the entropy of each position.

    Args:
        vocab_parallel_logits: ``[s, b, V_local]`` (any leading shape) float16, bfloat16, float32 or float64, as
            Megatron's output layer gives them; any strides. Not modified; Megatron's own losses overwrite float32 ones.
        target: ``[s, b]`` any integer dtype, global token ids.
        tp_group: ProcessGroup, 1-D DeviceMesh or name of the group that shares the vocabulary; None takes
            `megatron.core.parallel_state.get_tensor_model_parallel_group()`.
        keep_mask: ``[s, b, V_local]`` bool, True keeps.
        temperature, ignore_index: as in `ppo_ops.logprob_entropy`.
        vocab_size: the tokenizer's vocabulary where Megatron padded it; the padding then counts as absent. Without it,
            padding takes part as any other token, as in Megatron's own loss.

    Returns:
        log_prob, entropy: ``[s, b]`` float32 (float64 for float64 logits), the same bits on every rank of the group.

    Raises:
        ImportError: no group given and megatron-core is not installed.
        AssertionError: no group given and Megatron's parallel state is not initialized (raised by Megatron).
        TypeError, ValueError, IndexError: as `ppo_ops.logprob_entropy`.

    Cost:
        As `ppo_ops.logprob_entropy`: one all-gather forward, none backward.

    Example:
        >>> import torch
        >>> from ppo_ops.integrations.megatron import vocab_parallel_logprob_entropy
        >>> logits, target = torch.zeros(3, 2, 4), torch.zeros(3, 2, dtype=torch.int64)
        >>> # In training leave the group out. "" is the name for logits that hold the whole vocabulary.
        >>> log_prob, entropy = vocab_parallel_logprob_entropy(logits, target, "")
        >>> print(tuple(log_prob.shape), f"{log_prob[0, 0].item():.4f} {entropy[0, 0].item():.4f}")
        (3, 2) -1.3863 1.3863

    Source:
        Layout of megatron-core 0.16.1, `megatron/core/tensor_parallel/cross_entropy.py`.
    """
    return logprob_entropy(
        vocab_parallel_logits,
        target,
        keep_mask,
        temperature=temperature,
        ignore_index=ignore_index,
        vocab_size=vocab_size,
        group=_tensor_parallel_group() if tp_group is None else tp_group,
    )


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Group = None
) -> Tensor:
    """Computes the cross entropy of each position, with the signature of Megatron's function of that name.

    Args:
        vocab_parallel_logits, target, tp_group: as `vocab_parallel_logprob_entropy`. A target of -100 gives a loss and
            a gradient of 0; Megatron gives such a position some number, to be masked out.
        label_smoothing: must be 0.

    Returns:
        loss: ``[s, b]`` float32 (float64 for float64 logits), the same bits on every rank of the group.

    Raises:
        ValueError: for a `label_smoothing` other than 0, naming it; else as `vocab_parallel_logprob_entropy`.

    Cost:
        One all-gather of 3 numbers a position in forward (Megatron: three all-reduces), none in backward.

    Numerics:
        The gradient has the logits' dtype, rounded once. Megatron's fused loss rounds it to bfloat16 always.

    Example:
        >>> import torch
        >>> from ppo_ops.integrations.megatron import vocab_parallel_cross_entropy
        >>> logits, target = torch.zeros(3, 2, 4), torch.zeros(3, 2, dtype=torch.int64)
        >>> print(f"{vocab_parallel_cross_entropy(logits, target, tp_group='')[0, 0].item():.4f}")
        1.3863

    Source:
        Signature of megatron-core 0.16.1, `megatron/core/tensor_parallel/cross_entropy.py`, and the group argument of
        its `fused_vocab_parallel_cross_entropy`.
    """
    if label_smoothing != 0.0:
        raise ValueError(f"label_smoothing must be 0, got {label_smoothing}: smoothed targets are not implemented")
    group = _tensor_parallel_group() if tp_group is None else tp_group
    return -logprob(vocab_parallel_logits, target, group=group)
