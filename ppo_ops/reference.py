"""The specification in plain torch: slow, memory-hungry, obvious. The tests' oracle, and part of the package.

    z = (x - max x) / T        lse = log sum_v e^z        p = e^(z - lse)
    log_prob = z_target - lse_kept        entropy = lse - sum_v p z        (terms with z = -inf are 0)

One rank, whole vocabulary, differentiable by autograd. In float64 (the default) it is the truth that kernels are
measured against; in float32 it is what plain torch code would give.
"""

from __future__ import annotations

import torch
from torch import Tensor


def logprob_entropy(
    logits: Tensor,
    target: Tensor,
    keep_mask: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Computes what `ppo_ops.logprob_entropy` promises, in `dtype`, without sharding.

    Args:
        logits: ``[..., V]`` floating point.
        target: ``[...]`` integer.
        keep_mask: ``[..., V]`` bool or None.
        temperature: number, or tensor 0-dim or shaped like target.
        ignore_index, vocab_size: as in `ppo_ops.logprob_entropy`.
        dtype: dtype of the computation and of the results.

    Returns:
        log_prob, entropy: ``[...]`` in `dtype`.

    Raises:
        IndexError: a target outside the vocabulary that is not `ignore_index`.

    Cost:
        Several tensors of the size of the logits in `dtype`, forward and backward.

    Example:
        >>> import torch
        >>> from ppo_ops import reference
        >>> log_prob, entropy = reference.logprob_entropy(torch.zeros(1, 4), torch.tensor([3]))
        >>> print(f"{log_prob.item():.4f} {entropy.item():.4f}")
        -1.3863 1.3863

    Source:
        The definitions of log-softmax and of Shannon entropy.
    """
    x = logits[..., :vocab_size].to(dtype)
    target = target.to(torch.int64)
    ignored = target == ignore_index
    if bool(((target < 0) | (target >= x.shape[-1]))[~ignored].any()):
        raise IndexError(f"target must be in [0, {x.shape[-1]}) or equal ignore_index ({ignore_index})")
    x = x.masked_fill(ignored.unsqueeze(-1), 0.0)
    index = target.masked_fill(ignored, 0).unsqueeze(-1)
    divisor = torch.as_tensor(temperature, dtype=dtype, device=x.device)
    z = (x - x.detach().amax(-1, keepdim=True)) / (divisor.unsqueeze(-1) if divisor.dim() else divisor)

    kept = z
    if keep_mask is not None:
        keep = keep_mask[..., :vocab_size].scatter(-1, index, True)
        kept = z.masked_fill(~keep, -torch.inf)
    log_prob = z.gather(-1, index).squeeze(-1) - kept.logsumexp(-1)
    absent = z == -torch.inf
    expected = (z.softmax(-1) * z.masked_fill(absent, 0.0)).masked_fill(absent, 0.0).sum(-1)
    entropy = z.logsumexp(-1) - expected
    return log_prob.masked_fill(ignored, 0.0), entropy.masked_fill(ignored, 0.0)
