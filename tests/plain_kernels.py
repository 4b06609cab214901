"""The two kernels in plain torch, written from the formulas alone: an oracle for the stages, and the control's victim.

The interface is that of `ppo_ops/kernels/aten.py`. Nothing is fused, blocked or in place. `flip` turns one sign round,
which `tests/test_negative_control.py` uses to see the comparator object.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

FLIPS = ("shift", "sum_exp_shifted", "grad_log_prob", "p_kept", "grad_entropy", "entropy")


class _Shard:
    """Valid columns of a shard, where the targets are, and what is kept."""

    def __init__(
        self,
        logits: Tensor,
        target: Tensor,
        keep_mask: Tensor | None,
        vocab_start: int,
        columns: int,
        dtype: torch.dtype,
    ) -> None:
        self.x = logits[:, :columns].to(dtype)
        local = target.to(torch.int64) - vocab_start
        self.is_target = local.unsqueeze(1) == torch.arange(columns)
        self.dropped = torch.zeros_like(self.is_target)
        if keep_mask is not None:
            self.dropped = ~(keep_mask[:, :columns] | self.is_target)


def _inverse(temperature: Tensor | None, dtype: torch.dtype) -> Tensor:
    return torch.ones(1, 1, dtype=dtype) if temperature is None else 1 / temperature.to(dtype).unsqueeze(1)


def _softmax_stats(x: Tensor, inverse: Tensor, sign: int) -> tuple[Tensor, Tensor, Tensor]:
    """max, sum e^z and sum e^z z of each row; -inf, 0, 0 where nothing is finite."""
    if x.shape[1] == 0:
        nothing = x.new_zeros(len(x))
        return nothing - torch.inf, nothing, nothing
    largest = x.amax(1)
    z = (x - sign * largest.masked_fill(largest == -torch.inf, 0.0).unsqueeze(1)) * inverse
    e = z.exp()
    return largest, e.sum(1), (e * z).masked_fill(z == -torch.inf, 0.0).sum(1)


def make(flip: str = "") -> SimpleNamespace:
    """A module of kernels, right or with one sign turned round."""
    assert flip in ("", *FLIPS)
    sign = {name: -1 if name == flip else 1 for name in FLIPS}

    def vocab_stats(
        logits: Tensor,
        target: Tensor,
        keep_mask: Tensor | None,
        temperature: Tensor | None,
        stats: Tensor,
        *,
        ignore_index: int,
        vocab_start: int,
        columns: int,
    ) -> None:
        shard = _Shard(logits, target, keep_mask, vocab_start, columns, stats.dtype)
        inverse = _inverse(temperature, stats.dtype)
        full_max, full_sum, full_shifted = _softmax_stats(shard.x, inverse, sign["shift"])
        kept = shard.x.masked_fill(shard.dropped, -torch.inf)
        kept_max, kept_sum, _ = _softmax_stats(kept, inverse, sign["shift"])
        owned = shard.is_target.any(1)
        target_logit = shard.x.masked_fill(~shard.is_target, 0.0).sum(1).masked_fill(~owned, torch.nan)
        rows = [kept_max, kept_sum, target_logit, sign["sum_exp_shifted"] * full_shifted, full_max, full_sum]
        ignored = target.to(torch.int64) == ignore_index
        for row, (values, empty) in enumerate(zip(rows, (0.0, 1.0, 0.0, 0.0, 0.0, 1.0), strict=True)):
            if row < len(stats):
                stats[row] = values.masked_fill(ignored, empty)

    def logits_grad(
        logits: Tensor,
        target: Tensor,
        keep_mask: Tensor | None,
        temperature: Tensor | None,
        normalizers: Tensor,
        grad_log_prob: Tensor | None,
        grad_entropy: Tensor | None,
        grad_logits: Tensor,
        *,
        ignore_index: int,
        vocab_start: int,
        columns: int,
    ) -> None:
        shard = _Shard(logits, target, keep_mask, vocab_start, columns, normalizers.dtype)
        inverse = _inverse(temperature, normalizers.dtype)
        kept_max, kept_log_sum, _, *rest = normalizers.unsqueeze(-1)
        grad = torch.zeros_like(shard.x)
        if grad_log_prob is not None:
            p_kept = ((shard.x - kept_max) * inverse - kept_log_sum).exp().masked_fill(shard.dropped, 0.0)
            term = grad_log_prob.unsqueeze(1) * (shard.is_target.to(p_kept.dtype) - sign["p_kept"] * p_kept)
            grad += sign["grad_log_prob"] * term.masked_fill(grad_log_prob.unsqueeze(1) == 0, 0.0)
        if grad_entropy is not None:
            entropy, *full = rest
            row_max, log_sum = full or (kept_max, kept_log_sum)
            log_p = ((shard.x - row_max) * inverse - log_sum).clamp(min=-1e4)
            term = -grad_entropy.unsqueeze(1) * log_p.exp() * (log_p + sign["entropy"] * entropy)
            grad += sign["grad_entropy"] * term.masked_fill(grad_entropy.unsqueeze(1) == 0, 0.0)
        grad_logits.zero_()
        ignored = target.to(torch.int64) == ignore_index
        grad_logits[:, :columns] = (grad * inverse).masked_fill(ignored.unsqueeze(1), 0.0)

    return SimpleNamespace(vocab_stats=vocab_stats, logits_grad=logits_grad)
