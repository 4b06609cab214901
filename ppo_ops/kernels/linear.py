"""The output layer chunk by chunk: GEMMs around the row kernels, in one workspace; the same for every device.

A chunk is some rows (tokens) and all columns of this rank's vocabulary. Its logits are computed into the workspace in
the accumulation dtype, read there by the kernels of `ppo_ops.ops.vocab_stats`, and in backward overwritten in place by
their gradient, from which the other two products are made.

Note [float32 logits]
    bfloat16 logits near 20 are 0.125 apart. A row whose probability sits on one token takes lse from that one rounded
    logit, so log_prob would be off by up to 0.06. The workspace therefore holds float32 logits for 16-bit inputs too:
    by GEMMs with a wider output on CUDA, and on the CPU, where torch 2.14 has none, by float32 GEMMs of blocks of the
    weight that are converted one at a time. Products of 16-bit numbers are exact in float32. The target's logit then
    needs no dot product of its own, and must not have one: read from the same logits as lse, its rounding error
    cancels where the target holds nearly all of the probability.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ppo_ops.kernels.linear_rows import (
    Chunk,
    Rows,
    Upstream,
    chunks,
    counts,
    grads_of,
    have_gradient,
    margin,
    select,
    stats_of,
)

DEFAULT_WORKSPACE_BYTES = 256 << 20
# On the CPU a GEMM takes a block of the weight of at most so many bytes, which is no slower than all of it at once, and
# at most this share of the workspace; but not fewer columns than this.
BLOCK_BYTES = 16 << 20
BLOCK_SHARE = 8
BLOCK_COLUMNS = 256

_settings = {"workspace_bytes": DEFAULT_WORKSPACE_BYTES}


def workspace_bytes() -> int:
    """Bytes that one call may use for logits. Stages read it when they run: no graph holds it."""
    return _settings["workspace_bytes"]


def set_workspace_bytes(number: int) -> None:
    """Set `workspace_bytes`."""
    _settings["workspace_bytes"] = number


class Layer(NamedTuple):
    """The output layer of this rank without padding columns.

    `compute` is the dtype that operands are rounded to, as autocast would; `accumulate` that of logits and sums.
    """

    weight: Tensor  # [columns, H]
    bias: Tensor | None  # [columns]
    compute: torch.dtype
    accumulate: torch.dtype


class Gradients(NamedTuple):
    """Where gradients go: hidden's in any dtype, the others in the accumulation dtype; None for unwanted ones."""

    hidden: Tensor | None  # [N, H]
    weight: Tensor | None  # [V_local, H]
    bias: Tensor | None  # [V_local]


def _mm(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    """``a @ b`` into `out`, or onto it; `out` may be wider than the operands."""
    if a.dtype == out.dtype:
        if add:
            out.addmm_(a, b)
        else:
            torch.mm(a, b, out=out)
    elif add:
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
    else:
        torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)


