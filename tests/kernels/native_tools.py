"""The native kernels' cases and their oracle in float64.

Tolerance: |ours - truth| <= 2 |plain float32 torch - truth| + floor. The floor is 2^-21 (four float32 roundings to
nearest) of the magnitudes that enter a number: a single row of plain torch may be right by chance. A gradient may in
addition be off by one unit in the last place of its own dtype: rounded once, from a neighbour in float32.

Without the kernels, importing this module skips the tests of the module that does.
"""

import math

import pytest
import torch

from ppo_ops.kernels import native

INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FLOOR = 2.0**-21
IGNORE = -100

if not native.available():
    pytest.skip(f"native kernels: {native.why_unavailable()}", allow_module_level=True)


class Case:
    """Arguments of both kernels. Everything that must not be read is NaN: padding, slack between rows, ignored rows."""

    def __init__(
        self, columns, dtype=torch.float32, kinds=4, masked=False, temperature=None, rows=6, scale=3.0, seed=0
    ):
        generator = torch.Generator().manual_seed(1000 * columns + seed)
        padding, slack, self.start = 3, 5, 700
        storage = torch.full((rows, columns + padding + slack), NAN, dtype=dtype)
        self.logits = storage[:, : columns + padding]
        self.logits[:, :columns] = (scale * torch.randn(rows, columns, generator=generator)).to(dtype)
        self.columns, self.kinds = columns, kinds
        # The first and last column, one in between, not owned by this shard on either side, ignored.
        local = torch.tensor([0, columns - 1, columns // 2, -1, columns, IGNORE - self.start])
        self.target = local.repeat(rows)[:rows] + self.start
        self.logits[self.target == IGNORE] = NAN
        self.mask = None
        if masked:
            self.mask = torch.rand(rows, columns + padding, generator=generator) < 0.4
        self.temperature = {
            None: None,
            "one": torch.tensor([0.7]),
            "each": torch.rand(rows, generator=generator) + 0.5,
        }[temperature]
        self.upstream = list(torch.randn(2, rows, generator=generator))

    @property
    def shape(self):
        return {"ignore_index": IGNORE, "vocab_start": self.start, "columns": self.columns}

    def rows(self, rows):
        """The same case, of these rows only; views."""
        part = object.__new__(Case)
        part.__dict__.update(self.__dict__)
        part.logits, part.target = self.logits[rows], self.target[rows]
        part.mask = None if self.mask is None else self.mask[rows]
        if self.temperature is not None and len(self.temperature) > 1:
            part.temperature = self.temperature[rows]
        part.upstream = [g[rows] for g in self.upstream]
        return part

    def stats(self):
        out = torch.full((self.kinds, len(self.target)), NAN)
        native.vocab_stats(self.logits, self.target, self.mask, self.temperature, out, **self.shape)
        return out

    def grad(self, normalizers, upstream=(0, 1), out=None):
        out = torch.full_like(self.logits, NAN) if out is None else out
        given = [self.upstream[i] if i in upstream else None for i in (0, 1)]
        native.logits_grad(
            self.logits,
            self.target,
            self.mask,
            self.temperature,
            normalizers,
            *given,
            out,
            vocab_size=10**6,
            **self.shape,
        )
        return out

    def kept(self):
        kept = torch.ones_like(self.logits[:, : self.columns], dtype=torch.bool)
        if self.mask is not None:
            kept = self.mask[:, : self.columns].clone()
            local = self.target - self.start
            owned = (local >= 0) & (local < self.columns)
            kept[owned, local[owned]] = True
        return kept

    def inverse(self, dtype):
        ones = torch.ones(len(self.target), 1, dtype=dtype)
        return ones if self.temperature is None else ones / self.temperature.to(dtype).unsqueeze(1)

    def plain_stats(self, dtype):
        x, kept = self.logits[:, : self.columns].to(dtype), self.kept()
        local = self.target - self.start
        owned = (local >= 0) & (local < self.columns)
        picked = torch.full((len(x),), NAN, dtype=dtype)
        picked[owned] = x[owned, local[owned]]

        def sums(values):
            top = values.amax(1) if values.shape[1] else values.new_full((len(values),), -INF)
            z = (values - top.masked_fill(top == -INF, 0).unsqueeze(1)) * self.inverse(dtype)
            e = z.exp()
            return top, e.sum(1), (e * z).masked_fill(values == -INF, 0).sum(1)

        full, lp = sums(x), sums(x.masked_fill(~kept, -INF))
        out = torch.stack([*lp[:2], picked, full[2], full[0], full[1]])[: self.kinds]
        ignored = torch.tensor([0, 1, 0, 0, 0, 1], dtype=dtype)[: self.kinds]
        return torch.where(self.target == IGNORE, ignored.unsqueeze(1), out)

    def normalizers(self, dtype=torch.float64):
        """What one shard's statistics merge into; a target that this shard lacks is given a logit by another."""
        s = self.plain_stats(dtype)
        out = [s[0], s[1].log(), s[2].nan_to_num(0.0)]
        if self.kinds > 3:
            total = s[-1] if self.kinds == 6 else s[1]
            out.append(total.log() - s[3] / total)
        return torch.stack(out + ([s[4], s[5].log()] if self.kinds == 6 else []))

    def plain_grad(self, normalizers, dtype, upstream=(0, 1)):
        """Gradient and the magnitude of the numbers that were added up to it."""
        x, n = self.logits[:, : self.columns].to(dtype), normalizers.to(dtype).unsqueeze(2)
        a, b = (
            (self.upstream[i].to(dtype).unsqueeze(1) if i in upstream else torch.zeros(len(x), 1, dtype=dtype))
            * self.inverse(dtype)
            for i in (0, 1)
        )
        local = self.target - self.start
        one = (torch.arange(self.columns) == local.unsqueeze(1)).to(dtype)
        log_p_lp = ((x - n[0]) * self.inverse(dtype) - n[1]).clamp(min=-1e4)
        p_lp = torch.where(self.kept(), log_p_lp.exp(), 0)
        grad, size = a * (one - p_lp), a.abs() * (one + p_lp * (1 + log_p_lp.abs()))
        if 1 in upstream:
            full = 4 if self.kinds == 6 else 0
            log_p = ((x - n[full]) * self.inverse(dtype) - n[full + 1]).clamp(min=-1e4)
            p = log_p.exp()
            grad = grad - b * p * (log_p + n[3])
            # Rounding the exponent is a relative error of p as large as the exponent; log p + H may cancel.
            cancelling = log_p.abs() + n[3].abs() + n[full + 1].abs()
            size = size + b.abs() * p * (1 + log_p.abs() * (log_p + n[3]).abs() + cancelling)
        dead = (self.target == IGNORE).unsqueeze(1)
        return grad.masked_fill(dead, 0), size.masked_fill(dead, 0)


def assert_budget(ours, truth, plain, size):
    ours, plain = ours.double(), plain.double()
    assert torch.equal(ours.isnan(), truth.isnan())
    infinite = truth.isinf()
    assert torch.equal(ours[infinite], truth[infinite])
    excess = (ours - truth).abs() - 2 * (plain - truth).abs() - FLOOR * size
    excess = excess[~(truth.isnan() | infinite)]
    assert excess.numel() == 0 or excess.max() <= 0, excess.max()


def check_stats(case):
    truth = case.plain_stats(torch.float64)
    assert_budget(case.stats(), truth, case.plain_stats(torch.float32), truth.abs())


def check_grad(case):
    for upstream in [(0, 1), (0,), (1,)] if case.kinds > 3 else [(0,)]:
        check_grad_for(case, upstream)


def check_grad_for(case, upstream):
    normalizers = case.normalizers().float()
    ours = case.grad(normalizers, upstream)
    assert (ours[:, case.columns :] == 0).all()
    truth, size = case.plain_grad(normalizers.double(), torch.float64, upstream)
    plain = case.plain_grad(normalizers, torch.float32, upstream)[0]
    eps, tiny = torch.finfo(ours.dtype).eps, torch.finfo(ours.dtype).smallest_normal
    rounding = eps * truth.abs() + tiny * eps if ours.dtype != torch.float32 else 1e-37
    assert_budget(ours[:, : case.columns], truth, plain, size + rounding / FLOOR)


def bits(tensor):
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
