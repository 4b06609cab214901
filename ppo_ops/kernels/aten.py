"""Blocked ATen kernels for the CPU: every dtype, no compiler needed.

A block of rows and columns is copied to a small buffer in the accumulation dtype and stays in the cache for the dozen
elementwise passes over it, so nothing of the size of the logits is ever made.

Note [Same bits]
    Sums fold a block's columns in halves with elementwise additions down to `LANES`, add those lanes over the blocks,
    and fold the lanes at the end. ATen's own sum may change its order with the number of rows; elementwise operators
    cannot, so a row's bits depend on that row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Rows times columns of a block. Two buffers of it stay in a 2 MiB cache; smaller blocks are dominated by the ~30
# operator calls a block (512 x 151,936 float32, 2 cores, 2026-12-02: 2^18 124 ms, 2^17 163 ms, 2^16 315 ms).
BLOCK_ELEMENTS = 1 << 18
BLOCK_COLUMNS = 1 << 15
LANES = 64
# e^-1e4 is 0 in float32 and float64; the finite floor keeps 0 * -inf from becoming NaN. `clamp` passes NaN on.
LOWEST = -1.0e4


def _fold(values: Tensor, width: int) -> Tensor:
    """Halve the last dimension in place until at most `width` columns are left that hold the sum of all."""
    columns = values.shape[-1]
    while columns > width:
        half = 1 << ((columns - 1).bit_length() - 1)
        values[..., : columns - half].add_(values[..., half:columns])
        columns = half
    return values[..., :columns]


class _RunningSum:
    """Online softmax state of a block of rows: maximum ``[b, 1]``, lanes of sum_exp and, if wanted, sum_exp_shifted."""

    def __init__(self, rows: int, like: Tensor, shifted: bool) -> None:
        self.max = like.new_full((rows, 1), -torch.inf)
        self.lanes = like.new_zeros((2 if shifted else 1, rows, LANES))

    def add(self, block: Tensor, inv_temperature: Tensor | None, scratch: Tensor) -> None:
        """Take in a block of columns; overwrites it. ``scratch`` has the block's rows and columns, twice."""
        new_max = torch.maximum(self.max, block.amax(1, keepdim=True))
        finite_max = new_max.masked_fill(new_max == -torch.inf, 0.0)
        distance = self.max - finite_max
        block.sub_(finite_max)
        if inv_temperature is not None:
            block.mul_(inv_temperature)
            distance.mul_(inv_temperature)
        block.clamp_(min=LOWEST)
        distance.clamp_(min=LOWEST)
        terms = scratch[: len(self.lanes)]
        torch.exp(block, out=terms[0])
        if len(self.lanes) == 2:
            torch.mul(terms[0], block, out=terms[1])
            self.lanes[1].add_(self.lanes[0] * distance)
        self.lanes.mul_(distance.exp_())
        folded = _fold(terms, LANES)
        self.lanes[..., : folded.shape[-1]].add_(folded)
        self.max = new_max

    def totals(self) -> list[Tensor]:
        """[sum_exp ``[b]``, sum_exp_shifted ``[b]`` if wanted]."""
        return list(_fold(self.lanes, 1).squeeze(-1))


class _Buffers:
    """Views of one flat buffer as contiguous blocks of any size up to `BLOCK_ELEMENTS`."""

    def __init__(self, elements: int, copies: int, dtype: torch.dtype) -> None:
        self.flat = torch.empty(copies * elements, dtype=dtype, device="cpu")
        self.copies = copies

    def block(self, rows: int, columns: int) -> Tensor:
        return self.flat[: self.copies * rows * columns].view(self.copies, rows, columns)


