"""Blocks of policy-gradient losses: plain differentiable torch, a few lines each, from log-probs to a scalar.

    log_ratio = log_prob - old_log_prob
    loss = token_mean(clipped_policy_loss(log_ratio, advantage) + beta kl_estimate(log_prob, ref_log_prob), mask)

Everything is pointwise or a sum along a row, so under `torch.compile` Inductor fuses it with what surrounds the
operator; nothing here synchronises, and no data-dependent shape appears. ``[B, T]`` is sequences by tokens; any leading
shape will do where no dimension is named. A `mask` is bool, True counts; positions that do not count must still hold
finite numbers (`ppo_ops.logprob` gives 0 for a target of `ignore_index`).

Note [log-ratio limit]
    exp(x) of a float32 log-ratio beyond 88 is inf, and its gradient turns into inf * 0 = NaN as soon as a clip drops
    the term. Differences of log-probs are therefore limited to [-20, 20] before exp; beyond, the gradient is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0


def _exp(log_ratio: Tensor) -> Tensor:
    """See Note [log-ratio limit]."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def clipped_policy_loss(
    log_ratio: Tensor,
    advantage: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> Tensor:
    """Computes the clipped surrogate loss of PPO, element by element.

        r = exp(log_ratio)        loss = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
        with dual_clip c, where A < 0:  loss = min(loss, -A c)

    Args:
        log_ratio: ``log_prob - old_log_prob`` ``[...]``; or `sequence_log_ratio` of it, which gives GSPO.
        advantage: broadcastable to log_ratio.
        clip_low, clip_high: how far the ratio may fall below and rise above 1 with profit; high defaults to low.
        dual_clip: greatest ratio that counts against a bad action, > 1; None for no limit.

    Returns:
        loss: ``[...]``, to be averaged (`token_mean`, `sequence_mean`) and minimised.

    Raises:
        ValueError: a `dual_clip` that is not above 1, naming it.

    Gradient:
        ``-A r d log_ratio`` where the ratio is not clipped, 0 where it is; see Note [log-ratio limit].

    Example:
        >>> import torch
        >>> from ppo_ops.losses import clipped_policy_loss
        >>> ratio, advantage = torch.tensor([1.5, 0.5, 9.0]), torch.tensor([1.0, -1.0, -1.0])
        >>> clipped_policy_loss(ratio.log(), advantage, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
        tensor([-1.2800,  0.8000,  3.0000])

    Source:
        arXiv:1707.06347 eq. 7 (PPO); arXiv:2503.14476 section 3.1 (DAPO, asymmetric); arXiv:1912.09729 (dual clip).
    """
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be > 1, got {dual_clip}")
    ratio = _exp(log_ratio)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + (clip_low if clip_high is None else clip_high))
    loss = torch.maximum(-advantage * ratio, -advantage * clipped)
    if dual_clip is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -advantage * dual_clip), loss)
    return loss


