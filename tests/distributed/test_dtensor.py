"""DTensor logits on 1-D and 2-D meshes: values, gradients and placements, eager and compiled, and what is refused."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ppo_ops
from ppo_ops import reference
from tests.distributed.harness import Pool
from tests.tolerances import assert_fp64

# The meshes' dimensions and the placements on them, for logits [rows, V] or, with a third index, [rows, 2, V].
LAYOUTS: dict[str, tuple[int, tuple[int, ...], tuple[Any, ...]]] = {
    "one_rank": (1, (1,), (Shard(1),)),
    "two": (2, (2,), (Shard(1),)),
    "four": (4, (4,), (Shard(1),)),
    "replicated": (2, (2,), (Replicate(),)),
    "batch": (2, (2,), (Shard(0),)),
    "batch_and_vocabulary": (4, (2, 2), (Shard(0), Shard(1))),
    "vocabulary_and_batch": (4, (2, 2), (Shard(1), Shard(0))),
    "replicated_and_vocabulary": (4, (2, 2), (Replicate(), Shard(1))),
    "twice_batch": (4, (2, 2), (Shard(0), Shard(0))),
    "sequence_and_vocabulary": (4, (2, 2), (Shard(1), Shard(2))),
}
# Even; one rank short; one rank short and one empty.
COLUMNS = (8, 7, 5)
SLOW = 150.0


class Reply(NamedTuple):
    log_prob: Tensor
    entropy: Tensor
    grad_logits: Tensor
    placements: tuple[Any, ...]
    grad_placements: tuple[Any, ...]


@functools.cache
def _square() -> DeviceMesh:
    """Made once, by all four ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def _mesh(group: ProcessGroup, shape: tuple[int, ...]) -> DeviceMesh:
    return _square() if len(shape) == 2 else DeviceMesh.from_group(group, "cpu")


def _whole(layout: str, columns: int, rows: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, target (with an ignored one), keep_mask and temperatures of all ranks together."""
    source = torch.Generator().manual_seed(columns)
    shape = (rows, 2) if layout.startswith("sequence") else (rows,)
    logits = torch.randn(*shape, columns, generator=source, dtype=torch.float64)
    target = torch.randint(columns, shape, generator=source)
    target.view(-1)[-1] = -100
    mask = torch.rand(logits.shape, generator=source) < 0.6
    return logits, target, mask, 0.5 + torch.rand(shape, generator=source, dtype=torch.float64)


def _rows(layout: str) -> tuple[Any, ...]:
    """Placements of results: replicated where the vocabulary is sharded."""
    _, _, placements = LAYOUTS[layout]
    last = 2 if layout.startswith("sequence") else 1
    return tuple(Replicate() if p == Shard(last) else p for p in placements)


def _put(tensor: Tensor, mesh: DeviceMesh, placements: tuple[Any, ...]) -> Any:
    """A DTensor cut from what every rank holds, without communication."""
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def _both(logits: Any, target: Any, mask: Any, temperature: Any) -> Any:
    return ppo_ops.logprob_entropy(logits, target, mask, temperature=temperature)


def _run(group: ProcessGroup, layout: str, columns: int, plain: bool, compiled: bool, rows: int = 5) -> Reply:
    _, shape, placements = LAYOUTS[layout]
    mesh = _mesh(group, shape)
    logits, *more = _whole(layout, columns, rows)
    logits = _put(logits, mesh, placements).requires_grad_()
    target, mask, temperature = (
        _put(tensor, mesh, where)
        for tensor, where in zip(more, (_rows(layout), placements, _rows(layout)), strict=True)
    )
    if plain:
        target, mask, temperature = target.to_local(), mask.to_local(), temperature.to_local()
    if compiled:
        torch._dynamo.reset()
    function = torch.compile(_both, backend="aot_eager", fullgraph=True) if compiled else _both
    log_prob, entropy = function(logits, target, mask, temperature)
    (grad,) = torch.autograd.grad((log_prob * 2 + entropy * 3).sum(), logits)
    whole = [tensor.detach().full_tensor() for tensor in (log_prob, entropy, grad)]
    assert log_prob.placements == entropy.placements
    return Reply(*whole, log_prob.placements, grad.placements)


def _expected(layout: str, columns: int, rows: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    logits, target, mask, temperature = _whole(layout, columns, rows)
    logits.requires_grad_()
    log_prob, entropy = reference.logprob_entropy(logits, target, mask, temperature=temperature)
    (grad,) = torch.autograd.grad((log_prob * 2 + entropy * 3).sum(), logits)
    return log_prob.detach(), entropy.detach(), grad


def _check(layout: str, columns: int, replies: list[Reply], rows: int = 5) -> None:
    expected = _expected(layout, columns, rows)
    for reply in replies:
        for actual, right in zip(reply[:3], expected, strict=True):
            assert_fp64(actual, right)
        assert reply.placements == _rows(layout)
        assert reply.grad_placements == LAYOUTS[layout][2]


@pytest.mark.parametrize("plain", [False, True], ids=["all_dtensors", "plain_others"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_eager(ranks: Pool, layout: str, plain: bool) -> None:
    for columns in COLUMNS:
        _check(layout, columns, ranks.run(_run, layout, columns, plain, False, size=LAYOUTS[layout][0]))


def test_an_empty_batch_shard(ranks: Pool) -> None:
    replies = ranks.run(_run, "batch_and_vocabulary", 7, True, False, 1, size=4)
    _check("batch_and_vocabulary", 7, replies, 1)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("layout", ["two", "replicated", "batch_and_vocabulary", "four"])
def test_compiled(ranks: Pool, layout: str, columns: int) -> None:
    replies = ranks.run(_run, layout, columns, columns == 7, True, size=LAYOUTS[layout][0], timeout=SLOW)
    _check(layout, columns, replies)
