"""DTensor logits from an output head split by columns: alone, inside `loss_parallel`, and with FSDP2 around it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

import ppo_ops
from ppo_ops import reference
from tests.distributed.harness import Pool
from tests.distributed.test_dtensor import _dimension
from tests.tolerances import assert_fp64


def _targets(target: Tensor, columns: int) -> Tensor:
    """Two ids a position."""
    return torch.stack([(target + 1) % columns, target], -1)


def _loss(logits: Any, target: Tensor) -> Any:
    log_prob, entropy = ppo_ops.logprob_entropy(logits, target)
    return (log_prob + 2 * entropy).mean() + ppo_ops.logprob(logits, _targets(target, logits.shape[-1])).mean()


class _Model(torch.nn.Module):
    def __init__(self, columns: int) -> None:
        super().__init__()
        self.body = torch.nn.Linear(6, 6).double()
        self.head = torch.nn.Linear(6, columns, bias=False).double()
        self.loss = _loss

    def forward(self, hidden: Tensor, target: Tensor) -> Any:
        return self.loss(self.head(self.body(hidden)), target)


def _model_and_data(columns: int) -> tuple[_Model, Tensor, Tensor]:
    torch.manual_seed(0)
    return _Model(columns), torch.randn(4, 6, dtype=torch.float64), torch.arange(4) % columns


def run_head(
    group: ProcessGroup, columns: int, sharded_data: bool, parallel_loss: bool, compiled: str = "nothing"
) -> list[Tensor]:
    """Loss and gradients of a model whose head is split by columns and, where asked, by FSDP2 around it.

    `compiled` is "nothing", the "loss" or the whole "module", as one graph.
    """
    model, hidden, target = _model_and_data(columns)
    parallelize_module(model, _dimension("tp"), {"head": ColwiseParallel(use_local_output=False)})
    if compiled == "loss":
        model.loss = torch.compile(_loss, fullgraph=True)
    elif compiled == "module":
        model.compile(fullgraph=True)
    if sharded_data:
        fully_shard(model, mesh=_dimension("dp"))
        row = _dimension("dp").get_local_rank()
        hidden, target = hidden[2 * row : 2 * row + 2], target[2 * row : 2 * row + 2]
    with loss_parallel() if parallel_loss else contextlib.nullcontext():
        loss = model(hidden, target)
        loss.backward()
    grad = model.head.weight.grad
    assert isinstance(grad, DTensor)
    assert grad.placements == model.head.weight.placements
    results = [loss, *(parameter.grad for parameter in model.parameters())]
    return [value.full_tensor().detach() if isinstance(value, DTensor) else value.detach() for value in results]


def reference_of_a_head(columns: int) -> list[Tensor]:
    """The same by `reference` on one rank."""
    model, hidden, target = _model_and_data(columns)
    logits = model.head(model.body(hidden))
    log_prob, entropy = reference.logprob_entropy(logits, target)
    many = logits.log_softmax(-1).gather(-1, _targets(target, columns))
    loss = (log_prob + 2 * entropy).mean() + many.mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("columns", [8, 7])
@pytest.mark.parametrize(("sharded_data", "parallel_loss"), [(False, False), (False, True), (True, False)])
def test_a_head_split_by_columns(ranks: Pool, columns: int, sharded_data: bool, parallel_loss: bool) -> None:
    """`ColwiseParallel`, alone, inside `loss_parallel`, and with FSDP2 on the mesh's other dimension."""
    loss, *grads = reference_of_a_head(columns)
    replies = ranks.run(run_head, columns, sharded_data, parallel_loss, size=4)
    # With FSDP2 each half of the ranks has its own rows.
    assert_fp64(torch.stack([reply[0] for reply in replies]).mean(), loss)
    for reply in replies:
        for actual, expected in zip(reply[1:], grads, strict=True):
            assert_fp64(actual, expected)
