"""Megatron's layout ``[s, b, V_local]`` and its tensor-parallel group, computed by `torch.ops.ppo`.

    log_prob = z_target - log sum_{v kept} e^z_v        entropy = log sum_v e^z_v - sum_v p_v z_v        (nats)
    cross_entropy = -log_prob

megatron-core is imported only where no group is given.

policy_loss_func              what a `forward_step_func` returns beside the logits: PPO's loss of them
compute_language_model_loss   `LanguageModule.compute_language_model_loss` as a function, for cross entropy
vocab_parallel_*, fused_*     the losses under it; `ppo_ops.integrations.patch("megatron")` replaces Megatron's own
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ppo_ops import losses
from ppo_ops.functional import Group, logprob, logprob_entropy
from ppo_ops.integrations._shared import may_overwrite, megatron_group

_IGNORED = -100


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
            Megatron's output layer gives them; any strides. Not modified.
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
        group=megatron_group(tp_group),
    )


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Group = None
) -> Tensor:
    """Computes the cross entropy of each position, with the signature of Megatron's function of that name.

    Args:
        vocab_parallel_logits, target, tp_group: as `vocab_parallel_logprob_entropy`, but the gradient overwrites
            float32 logits that are a contiguous intermediate result; Megatron overwrites float32 ones in forward. A
            target of -100 gives a loss and a gradient of 0; Megatron gives such a position some number, to be masked
            out.
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
    # Megatron's callers know that it destroys float32 logits. Theirs of other dtypes stay as they were.
    inplace = vocab_parallel_logits.dtype == torch.float32 and may_overwrite(vocab_parallel_logits)
    group = megatron_group(tp_group)
    return -logprob(vocab_parallel_logits, target, inplace_backward=inplace, group=group)


def fused_vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, tp_group: Group) -> Tensor:
    """Computes `vocab_parallel_cross_entropy` with the signature of Megatron's fused function.

    Args:
        vocab_parallel_logits, target: as `vocab_parallel_logprob_entropy`.
        tp_group: the group that shares the vocabulary; None takes Megatron's tensor-parallel group.

    Returns:
        loss: ``[s, b]`` float32 (float64 for float64 logits), the same bits on every rank of the group.

    Raises:
        As `vocab_parallel_cross_entropy`.

    Cost:
        One all-gather of 3 numbers a position in forward (Megatron: two all-reduces), none in backward.

    Numerics:
        As `vocab_parallel_cross_entropy`.

    Example:
        >>> import torch
        >>> from ppo_ops.integrations.megatron import fused_vocab_parallel_cross_entropy
        >>> loss = fused_vocab_parallel_cross_entropy(torch.zeros(3, 2, 4), torch.zeros(3, 2, dtype=torch.int64), "")
        >>> print(f"{loss[0, 0].item():.4f}")
        1.3863

    Source:
        Signature of megatron-core 0.16.1, `megatron/core/fusions/fused_cross_entropy.py`.
    """
    return vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group=tp_group)


def compute_language_model_loss(labels: Tensor, logits: Tensor, tp_group: Group = None) -> Tensor:
    """Computes the cross entropy of each position, as the method of that name of Megatron's models.

    Args:
        labels: ``[b, s]`` any integer dtype, global token ids; -100 gives a loss and a gradient of 0.
        logits: ``[s, b, V_local]``, as Megatron's output layer gives them.
        tp_group: as `vocab_parallel_logprob_entropy`.

    Returns:
        loss: ``[b, s]`` float32 (float64 for float64 logits), contiguous.

    Raises:
        As `vocab_parallel_cross_entropy`.

    Cost:
        As `vocab_parallel_cross_entropy`.

    Example:
        >>> import torch
        >>> from ppo_ops.integrations.megatron import compute_language_model_loss
        >>> loss = compute_language_model_loss(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3, 2, 4), "")
        >>> print(tuple(loss.shape), f"{loss[0, 0].item():.4f}")
        (2, 3) 1.3863

    Source:
        megatron-core 0.16.1, `megatron/core/models/common/language_module/language_module.py`.
    """
    loss = vocab_parallel_cross_entropy(logits, labels.transpose(0, 1), tp_group=tp_group)
    return loss.transpose(0, 1).contiguous()