def _block_shape(rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of a block; the column split depends on the vocabulary alone."""
    width = max(1, min(columns, BLOCK_COLUMNS))
    return max(1, min(rows, BLOCK_ELEMENTS // width)), width


def _row_blocks(active: Tensor, block_rows: int) -> list[Tensor | slice]:
    """Blocks of the active rows: slices where all rows are active, else index tensors."""
    if bool(active.all()):
        return [slice(r, min(r + block_rows, len(active))) for r in range(0, len(active), block_rows)]
    return list(active.nonzero().squeeze(1).split(block_rows)) if bool(active.any()) else []


def _inverse(temperature: Tensor | None, rows: int, dtype: torch.dtype) -> Tensor | None:
    """``[N, 1]`` reciprocal temperatures, NaN where the temperature is not positive."""
    if temperature is None:
        return None
    positive = temperature.to(dtype).where(temperature > 0, torch.nan)
    return positive.reciprocal().expand(rows).unsqueeze(1)


def _local_target(target: Tensor, vocab_start: int, columns: int) -> tuple[Tensor, Tensor]:
    """``[n, 1]`` local columns, 0 where another rank owns the target, and whether this one does."""
    local = target - vocab_start
    owned = (local >= 0) & (local < columns)
    return local.where(owned, 0).unsqueeze(1), owned.unsqueeze(1)


def _place_in_block(local: Tensor, owned: Tensor, column: int, columns: int) -> tuple[Tensor, Tensor]:
    """``[n, 1]`` target columns counted from `column`, and whether they lie in the block."""
    place = local - column
    inside = owned & (place >= 0) & (place < columns)
    return place.where(inside, 0), inside


def _without_target(dropped: Tensor, local: Tensor, owned: Tensor, column: int) -> Tensor:
    """Take the targets out of the dropped set, in place: a target is always kept."""
    place, inside = _place_in_block(local, owned, column, dropped.shape[1])
    return dropped.scatter_(1, place, dropped.gather(1, place) & ~inside)


def _add_to_target(grad: Tensor, value: Tensor, local: Tensor, owned: Tensor, column: int) -> None:
    place, inside = _place_in_block(local, owned, column, grad.shape[1])
    grad.scatter_add_(1, place, value.where(inside, 0.0))


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
    """Fill ``stats [K, N]`` (see `ppo_ops.ops.vocab_stats`) from ``logits [N, V_local]``."""
    rows, kinds = len(target), len(stats)
    block_rows, width = _block_shape(rows, columns)
    buffer = _Buffers(block_rows * width, 1, stats.dtype)
    scratch = _Buffers(block_rows * width, 2, stats.dtype)
    inverse = _inverse(temperature, rows, stats.dtype)
    ignored = target == ignore_index
    numbers = torch.arange(rows, device="cpu")
    stats.zero_()
    stats[1::4] = 1.0
    for chosen in _row_blocks(~ignored, block_rows):
        block_target = target[chosen]
        local, owned = _local_target(block_target, vocab_start, columns)
        count = len(block_target)
        inv = None if inverse is None else inverse[chosen]
        kept = _RunningSum(count, stats, shifted=kinds == 4)
        full = _RunningSum(count, stats, shifted=True) if kinds == 6 else None
        for column in range(0, columns, width):
            end = min(column + width, columns)
            block = buffer.block(count, end - column)[0]
            terms = scratch.block(count, end - column)
            source = logits[chosen, column:end]
            block.copy_(source)
            if full is not None:
                full.add(block, inv, terms)
                block.copy_(source)
            if keep_mask is not None:
                dropped = ~keep_mask[chosen, column:end]
                block.masked_fill_(_without_target(dropped, local, owned, column), -torch.inf)
            kept.add(block, inv, terms)
        target_logit = torch.full_like(kept.max, torch.nan).squeeze(1)
        if columns:
            found = logits[numbers[chosen], local.squeeze(1)].to(stats.dtype)
            target_logit = found.where(owned.squeeze(1), torch.nan)
        sum_exp, *shifted = kept.totals()
        result = [kept.max.squeeze(1), sum_exp, target_logit, *shifted]
        if full is not None:
            sum_exp, *shifted = full.totals()
            result += [*shifted, full.max.squeeze(1), sum_exp]
        stats[:, chosen] = torch.stack(result)


def _log_p_and_p(
    block: Tensor, scratch: Tensor, row_max: Tensor, log_sum: Tensor, inverse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Turn a block of logits into log-probabilities in place, floored, and write the probabilities to `scratch`."""
    block.sub_(row_max)
    if inverse is not None:
        block.mul_(inverse)
    block.sub_(log_sum).clamp_(min=LOWEST)
    return block, torch.exp(block, out=scratch)


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
    """Fill ``grad_logits [N, V_local]`` (see `ppo_ops.ops.logits_grad`); it may be the logits' own memory."""
    rows, dtype = len(target), normalizers.dtype
    block_rows, width = _block_shape(rows, columns)
    buffer = _Buffers(block_rows * width, 1, dtype)
    scratch = _Buffers(block_rows * width, 2, dtype)
    inverse = _inverse(temperature, rows, dtype)
    zeros = torch.zeros((), dtype=dtype, device="cpu").expand(rows)
    a = zeros if grad_log_prob is None else grad_log_prob
    b = zeros if grad_entropy is None else grad_entropy
    active = (target != ignore_index) & ((a != 0) | (b != 0))
    # Nobody owns the target: the log-prob is NaN, and so is its gradient.
    a = a.where((a == 0) | ~normalizers[2].isnan(), torch.nan)
    if columns < grad_logits.shape[1]:
        grad_logits[:, columns:] = 0
    if not bool(active.all()):
        grad_logits[~active] = 0
    for chosen in _row_blocks(active, block_rows):
        local, owned = _local_target(target[chosen], vocab_start, columns)
        inv = None if inverse is None else inverse[chosen]
        a_rows, b_rows = a[chosen].unsqueeze(1), b[chosen].unsqueeze(1)
        if inv is not None:
            a_rows, b_rows = a_rows * inv, b_rows * inv
        stats = normalizers[:, chosen].unsqueeze(-1)
        for column in range(0, columns, width):
            end = min(column + width, columns)
            block = buffer.block(len(local), end - column)[0]
            terms = scratch.block(len(local), end - column)
            source = logits[chosen, column:end]
            block.copy_(source)
            if len(stats) == 4 and grad_entropy is not None:
                log_p, p = _log_p_and_p(block, terms[0], stats[0], stats[1], inv)
                grad = log_p.add_(stats[3]).mul_(b_rows).add_(a_rows).mul_(p).neg_()
                _add_to_target(grad, a_rows, local, owned, column)
            else:
                grad = terms[0].zero_()
                if grad_log_prob is not None:
                    grad = _log_p_and_p(block, grad, stats[0], stats[1], inv)[1].mul_(-a_rows)
                    if keep_mask is not None:
                        dropped = ~keep_mask[chosen, column:end]
                        grad.masked_fill_(_without_target(dropped, local, owned, column), 0.0)
                    _add_to_target(grad, a_rows, local, owned, column)
                    grad.masked_fill_(a_rows == 0, 0.0)
                if grad_entropy is not None:
                    block.copy_(source)
                    log_p, p = _log_p_and_p(block, terms[1], stats[4], stats[5], inv)
                    grad.sub_(log_p.add_(stats[3]).mul_(b_rows).mul_(p).masked_fill_(b_rows == 0, 0.0))
            grad_logits[chosen, column:end] = grad.to(grad_logits.dtype)
