"""TRL's `selective_log_softmax`, `entropy_from_logits` and `selective_log_softmax_and_entropy`, by `torch.ops.ppo`.

    z = logits / temperature        log_prob = z_index - lse        entropy = lse - sum_v p_v z_v        (nats)

Import them from here instead of `trl.trainer.utils`, or let `ppo_ops.integrations.patch("trl")` replace TRL's own
everywhere. TRL itself is not imported.
"""

from __future__ import annotations

from torch import Tensor

from ppo_ops.functional import logprob, logprob_entropy
from ppo_ops.integrations._shared import check_chunk_size, entropy_of

_IGNORED = -100


def _like_trl(result: Tensor, logits: Tensor) -> Tensor:
    """TRL's dtype: float32 from its Triton kernel, that of the logits from its torch code."""
    return result if logits.device.type in ("cuda", "xpu") else result.to(logits.dtype)


def _masked(index: Tensor, row_mask: Tensor | None) -> Tensor:
    """The index with rows that the mask drops as ignored ones: their logits are not even read."""
    if row_mask is None:
        return index
    if row_mask.shape != index.shape:
        raise ValueError(f"row_mask must have the shape of index {tuple(index.shape)}, got {tuple(row_mask.shape)}")
    return index.masked_fill(row_mask == 0, _IGNORED)


def selective_log_softmax(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    """Computes the log-probability of one token, or of K tokens, at each position.

    Args:
        logits: ``[..., V]`` floating point, any strides.
        index: ``[...]`` or ``[..., K]`` int64.
        temperature: > 0.
        row_mask: the shape of index; where it is 0 the result is 0, and so is the gradient.

    Returns:
        log_prob: the shape of index, in TRL's dtype: float32 on CUDA, where TRL takes its own kernel; on the CPU that
        of the logits, rounded once.

    Raises:
        ValueError: for a temperature that is not positive or a row_mask of another shape, naming it; else as
            `ppo_ops.logprob`.

    Cost:
        Saves the logits themselves and 3 numbers a row, also with K tokens a position.

    Example:
        >>> import torch
        >>> from ppo_ops.integrations.trl import selective_log_softmax
        >>> logits = torch.tensor([[[2.0, 1.0, 0.0]]])
        >>> print([f"{x:.4f}" for x in selective_log_softmax(logits, torch.tensor([[[0, 2]]]))[0, 0].tolist()])
        ['-0.4076', '-2.4076']

    Source:
        Signature of TRL 1.16.0, `trl/trainer/utils.py`.
    """
    return _like_trl(logprob(logits, _masked(index, row_mask), temperature=temperature), logits)


def entropy_from_logits(logits: Tensor, chunk_size: int = 128) -> Tensor:
    """Computes the entropy of each position.

    Args:
        logits: ``[..., V]`` floating point, any strides.
        chunk_size: positive; has no effect. TRL bounds the memory of a forward pass with it; here forward makes
            nothing of the size of the logits, so every value gives the same bits at the same cost.

    Returns:
        entropy: ``[...]`` in the dtype of `selective_log_softmax`; summed in float32 and rounded once, where TRL
        computes in bfloat16 for bfloat16 logits on the CPU.

    Raises:
        ValueError: for a `chunk_size` that is not a positive integer, naming it.

    Cost:
        Saves the logits themselves and 4 numbers a row (TRL: two tensors of the size of the logits).

    Numerics:
        A -inf logit counts as absent; TRL's entropy is NaN then on the CPU.

    Example:
        >>> import torch
        >>> from ppo_ops.integrations.trl import entropy_from_logits
        >>> print(f"{entropy_from_logits(torch.tensor([[0.0, 0.0, -torch.inf]])).item():.4f}")
        0.6931

    Source:
        Signature of TRL 1.16.0, `trl/trainer/utils.py`.
    """
    check_chunk_size(chunk_size)
    return _like_trl(entropy_of(logits), logits)


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the log-probability of one token and the entropy at each position, in one pass.

    Args:
        logits, temperature, row_mask: as `selective_log_softmax`.
        index: ``[...]`` int64.
        entropy_requires_grad: False gives an entropy that does not require grad.

    Returns:
        log_prob, entropy: ``[...]`` as `selective_log_softmax`; entropy of the distribution at `temperature`.

    Raises:
        As `selective_log_softmax`.

    Cost:
        One pass over the logits in forward and one in backward. Saves the logits themselves and 4 numbers a row.

    Example:
        >>> import torch
        >>> from ppo_ops.integrations.trl import selective_log_softmax_and_entropy
        >>> log_prob, entropy = selective_log_softmax_and_entropy(torch.zeros(1, 2, 4), torch.tensor([[0, 3]]))
        >>> print(f"{log_prob[0, 0].item():.4f} {entropy[0, 1].item():.4f}")
        -1.3863 1.3863

    Source:
        Signature of TRL 1.16.0, `trl/trainer/utils.py`.
    """
    log_prob, entropy = logprob_entropy(logits, _masked(index, row_mask), temperature=temperature)
    if not entropy_requires_grad:
        entropy = entropy.detach()
    return _like_trl(log_prob, logits), _like_trl(entropy, logits)
