"""DTensor logits from an output head split by columns, alone and with FSDP2; no rank's number in a compiled graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

import ppo_ops
from ppo_ops import reference
from tests.compiler.harness import TracedGraphs
from tests.distributed.harness import Pool
from tests.distributed.test_dtensor import COLUMNS, SLOW, Reply, _both, _mesh, _put, _square, _whole
from tests.tolerances import assert_fp64


def _head(group: ProcessGroup, columns: int, sharded_data: bool, parallel_loss: bool) -> list[Tensor]:
    """Loss and the head's gradient of a model whose head is split by columns and, where asked, by FSDP2 around it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, columns, bias=False)).double()
    mesh = _square()
    plan = {"1": ColwiseParallel(use_local_output=False)}
    parallelize_module(model, mesh["tp"], plan)
    hidden, target = torch.randn(4, 6, dtype=torch.float64), torch.arange(4) % columns
    if sharded_data:
        fully_shard(model, mesh=mesh["dp"])
        row = mesh["dp"].get_local_rank()
        hidden, target = hidden[2 * row : 2 * row + 2], target[2 * row : 2 * row + 2]
    with loss_parallel() if parallel_loss else contextlib.nullcontext():
        log_prob, entropy = ppo_ops.logprob_entropy(model(hidden), target)
        loss = (log_prob + 2 * entropy).mean()
        loss.backward()
    weight = model[1].weight
    assert isinstance(weight.grad, DTensor)
    assert weight.grad.placements == weight.placements
    local = loss.full_tensor() if isinstance(loss, DTensor) else loss
    return [local.detach(), weight.grad.full_tensor()]


@pytest.mark.parametrize("columns", [8, 7])
@pytest.mark.parametrize(("sharded_data", "parallel_loss"), [(False, False), (False, True), (True, False)])
def test_a_head_split_by_columns(ranks: Pool, columns: int, sharded_data: bool, parallel_loss: bool) -> None:
    """`ColwiseParallel`, alone, inside `loss_parallel`, and with FSDP2 on the mesh's other dimension."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, columns, bias=False)).double()
    hidden, target = torch.randn(4, 6, dtype=torch.float64), torch.arange(4) % columns
    log_prob, entropy = reference.logprob_entropy(model(hidden), target)
    loss = (log_prob + 2 * entropy).mean()
    loss.backward()
    replies = ranks.run(_head, columns, sharded_data, parallel_loss, size=4)
    losses = torch.stack([reply[0] for reply in replies])
    assert_fp64(losses.mean(), loss.detach())  # with FSDP2 each half of the ranks has its own rows
    for _, grad in replies:
        assert model[1].weight.grad is not None
        assert_fp64(grad, model[1].weight.grad)


def _with_cache(group: ProcessGroup, columns: int) -> tuple[Reply, int]:
    """With Inductor and the compile caches on; how often the AOTAutograd cache gave something."""
    mesh = _mesh(group, (2,))
    logits, target, _, _ = _whole("two", columns)
    logits = _put(logits, mesh, (Shard(1),)).requires_grad_()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.reset()
    log_prob, entropy = torch.compile(ppo_ops.logprob_entropy, fullgraph=True)(logits, target)
    (grad,) = torch.autograd.grad((log_prob * 2 + entropy * 3).sum(), logits)
    whole = [tensor.detach().full_tensor() for tensor in (log_prob, entropy, grad)]
    hits = torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]
    return Reply(*whole, log_prob.placements, grad.placements), hits


def test_a_warm_compile_cache(tmp_path: Path) -> None:
    """Two runs over one cache folder: the second gets artifacts that some rank made, and each rank its own gradient."""
    logits, target, _, _ = _whole("two", 8)
    logits.requires_grad_()
    log_prob, entropy = reference.logprob_entropy(logits, target)
    (grad,) = torch.autograd.grad((log_prob * 2 + entropy * 3).sum(), logits)
    with Pool(2, {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}) as pool:
        for run in range(2):
            for reply, hits in pool.run(_with_cache, 8, size=2, timeout=SLOW):
                for actual, right in zip(reply[:3], (log_prob, entropy, grad), strict=True):
                    assert_fp64(actual, right.detach())
                # torch 2.11 does not cache graphs with DTensors; 2.13 and 2.14 do.
                at_least = run if torch.__version__ >= "2.13" else 0
                assert at_least <= hits <= run, "the cache was not cold, or not used"


@pytest.fixture
def no_group() -> Iterator[None]:
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _graphs(rank: int, columns: int) -> tuple[str, str]:
    """Text of the graphs that Inductor gets on this rank of four that only pretend to communicate."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cpu", (4,))
    logits = _put(torch.randn(5, columns), mesh, (Shard(1),)).requires_grad_()
    graphs = TracedGraphs()
    torch._dynamo.reset()
    log_prob, entropy = torch.compile(_both, fullgraph=True, backend=graphs)(logits, torch.arange(5), None, 0.7)
    (log_prob.sum() + entropy.sum()).backward()
    dist.destroy_process_group()
    (forward,), (backward,) = graphs.forward, graphs.backward
    return forward.print_readable(print_output=False), backward.print_readable(print_output=False)


@pytest.mark.parametrize("columns", COLUMNS)
def test_no_rank_in_a_graph(no_group: None, columns: int) -> None:
    """Ranks with as many columns have the same graphs, evenly cut or not."""
    first, second = _graphs(0, columns), _graphs(1, columns)
    assert "_vocab_stats" in first[0]
    assert "_logits_grad" in first[1]
    assert first == second
