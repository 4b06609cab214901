"""DTensor logits under `torch.compile(fullgraph=True)`: Inductor on four ranks, caches, no rank in a graph, limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import ppo_ops
from tests.compiler.harness import TracedGraphs, compile_cache
from tests.distributed import test_dtensor
from tests.distributed.harness import Pool
from tests.distributed.test_dtensor import COLUMNS, SLOW, Reply
from tests.distributed.test_dtensor_models import reference_of_a_head, run_head
from tests.tolerances import assert_fp64


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("compile_cache"))


def _with_cache(group: ProcessGroup, folder: str, function: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """With Inductor's files in `folder`; how often the AOTAutograd cache gave something."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with compile_cache(folder):
        result = function(group, *args)
    return result, torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]


def _inductor(group: ProcessGroup, folder: str, layout: str, columns: int) -> tuple[Reply, int]:
    # What a mesh knows only after its first use is part of torch's cache key.
    test_dtensor._run(group, layout, columns, columns == 7, None)
    return _with_cache(group, folder, test_dtensor._run, layout, columns, columns == 7, "inductor")


# Even, and with a rank that is short and, on the first mesh, one that is empty.
@pytest.mark.parametrize(
    ("layout", "columns"), [("four", 8), ("four", 5), ("batch_and_vocabulary", 8), ("batch_and_vocabulary", 7)]
)
def test_inductor_on_four_ranks(ranks: Pool, cache: str, layout: str, columns: int) -> None:
    """Two runs over one cache folder: the second gets artifacts that some rank made, and each rank its own gradient."""
    for run in range(2):
        replies = ranks.run(_inductor, cache, layout, columns, size=4, timeout=SLOW)
        test_dtensor._check(layout, columns, [reply for reply, _ in replies])
        # torch 2.11 does not cache graphs with DTensors; 2.13 and 2.14 do. Even shards share an artifact in the first
        # run, if a rank is late enough.
        if run == 1:
            hits = [hits for _, hits in replies]
            assert hits == [int(torch.__version__ >= "2.13")] * 4, "the cache was not used"


def _inductor_head(group: ProcessGroup, folder: str, columns: int, how: str) -> list[Tensor]:
    results: list[Tensor] = _with_cache(group, folder, run_head, columns, True, False, how)[0]
    return results


@pytest.mark.parametrize(("columns", "how"), [(7, "loss"), (8, "module")])
def test_inductor_with_a_head_split_by_columns(ranks: Pool, cache: str, columns: int, how: str) -> None:
    """The loss alone as one graph, and body, head and loss as one, with FSDP2 around them."""
    loss, *grads = reference_of_a_head(columns)
    replies = ranks.run(_inductor_head, cache, columns, how, size=4, timeout=SLOW)
    assert_fp64(torch.stack([reply[0] for reply in replies]).mean(), loss)
    for reply in replies:
        for actual, expected in zip(reply[1:], grads, strict=True):
            assert_fp64(actual, expected)


def _changing_rows(group: ProcessGroup, layout: str) -> tuple[list[Reply], int]:
    """One compiled function, batch after batch; the number of its graphs."""
    torch._dynamo.reset()
    graphs = TracedGraphs()
    function = torch.compile(test_dtensor._both, backend=graphs, fullgraph=True)
    replies = [test_dtensor.call(group, layout, 7, True, function, rows) for rows in (4, 6, 8)]
    return replies, len(graphs.forward)


def test_a_changing_number_of_rows(ranks: Pool) -> None:
    """Columns uneven, rows even: the second batch makes a graph for all that follow."""
    layout = "batch_and_vocabulary"
    for replies, graphs in ranks.run(_changing_rows, layout, size=4, timeout=SLOW):
        assert graphs == 2
        for reply, rows in zip(replies, (4, 6, 8), strict=True):
            test_dtensor._check(layout, 7, [reply], rows)


@pytest.fixture
def no_group() -> Iterator[None]:
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _pretend(rank: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch._dynamo.reset()
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())


def _graphs(rank: int, columns: int) -> tuple[str, str]:
    """Text of the graphs that Inductor gets on this rank of four that only pretend to communicate."""
    _pretend(rank)
    mesh = init_device_mesh("cpu", (4,))
    logits = test_dtensor._put(torch.randn(5, columns), mesh, (Shard(1),)).requires_grad_()
    graphs = TracedGraphs()
    function = torch.compile(test_dtensor._both, fullgraph=True, backend=graphs)
    log_prob, entropy = function(logits, torch.arange(5), None, 0.7)
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


def _plain(logits: Any) -> Any:
    return logits.log_softmax(-1).mean()


def _ours(logits: Any) -> Any:
    return ppo_ops.logprob(logits, torch.zeros(len(logits.to_local()), dtype=torch.int64)).mean()


def _logits(mesh: DeviceMesh, rows: int, columns: int, *placements: Any) -> Any:
    return test_dtensor._put(torch.randn(rows, columns), mesh, placements).requires_grad_()


def _equal_mesh(function: Callable[[Any], Any]) -> None:
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for rows in (4, 6):
        torch._dynamo.reset()
        torch.compile(function, backend="aot_eager", fullgraph=True)(
            _logits(square["tp"], rows, 8, Shard(1))
        ).backward()


def _uneven_sizes(function: Callable[[Any], Any]) -> None:
    mesh = init_device_mesh("cpu", (4,))
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for columns in (8, 7):
        compiled(_logits(mesh, 4, columns, Shard(1))).backward()


def _sharded_inside(function: Callable[[Any], Any]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = fully_shard(torch.nn.Linear(3, 8), mesh=mesh["dp"])

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(hidden: Tensor) -> Any:
        return function(DTensor.from_local(model(hidden), mesh["tp"], (Replicate(),), run_check=False))

    compiled(torch.randn(4, 3)).backward()


def _outcome(case: Callable[[Any], None], function: Callable[[Any], Any]) -> str:
    _pretend(0)
    try:
        case(function)
    except Exception as error:
        return type(error).__name__
    finally:
        dist.destroy_process_group()
    return "compiled"


@pytest.mark.parametrize("case", [_equal_mesh, _uneven_sizes, _sharded_inside])
def test_what_torch_does_not_compile_either(no_group: None, case: Callable[[Any], None]) -> None:
    """Note [DTensors that torch does not compile] in `ppo_ops/dtensor.py`: as plain `log_softmax`, or better."""
    assert _outcome(case, _ours) in ("compiled", _outcome(case, _plain))
