"""A cell of the benchmark and its tensors.

The logits of a cell are an intermediate result, as in training: `Inputs.logits` gives them a grad_fn without copying
them, and `Inputs.grad_logits` is where their gradient arrives. Before each call the logits are written anew, outside
the clock, for every provider alike, because some overwrite them (Megatron float32 ones in forward, ours with
`inplace_backward`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

# Rows are drawn at random up to this number and then repeated: no provider's time depends on the values.
DISTINCT_ROWS = 256
SCALE = 2.0  # standard deviation of the logits
KEPT_WITHIN = 3.0  # keeps tokens up to e^3 times less likely than the likeliest: some hundreds of 151,936


@dataclass(frozen=True)
class Cell:
    """What is computed: N rows of a vocabulary V in one dtype, with options."""

    rows: int
    vocab: int
    dtype: torch.dtype
    device: str = "cpu"
    entropy: bool = True
    grad: bool = True
    kept: bool = False
    ignored: bool = False

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def what(self) -> str:
        """Name of the computation in tables."""
        name = "log-prob + entropy" if self.entropy else "log-prob"
        option = ", kept set" if self.kept else ", half ignored" if self.ignored else ""
        return name + option

    @property
    def elements(self) -> int:
        return self.rows * self.vocab

    def row(self) -> dict[str, Any]:
        """The cell's part of a row of results."""
        return {
            "rows": self.rows,
            "vocab": self.vocab,
            "dtype": self.dtype_name,
            "what": self.what,
            "grad": self.grad,
        }


class _Head(torch.autograd.Function):
    """Stands for the layer that made the logits; hands its gradient to a list and stops."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, memory: list[Tensor], received: list[Tensor]) -> Tensor:
        ctx.received = received
        return memory[0].new_empty(0).set_(memory[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.received.append(grad)
        return None, None, None


class Inputs:
    """Tensors of a cell; with a world size over 1, this rank's columns of them."""

    def __init__(self, cell: Cell, rank: int = 0, world: int = 1, values: Tensor | None = None) -> None:
        self.cell, self.world = cell, world
        generator = torch.Generator().manual_seed(0)
        if values is None:
            distinct = torch.randn(min(cell.rows, DISTINCT_ROWS), cell.vocab, generator=generator) * SCALE
            values = distinct.repeat(-(-cell.rows // len(distinct)), 1)[: cell.rows]
        self.full = values.to(cell.dtype).to(cell.device)
        target = torch.randint(cell.vocab, (cell.rows,), generator=generator)
        chance = torch.rand(cell.rows, generator=generator)
        self.ignored = None
        if cell.ignored:
            self.ignored = (chance <= chance.median()).to(cell.device)
            target[chance <= chance.median()] = -100
        self.target = target.to(cell.device)
        self.full_mask = self.full >= self.full.amax(-1, keepdim=True) - KEPT_WITHIN if cell.kept else None
        width = cell.vocab // world
        self.columns = slice(rank * width, (rank + 1) * width)
        self.source = self.full if world == 1 else self.full[:, self.columns].contiguous()
        self.keep_ids, self.keep_offsets = None, None
        if self.full_mask is not None:
            self.keep_ids = self.full_mask.nonzero()[:, 1].contiguous()
            self.keep_offsets = F.pad(self.full_mask.sum(-1).cumsum(0), (1, 0))
        self.keep_mask = self.full_mask if self.full_mask is None or world == 1 else self.full_mask[:, self.columns]
        self.work = torch.empty_like(self.source)
        self.upstream = [torch.randn(cell.rows, generator=generator).to(cell.device) for _ in range(2)]
        self._anchor = torch.zeros((), device=cell.device, requires_grad=True)
        self.received: list[Tensor] = []

    def restore(self) -> None:
        """Write the logits anew and drop the last gradient."""
        self.received.clear()
        self.work.copy_(self.source)

    def logits(self) -> Tensor:
        """The logits ``[N, V_local]`` as an intermediate result, or plain where the cell has no gradient."""
        if not self.cell.grad:
            return self.work
        logits: Tensor = _Head.apply(self._anchor, [self.work], self.received)
        return logits

    def backward(self, outputs: tuple[Tensor, Tensor | None]) -> None:
        """Backward from the outputs with random upstream gradients."""
        pairs = [(out, grad) for out, grad in zip(outputs, self.upstream, strict=True) if out is not None]
        torch.autograd.backward([out for out, _ in pairs], [grad.to(out.dtype) for out, grad in pairs])

    @property
    def grad_logits(self) -> Tensor:
        return self.received[0]
