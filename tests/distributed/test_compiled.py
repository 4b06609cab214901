"""Real ranks under `torch.compile`, with cold and warm compile caches; and that no rank's number enters a graph.

Two ranks trace the same Dynamo graph, so the AOTAutograd cache hands the artifact of one rank to another (Note [No rank
in a graph] in `ppo_ops/ops/groups.py`). A rank number in it would show only in the second run, as a wrong gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

import ppo_ops
from tests import oracle
from tests.cases import Case, random_case
from tests.compiler.harness import TracedGraphs, compile_cache
from tests.distributed.harness import Pool
from tests.oracle import Results
from tests.tolerances import assert_budget, assert_same_bits

COLUMNS = 48
# Two compilations on two cores, each of which may call the C++ compiler several times.
SLOW = 150.0


def _case(size: int) -> Case:
    """As many columns a rank whatever the size, so that the graphs of two and of four ranks have the same key."""
    return random_case(f"compiled {size}", 5, COLUMNS * size, temperature=0.7)


class Reply(NamedTuple):
    results: Results | None
    error: str
    hits: int
    misses: int
    group_name: str


def _given(group: ProcessGroup, how: str) -> Any:
    if how == "mesh":
        return init_device_mesh("cpu", (group.size(),))
    world = dist.group.WORLD
    assert world is not None
    return world if how == "process_group" else world.group_name


def _compiled(group: ProcessGroup, cache: Path, how: str) -> Reply:
    """The compiled function's results on this rank, and what its AOTAutograd cache did."""
    size = dist.get_world_size()
    case, given = _case(size), _given(group, how)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    @torch.compile(fullgraph=True)
    def function(logits: Tensor, target: Tensor, keep_mask: None, **options: Any) -> tuple[Tensor, Tensor]:
        return ppo_ops.logprob_entropy(logits, target, keep_mask, group=given, **options)

    results, error = None, ""
    shard = case.logits.chunk(size, -1)[dist.get_rank()].contiguous()
    try:
        with compile_cache(str(cache)):
            results = oracle.run(function, case, shard)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    counters = torch._dynamo.utils.counters["aot_autograd"]
    hits, misses = counters["autograd_cache_hit"], counters["autograd_cache_miss"]
    return Reply(results, error, hits, misses, _given(group, "name"))


def _check(case: Case, replies: list[Reply]) -> None:
    results = []
    for reply in replies:
        assert reply.results is not None, reply.error
        results.append(reply.results)
    for result in results[1:]:
        assert_same_bits(result.log_prob, results[0].log_prob)
        assert_same_bits(result.entropy, results[0].entropy)
    grad_logits = torch.cat([result.grad_logits for result in results], -1)
    ours = (results[0].log_prob, results[0].entropy, grad_logits)
    for arguments in zip(ours, oracle.plain(case), oracle.truth(case), oracle.scales(case), strict=True):
        assert_budget(*arguments)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compile_cache")


@pytest.fixture(scope="module")
def replies(cache: Path) -> dict[str, list[Reply]]:
    """What two fresh processes with an empty compile cache give, for each kind of group."""
    with Pool(2) as pool:
        return {how: pool.run(_compiled, cache, how, size=2, timeout=SLOW) for how in ("process_group", "mesh", "name")}


@pytest.mark.parametrize("how", ["process_group", "mesh", "name"])
def test_compiled_on_two_ranks(replies: dict[str, list[Reply]], how: str) -> None:
    """Values and gradients are held to the rule that eager is held to."""
    _check(_case(2), replies[how])


def test_the_cache_was_cold(replies: dict[str, list[Reply]]) -> None:
    assert sum(reply.misses for reply in replies["process_group"]) >= 1


def test_a_warm_cache_gives_each_rank_its_own_gradient(cache: Path, replies: dict[str, list[Reply]]) -> None:
    """In processes that have compiled nothing themselves."""
    with Pool(2) as pool:
        warm = pool.run(_compiled, cache, "process_group", size=2, timeout=SLOW)
    assert [(reply.hits, reply.misses) for reply in warm] == [(1, 0)] * 2, "the cache was not used"
    _check(_case(2), warm)


def test_a_cache_of_two_ranks_never_makes_a_wrong_number_on_four(
    ranks: Pool, cache: Path, replies: dict[str, list[Reply]]
) -> None:
    four = ranks.run(_compiled, cache, "process_group", size=4, timeout=SLOW)
    assert {reply.group_name for reply in four} == {replies["process_group"][0].group_name}
    if any(reply.error for reply in four):
        for reply in four:  # all of them: a rank that went on alone would wait for the others
            assert reply.error.startswith("RuntimeError: this graph was compiled for a group of 2 ranks"), reply
            assert "has 4" in reply.error
    else:
        _check(_case(4), four)


@pytest.fixture(params=["process_group", "mesh", "name"])
def how(request: pytest.FixtureRequest) -> Iterator[str]:
    assert not dist.is_initialized()
    yield request.param
    if dist.is_initialized():
        dist.destroy_process_group()


def _graphs(rank: int, how: str) -> tuple[str, str]:
    """Text of the graphs that Inductor gets on this rank of a group that only pretends to communicate."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    assert dist.group.WORLD is not None
    given = _given(dist.group.WORLD, how)
    graphs = TracedGraphs()
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend=graphs)
    def function(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return ppo_ops.logprob_entropy(logits, target, group=given, temperature=0.7)

    log_prob, entropy = function(torch.randn(5, COLUMNS, requires_grad=True), torch.arange(5))
    (log_prob.sum() + entropy.sum()).backward()
    dist.destroy_process_group()
    (forward,), (backward,) = graphs.forward, graphs.backward
    return forward.print_readable(print_output=False), backward.print_readable(print_output=False)


def test_no_rank_in_a_graph(how: str) -> None:
    first, second = _graphs(0, how), _graphs(1, how)
    assert "_vocab_stats" in first[0]
    assert "_logits_grad" in first[1]
    assert first == second