def policy_loss_func(
    target: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    entropy_coefficient: float = 0.0,
    temperature: float | Tensor = 1.0,
    keep_mask: Tensor | None = None,
    vocab_size: int | None = None,
    tp_group: Group = None,
) -> Callable[..., Any]:
    """Makes the loss function of PPO that a Megatron `forward_step_func` returns beside the model's logits.

        loss = sum over the mask of  clipped_policy_loss(log_prob - old_log_prob, advantage) - c entropy

    Args:
        target: ``[b, s]`` global token ids, already shifted: position t holds the token that t predicts.
        old_log_prob, advantage: ``[b, s]`` floating point; advantage broadcastable.
        loss_mask: ``[b, s]`` bool or numeric 0 and 1. Where it is 0 the logits are not read and get no gradient.
        clip_low, clip_high, dual_clip: as `ppo_ops.losses.clipped_policy_loss`.
        entropy_coefficient: c.
        temperature, keep_mask, vocab_size, tp_group: as `vocab_parallel_logprob_entropy`.

    Returns:
        loss_func: takes ``logits [b, s, V_local]``, as `GPTModel` returns them without labels, and returns what
        Megatron's schedules expect: the loss summed over tokens, the number of tokens, and a dict of ``[2]`` tensors
        (sum, tokens) to report: "policy loss", "entropy" and "clipped". With ``non_loss_data=True`` it returns
        ``{"log_prob", "entropy"}``, ``[b, s]`` without gradient: the old log-probs of a rollout.

    Raises:
        As `vocab_parallel_logprob_entropy` and `clipped_policy_loss`, when the loss function is called.

    Cost:
        As `vocab_parallel_logprob_entropy`: one all-gather forward, none backward.

    Example:
        >>> import torch
        >>> from ppo_ops.integrations.megatron import policy_loss_func
        >>> target, mask = torch.tensor([[1, 3]]), torch.tensor([[1, 0]])
        >>> loss_func = policy_loss_func(target, torch.full((1, 2), -1.3863), torch.ones(1, 2), mask, tp_group="")
        >>> # def forward_step(data_iterator, model): ...; return model(tokens, positions, None), loss_func
        >>> loss, tokens, report = loss_func(torch.zeros(1, 2, 4))
        >>> print(f"{loss.item():.4f} {tokens.item()} {report['entropy'].tolist()[0]:.4f}")
        -1.0000 1 1.3863

    Source:
        `forward_step_calc_loss` in megatron-core 0.16.1, `megatron/core/pipeline_parallel/schedules.py`.
    """
    counted = loss_mask != 0
    # Elsewhere a target may be anything: padding, or -1.
    asked = target.to(torch.int64).masked_fill(~counted, _IGNORED)

    def loss_func(output_tensor: Tensor, non_loss_data: bool = False) -> Any:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not non_loss_data):
            log_prob, entropy = vocab_parallel_logprob_entropy(
                output_tensor, asked, tp_group, keep_mask, temperature=temperature, vocab_size=vocab_size
            )
        if non_loss_data:
            return {"log_prob": log_prob, "entropy": entropy}
        log_ratio = torch.where(counted, log_prob - old_log_prob, 0.0)
        policy = losses.clipped_policy_loss(
            log_ratio, advantage, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
        )
        loss = torch.where(counted, policy - entropy_coefficient * entropy, 0.0).sum()
        tokens = counted.sum().to(torch.int32)
        high = clip_low if clip_high is None else clip_high
        ratio = log_ratio.detach().exp()
        clipped = ((ratio < 1.0 - clip_low) | (ratio > 1.0 + high)) & counted
        seen = {"policy loss": torch.where(counted, policy, 0.0), "entropy": entropy, "clipped": clipped}
        sums = {name: torch.stack([value.detach().sum().float(), tokens.float()]) for name, value in seen.items()}
        return loss, tokens, sums

    return loss_func
