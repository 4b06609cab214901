"""slime's `calculate_log_probs_and_entropy`, computed by `torch.ops.ppo`.

    log_prob = z_target - log sum_{v kept} e^z_v        entropy = log sum_v e^z_v - sum_v p_v z_v        (nats)

To use it, assign this function to the name of the same spelling in `slime.utils.ppo_utils` and wherever slime imported
it. slime itself is not imported here.
"""

from __future__ import annotations

from torch import Tensor

from ppo_ops.functional import Group, logprob, logprob_entropy


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
        Signature and shapes of slime's `slime/utils/ppo_utils.py` since its pull request 2144.
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