class _Products:
    """The three products of a chunk, and the buffers that chunks share.

    `operand` is the dtype of what goes into a GEMM: on CUDA `compute`, whose products its GEMMs add up in float32, on
    the CPU `accumulate`.
    """

    def __init__(self, layer: Layer, hidden: Tensor, rows: int, margin: int, backward: bool) -> None:
        self.layer, self.hidden, self.margin = layer, hidden, margin
        self.columns, self.width = layer.weight.shape
        cuda = hidden.device.type == "cuda"
        self.operand = layer.compute if cuda else layer.accumulate
        self.direct = layer.weight.dtype == layer.compute == self.operand and 1 in layer.weight.stride()
        budget = workspace_bytes()
        self.block = max(1, self.columns)
        if not (self.direct and cuda):
            room = min(BLOCK_BYTES, budget // BLOCK_SHARE)
            fitting = room // max(1, self.width * self.operand.itemsize)
            self.block = min(self.block, max(BLOCK_COLUMNS, fitting))
        if not self.direct:
            self.converted = hidden.new_empty((self.block, self.width), dtype=self.operand)
            budget -= self.converted.nbytes
        narrow = backward and self.operand != layer.accumulate
        a_row = self.columns * (layer.accumulate.itemsize + (self.operand.itemsize if narrow else 0))
        most = max(1, budget // max(1, a_row))
        # Chunks of one size: a short last one would be a slow GEMM.
        self.rows = -(-rows // -(-rows // most))
        shape = (self.rows + 2 * margin, self.columns)
        self.workspace = hidden.new_empty(shape, dtype=layer.accumulate)
        self.narrow = self.workspace.new_empty(shape, dtype=self.operand) if narrow else None

    def _places(self) -> Iterator[slice]:
        for first in range(0, self.columns, self.block):
            yield slice(first, min(first + self.block, self.columns))

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of columns with their weight ``[b, H]`` as a GEMM takes it."""
        for place in self._places():
            weight = self.layer.weight[place]
            if not self.direct:
                weight = self.converted[: len(weight)].copy_(weight.to(self.layer.compute))
            yield place, weight

    def operand_rows(self, chunk: Chunk, mask: Tensor | None) -> Tensor:
        """Hidden states of a chunk ``[n, H]``; zero where the mask says that a row does not count."""
        hidden = self.hidden[chunk].to(self.layer.compute).to(self.operand)
        return hidden if mask is None else hidden.masked_fill(~mask[chunk].unsqueeze(1), 0.0)

    def logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """``hidden @ weight.T + bias`` in the workspace; and the same with the margin."""
        framed = self.workspace[: len(hidden) + 2 * self.margin]
        logits = framed[self.margin : self.margin + len(hidden)]
        for place, weight in self._blocks():
            _mm(hidden, weight.t(), logits[:, place])
        if self.layer.bias is not None:
            logits.add_(self.layer.bias.to(self.layer.compute).to(logits.dtype))
        return logits, framed

    def grad_operand(self, grad_logits: Tensor) -> Tensor:
        """The gradient of the logits as a GEMM takes it."""
        return grad_logits if self.narrow is None else self.narrow[: len(grad_logits)].copy_(grad_logits)

    def add_grad_weight(self, grad_logits: Tensor, hidden: Tensor, total: Tensor, first: bool) -> None:
        """``grad_logits.T @ hidden`` into the first columns of `total`, or onto them."""
        for place in self._places():
            _mm(grad_logits[:, place].t(), hidden, total[place], add=not first)

    def put_grad_hidden(self, grad_logits: Tensor, grad_hidden: Tensor, chunk: Chunk) -> None:
        """``grad_logits @ weight``, accumulated over blocks of columns and rounded once."""
        straight = isinstance(chunk, slice) and grad_hidden.dtype == self.layer.accumulate
        shape = (len(grad_logits), self.width)
        part = grad_hidden[chunk] if straight else grad_hidden.new_empty(shape, dtype=self.layer.accumulate)
        if not self.columns:
            part.zero_()
        for place, weight in self._blocks():
            _mm(grad_logits[:, place], weight, part, add=place.start > 0)
        if not straight:
            grad_hidden[chunk] = part.to(grad_hidden.dtype)


def vocab_stats(kernels: ModuleType, hidden: Tensor, layer: Layer, rows: Rows, stats: Tensor) -> None:
    """Fill ``stats [K, N]`` as `ppo_ops.ops.vocab_stats` says, from ``hidden [N, H]``."""
    chosen, mask = select(counts(rows))
    if chosen is not None:  # what the row kernels write for an ignored row
        stats.zero_()
        stats[1] = 1.0
        stats[5:] = 1.0
    number = len(hidden) if chosen is None else len(chosen)
    if not number:
        return
    products = _Products(layer, hidden, number, margin(rows), backward=False)
    for chunk in chunks(len(hidden), products.rows, chosen):
        _, framed = products.logits(products.operand_rows(chunk, mask))
        if isinstance(chunk, slice):
            stats_of(kernels, framed, rows, chunk, stats[:, chunk])
        else:
            part = stats.new_empty((len(stats), len(chunk)))
            stats_of(kernels, framed, rows, chunk, part)
            stats[:, chunk] = part


def grads(
    kernels: ModuleType, hidden: Tensor, layer: Layer, rows: Rows, upstream: Upstream, gradients: Gradients
) -> None:
    """Fill the wanted gradients from ``hidden [N, H]``."""
    chosen, mask = select(have_gradient(rows, upstream))
    columns = len(layer.weight)
    number = len(hidden) if chosen is None else len(chosen)
    for total in gradients[1:]:
        if total is not None:
            total[columns if number else 0 :].zero_()
    if gradients.hidden is not None and chosen is not None:
        gradients.hidden.zero_()
    if not number:
        return
    products = _Products(layer, hidden, number, margin(rows), backward=True)
    for turn, chunk in enumerate(chunks(len(hidden), products.rows, chosen)):
        operand = products.operand_rows(chunk, mask)
        logits, framed = products.logits(operand)
        grads_of(kernels, framed, rows, chunk, upstream)
        _add_sums(products, logits, operand, gradients, columns, first=turn == 0)
        if gradients.hidden is not None:
            products.put_grad_hidden(products.grad_operand(logits), gradients.hidden, chunk)


def _add_sums(
    products: _Products, grad_logits: Tensor, hidden: Tensor, gradients: Gradients, columns: int, first: bool
) -> None:
    """Gradients of weight and bias: sums over rows, which grow from chunk to chunk."""
    if gradients.bias is not None:
        sums = grad_logits.sum(0)
        total = gradients.bias[:columns]
        total.copy_(sums) if first else total.add_(sums)
    if gradients.weight is not None:
        products.add_grad_weight(products.grad_operand(grad_logits), hidden, gradients.weight, first)
