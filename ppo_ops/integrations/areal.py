"""AReaL's `gather_logprobs` and `gather_logprobs_entropy`, computed by `torch.ops.ppo`.

    z = logits / temperature        log_prob = z_label - lse        entropy = lse - sum_v p_v z_v        (nats)

To use them, import them from here instead of `areal.utils.functional`, or `ppo_ops.integrations.patch("areal")`. AReaL
itself is not imported here.
"""

from __future__ import annotations

from torch import Tensor

from ppo_ops.functional import Group, logprob, logprob_entropy
from ppo_ops.integrations._shared import check_chunk_size, may_overwrite


def gather_logprobs(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    tp_group: Group = None,
    chunk_size: int = 1024,
) -> Tensor:
    """Computes the log-probability of each label.

    Args:
        logits: ``[..., V]``, or ``[..., V_local]`` with a `tp_group`; floating point, any strides.
        labels: ``[...]`` any integer dtype, global token ids.
        temperature: > 0; a number or, beyond AReaL, a float32 tensor, 0-dim or shaped like labels.
        tp_group: the group that shares the vocabulary; None: logits hold all of it.
        chunk_size: positive; has no effect. AReaL bounds the memory of a forward pass with it; here forward makes
            nothing of the size of the logits, so every value gives the same bits at the same cost.

    Returns:
        log_prob: ``[...]`` float32, as AReaL; for float64 logits float64, which AReaL rounds to float32.

    Raises:
        ValueError: for a `chunk_size` that is not a positive integer, naming it; else as `ppo_ops.logprob`.

    Cost:
        One all-gather of 3 numbers a row in forward (AReaL: three all-reduces a chunk), none in backward. Saves the
        logits in their own dtype (AReaL: a float32 softmax) and 3 numbers a row.

    Example:
        >>> import torch
        >>> from ppo_ops.integrations.areal import gather_logprobs
        >>> log_prob = gather_logprobs(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), temperature=2.0)
        >>> print(f"{log_prob.item():.4f}")
        -0.3133

    Source:
        AReaL 1.0.4, `areal/utils/functional/vocab_parallel.py`, and its commit 60a9824 (`reuse_logits`).
    """
    check_chunk_size(chunk_size)
    return logprob(logits, labels, temperature=temperature, group=tp_group)


def gather_logprobs_entropy(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    tp_group: Group = None,
    chunk_size: int = 1024,
    reuse_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes the log-probability of each label and the entropy of each row.

    Args:
        logits, labels, temperature, tp_group, chunk_size: as `gather_logprobs`.
        reuse_logits: the gradient overwrites the logits, where they are a contiguous intermediate result (AReaL: where
            they are contiguous, float32 and on CUDA). Here forward leaves them as they are.

    Returns:
        log_prob, entropy: ``[...]`` as `gather_logprobs`; entropy in nats, of the distribution at `temperature`.

    Raises:
        As `gather_logprobs`.

    Cost:
        One all-gather of 4 numbers a row in forward (AReaL: four all-reduces a chunk, two with `reuse_logits`); the
        rest as `gather_logprobs`. With `reuse_logits` backward allocates no gradient.

    Numerics:
        A -inf logit counts as absent; AReaL's entropy is NaN then. The entropy has a gradient with `reuse_logits`, too;
        AReaL's has none on CUDA then.

    Example:
        >>> import torch
        >>> from ppo_ops.integrations.areal import gather_logprobs_entropy
        >>> log_prob, entropy = gather_logprobs_entropy(torch.zeros(1, 4), torch.tensor([3]))
        >>> print(f"{log_prob.item():.4f} {entropy.item():.4f}")
        -1.3863 1.3863

    Source:
        As `gather_logprobs`.
    """
    check_chunk_size(chunk_size)
    inplace = reuse_logits and may_overwrite(logits)
    return logprob_entropy(logits, labels, temperature=temperature, inplace_backward=inplace, group=tp_group)
