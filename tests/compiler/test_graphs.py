"""The graphs that Inductor receives: one statistics pass, one all-gather, one gradient pass, and no rank in them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch.testing._internal.distributed.fake_pg import FakeStore

import ppo_ops
from tests.compiler.harness import TracedGraphs, operators


def _fake_group(rank: int, size: int) -> None:
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())


@pytest.fixture
def two_ranks() -> object:
    _fake_group(0, 2)
    yield
    dist.destroy_process_group()


def _trace(
    with_entropy: bool = True, masked: bool = False, temperature: float = 1.0, group: object = None
) -> TracedGraphs:
    torch._dynamo.reset()
    graphs = TracedGraphs()

    @torch.compile(backend=graphs, fullgraph=True)
    def loss(logits: torch.Tensor, target: torch.Tensor, keep_mask: torch.Tensor | None) -> torch.Tensor:
        if not with_entropy:
            return ppo_ops.logprob(logits, target, keep_mask, temperature=temperature, group=group).sum()
        log_prob, entropy = ppo_ops.logprob_entropy(logits, target, keep_mask, temperature=temperature, group=group)
        return (log_prob - 0.01 * entropy).sum()

    logits = torch.zeros(5, 600, requires_grad=True)
    keep_mask = torch.ones(5, 600, dtype=torch.bool) if masked else None
    loss(logits, torch.zeros(5, dtype=torch.int64), keep_mask).backward()
    return graphs


def _shown(gm: torch.fx.GraphModule) -> str:
    """The nodes that cost something, stages and collectives, with shapes for names: those differ by torch version."""

    def operand(value: object) -> object:
        return list(value.meta["val"].shape) if isinstance(value, torch.fx.Node) else value

    lines = []
    for node in gm.graph.nodes:
        if node.op == "call_function" and str(node.target).startswith(("ppo.", "_c10d")):
            operands = ", ".join(str(operand(value)) for value in node.args)
            lines.append(f"{operand(node)} = {node.target}({operands})")
    return "\n".join(lines)


def test_forward_graph(two_ranks: object) -> None:
    graphs = _trace(group=dist.group.WORLD)
    assert len(graphs.forward) == len(graphs.backward) == 1
    assert_expected_inline(
        _shown(graphs.forward[0]),
        """\
[4, 5] = ppo._vocab_stats.default([5, 600], [5], None, None, -100, None, None, 0, 2, True)
[8, 5] = _c10d_functional.all_gather_into_tensor.default([4, 5], 2, 0)
[8, 5] = _c10d_functional.wait_tensor.default([8, 5])""",
    )


def test_backward_graph(two_ranks: object) -> None:
    graphs = _trace(group=dist.group.WORLD)
    assert_expected_inline(
        _shown(graphs.backward[0]),
        """[5, 600] = ppo._logits_grad.default([5, 600], [5], None, None, [4, 5], [5], [5], -100, None, None, 0)""",
    )


def test_everything_else_is_small(two_ranks: object) -> None:
    """All other nodes hold at most W K N numbers: nothing of the size of the logits beside the gradient."""
    graphs = _trace(masked=True, temperature=0.7, group=dist.group.WORLD)
    for gm in graphs.forward + graphs.backward:
        for node in gm.graph.nodes:
            value = node.meta.get("val")
            if node.op == "call_function" and isinstance(value, torch.Tensor):
                limit = 5 * 600 if str(node.target) == "ppo._logits_grad.default" else 2 * 6 * 5
                assert value.numel() <= limit, node.format_node()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_counts(two_ranks: object, with_entropy: bool, masked: bool) -> None:
    graphs = _trace(with_entropy, masked, temperature=0.7, group=dist.group.WORLD)
    forward, backward = operators(graphs.forward[0]), operators(graphs.backward[0])
    assert forward["ppo._vocab_stats.default"] == 1
    assert forward["_c10d_functional.all_gather_into_tensor.default"] == 1
    assert forward["_c10d_functional.wait_tensor.default"] == 1
    assert backward["ppo._logits_grad.default"] == 1
    assert backward["ppo._vocab_stats.default"] == 0
    assert not [name for name in backward if "c10d" in name]
    private = [name for name in forward + backward if name.startswith("ppo.")]
    assert sorted(private) == ["ppo._logits_grad.default", "ppo._vocab_stats.default"]


def test_one_rank_has_no_collective() -> None:
    graphs = _trace()
    assert not [name for name in operators(graphs.forward[0]) if "c10d" in name]


def test_all_ranks_get_the_same_graph() -> None:
    shown = []
    for rank in (0, 1, 3):
        _fake_group(rank, 4)
        try:
            graphs = _trace(group=dist.group.WORLD)
            shown.append((graphs.forward[0].code, graphs.backward[0].code))
        finally:
            dist.destroy_process_group()
    assert shown[0] == shown[1] == shown[2]


def test_without_entropy_gradient_no_second_operand() -> None:
    torch._dynamo.reset()
    graphs = TracedGraphs()
    loss = torch.compile(lambda x, t: ppo_ops.logprob_entropy(x, t)[0].sum(), backend=graphs, fullgraph=True)
    loss(torch.zeros(5, 6, requires_grad=True), torch.zeros(5, dtype=torch.int64)).backward()
    (node,) = [n for n in graphs.backward[0].graph.nodes if str(n.target) == "ppo._logits_grad.default"]
    assert node.args[6] is None