def sequence_log_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Computes GSPO's log-ratio of each sequence: the mean over its tokens, so exp of it is a geometric mean.

        s = (1 / |y|) sum_t (log_prob_t - old_log_prob_t)

    Args:
        log_ratio: ``log_prob - old_log_prob`` ``[B, T]``.
        mask: ``[B, T]`` bool.

    Returns:
        s: ``[B]``, for `clipped_policy_loss` with the sequences' advantages ``[B]`` and clips of some 3e-4; 0 for a
        sequence without tokens. The mean of that loss over sequences is GSPO's.

    Example:
        >>> import torch
        >>> from ppo_ops.losses import sequence_log_ratio
        >>> sequence_log_ratio(torch.tensor([[0.1, 0.3, 9.0]]), torch.tensor([[True, True, False]]))
        tensor([0.2000])

    Source:
        arXiv:2507.18071 (GSPO).
    """
    return _mean_of_rows(log_ratio, mask)


def cispo_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, *, clip_high: float, clip_low: float = 1.0
) -> Tensor:
    """Computes the CISPO loss: REINFORCE whose importance weight is clipped and held constant, so no token drops out.

        w = clip(exp(log_prob - old_log_prob), 1 - clip_low, 1 + clip_high)        loss = -stop_gradient(w) A log_prob

    Args:
        log_prob, old_log_prob: ``[...]``.
        advantage: broadcastable to log_prob.
        clip_high, clip_low: the weight's limits; the default sets none from below, as the paper does.

    Returns:
        loss: ``[...]``.

    Gradient:
        ``-w A d log_prob`` for every token, clipped or not.

    Example:
        >>> import torch
        >>> from ppo_ops.losses import cispo_loss
        >>> log_prob = torch.tensor([-1.0, -1.0], requires_grad=True)
        >>> old_log_prob, advantage = torch.tensor([-1.0, -3.0]), torch.tensor([1.0, 1.0])
        >>> cispo_loss(log_prob, old_log_prob, advantage, clip_high=0.2).sum().backward()
        >>> log_prob.grad
        tensor([-1.0000, -1.2000])

    Source:
        arXiv:2506.13585 (MiniMax-M1).
    """
    weight = _exp(log_prob.detach() - old_log_prob).clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * advantage * log_prob


def kl_estimate(log_prob: Tensor, ref_log_prob: Tensor, kind: str = "k3") -> Tensor:
    """Estimates KL(policy || reference) from the log-probs of tokens that the policy sampled, token by token.

        d = log_prob - ref_log_prob        k1 = d        k2 = d^2 / 2        k3 = e^-d - 1 + d

    k1 and k3 have the KL as their mean; k2 is biased, but the mean of its gradient is the KL's gradient (k1's is 0).
    k2 is never negative, k3 only by its rounding. Where tokens were sampled from a kept set, give log-probs over it.

    Args:
        log_prob, ref_log_prob: ``[...]``.
        kind: "k1", "k2" or "k3".

    Returns:
        ``[...]`` in nats. d of k3's exponential is limited, see Note [log-ratio limit].

    Raises:
        ValueError: any other kind, naming it.

    Example:
        >>> import torch
        >>> from ppo_ops.losses import kl_estimate
        >>> log_prob, ref_log_prob = torch.tensor([-1.0]), torch.tensor([-1.5])
        >>> [round(kl_estimate(log_prob, ref_log_prob, kind).item(), 4) for kind in ("k1", "k2", "k3")]
        [0.5, 0.125, 0.1065]

    Source:
        J. Schulman, "Approximating KL divergence", 2020, http://joschu.net/blog/kl-approx.html; k3 in arXiv:2402.03300.
    """
    difference = log_prob - ref_log_prob
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    if kind == "k3":
        difference = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return torch.expm1(-difference) + difference
    raise ValueError(f"kind must be 'k1', 'k2' or 'k3', got {kind!r}")


def token_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Averages over all tokens that count, so long sequences weigh more.

        sum_bt m_bt x_bt / sum_bt m_bt

    Args:
        values: ``[...]``.
        mask: ``[...]`` bool.

    Returns:
        0-dim; 0 where nothing counts.

    Example:
        >>> import torch
        >>> from ppo_ops.losses import token_mean
        >>> token_mean(torch.tensor([[1.0, 2.0], [6.0, 7.0]]), torch.tensor([[True, True], [True, False]]))
        tensor(3.)

    Source:
        arXiv:2503.14476 section 3.3 (DAPO).
    """
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Averages over each sequence's tokens, then over the sequences that have any, so that each weighs the same.

        (1 / B) sum_b (sum_t m_bt x_bt / sum_t m_bt)

    Args:
        values: ``[B, T]``.
        mask: ``[B, T]`` bool.

    Returns:
        0-dim; 0 where nothing counts.

    Example:
        >>> import torch
        >>> from ppo_ops.losses import sequence_mean
        >>> sequence_mean(torch.tensor([[1.0, 2.0], [6.0, 7.0]]), torch.tensor([[True, True], [True, False]]))
        tensor(3.7500)

    Source:
        arXiv:2402.03300 eq. 3 (GRPO).
    """
    return token_mean(_mean_of_rows(values, mask), mask.any(-1))


def _mean_of_rows(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)


def group_normalized_advantage(reward: Tensor, group_size: int, *, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """Computes GRPO's advantages: each answer against the other answers to the same prompt.

        A_i = (r_i - mean(r)) / (std(r) + eps)        over the group; std with n - 1

    Args:
        reward: ``[B]`` floating point; each `group_size` neighbours answer one prompt.
        group_size: > 1.
        scale: divide by the standard deviation; False gives Dr. GRPO's advantages.
        eps: added to the standard deviation.

    Returns:
        advantage: ``[B]``; exactly 0 where all rewards of a group are equal.

    Raises:
        ValueError: a group size below 2, or one that does not divide B, naming both.

    Example:
        >>> import torch
        >>> from ppo_ops.losses import group_normalized_advantage
        >>> group_normalized_advantage(torch.tensor([1.0, 0.0, 1.0, 1.0]), 2)
        tensor([ 0.7071, -0.7071,  0.0000,  0.0000])

    Source:
        arXiv:2402.03300 section 4.1.2 (GRPO); arXiv:2503.20783 (Dr. GRPO).
    """
    if group_size < 2 or reward.shape[0] % group_size:
        raise ValueError(f"group_size must be at least 2 and divide the {reward.shape[0]} rewards, got {group_size}")
    grouped = reward.reshape(-1, group_size)
    # Relative to one member, equal rewards are exact zeros; their mean could be off by a rounding, which eps blows up.
    shifted = grouped - grouped[:, :1]
    centered = shifted - shifted.mean(-1, keepdim=True)
    if scale:
        wide = centered.to(torch.promote_types(centered.dtype, torch.float32))  # float16 has no square of 256
        centered = wide / (wide.square().sum(-1, keepdim=True).div(group_size - 1).sqrt() + eps)
    return centered.flatten().to(reward.dtype)


def gae(reward: Tensor, value: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 0.95) -> tuple[Tensor, Tensor]:
    """Computes generalized advantage estimates and the value function's targets.

        delta_t = r_t + gamma V_t+1 - V_t        A_t = delta_t + gamma lam A_t+1        returns_t = A_t + V_t

    t + 1 is the next token that counts, wherever it stands: padding ends a sequence (V and A are 0 behind the last
    token), and tokens in between that the policy did not choose (a tool's answer) are stepped over.

    Args:
        reward, value: ``[B, T]`` floating point.
        mask: ``[B, T]`` bool.
        gamma, lam: discount and decay a token.

    Returns:
        advantage, returns: ``[B, T]``, 0 where the mask is False. No gradient flows through them.

    Cost:
        2 ceil(log2 T) pointwise passes instead of a loop over tokens; see Note [recurrence by doubling].

    Example:
        >>> import torch
        >>> from ppo_ops.losses import gae
        >>> reward, value = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[0.5, 0.5, 7.0]])
        >>> advantage, returns = gae(reward, value, torch.tensor([[True, True, False]]), gamma=1.0, lam=0.5)
        >>> advantage, returns
        (tensor([[0.2500, 0.5000, 0.0000]]), tensor([[0.7500, 1.0000, 0.0000]]))

    Source:
        arXiv:1506.02438 eq. 16.
    """
    reward, value, counts = reward.detach(), value.detach(), mask.to(value.dtype)
    # V_here: the value at this token, or at the next one that counts where this one does not.
    value_here = _solve_backwards(1.0 - counts, torch.where(mask, value, 0.0))
    delta = reward + gamma * _shift(value_here, 1) - value
    decay = counts * (gamma * lam) + (1.0 - counts)
    advantage = _solve_backwards(decay, torch.where(mask, delta, 0.0))
    advantage = torch.where(mask, advantage, 0.0)
    return advantage, torch.where(mask, advantage + value, 0.0)


def _shift(x: Tensor, by: int) -> Tensor:
    """``y_t = x_t+by`` along the last dimension, 0 past the end."""
    return torch.nn.functional.pad(x[..., by:], (0, min(by, x.shape[-1])))


def _solve_backwards(a: Tensor, b: Tensor) -> Tensor:
    """Solve ``y_t = b_t + a_t y_t+1`` with ``y_T = 0`` along the last dimension.

    Note [recurrence by doubling]
        If y_t = b_t + a_t y_t+s holds for a step s, substituting it into itself gives the same form for 2 s with
        b_t + a_t b_t+s and a_t a_t+s. After log2 T such steps y_t+s lies past the end, so y = b.
    """
    step = 1
    while step < b.shape[-1]:
        b = b + a * _shift(b, step)
        a = a * _shift(a, step)
        step *= 2
    return b
