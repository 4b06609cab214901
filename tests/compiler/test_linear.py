# ruff: noqa: E501  (golden texts are as long as they are)
"""The fused output layer under the compiler: its graphs, its exported node, and how often it is compiled."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch.testing._internal.distributed.fake_pg import FakeStore

import ppo_ops
from tests.compiler.harness import InductorGraphs, TracedGraphs, operator_names


def _shown(gm: torch.fx.GraphModule) -> str:
    """Stages and collectives, with shapes for names: those differ by torch version."""

    def shape(value: object) -> object:
        if not isinstance(value, torch.fx.Node):
            return value
        found = value.meta["val"]
        return [list(t.shape) for t in found] if isinstance(found, tuple) else list(found.shape)

    lines = []
    for node in gm.graph.nodes:
        if node.op == "call_function" and str(node.target).startswith(("ppo.", "_c10d")):
            lines.append(f"{shape(node)} = {node.target}({', '.join(str(shape(value)) for value in node.args)})")
    return "\n".join(lines)


def _leaves(rows: int, width: int = 3, vocab: int = 7) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, width), (vocab, width), (vocab,))
    return [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]


def _target(rows: int, vocab: int = 7) -> torch.Tensor:
    return torch.arange(rows) % vocab


def _loss(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    log_prob, entropy = ppo_ops.linear_logprob_entropy(hidden, weight, target, bias, temperature=0.7)
    return (log_prob - 0.01 * entropy).sum()


def _trace(rank: int, reduce_grad_hidden: bool = True, frozen_weight: bool = False) -> TracedGraphs:
    """Graphs on this rank of two that only pretend to communicate."""
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        torch._dynamo.reset()
        graphs = TracedGraphs()

        @torch.compile(backend=graphs, fullgraph=True)
        def loss(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            log_prob, entropy = ppo_ops.linear_logprob_entropy(
                hidden, weight, target, reduce_grad_hidden=reduce_grad_hidden, group=dist.group.WORLD
            )
            return (log_prob - 0.01 * entropy).sum()

        hidden, weight, _ = _leaves(5)
        weight.requires_grad_(not frozen_weight)
        loss(hidden.bfloat16(), weight.bfloat16(), _target(5)).backward()
        return graphs
    finally:
        dist.destroy_process_group()


def test_graphs() -> None:
    """One stage and one collective each way, the latter where the compiler sees them; the rest is small."""
    graphs = _trace(0)
    assert_expected_inline(
        _shown(graphs.forward[0]),
        """\
[4, 5] = ppo._linear_vocab_stats.default([5, 3], [7, 3], None, [5], None, None, None, torch.bfloat16, -100, None, None, 0, 2, True)
[8, 5] = _c10d_functional.all_gather_into_tensor.default([4, 5], 2, 0)
[8, 5] = _c10d_functional.wait_tensor.default([8, 5])""",
    )
    assert_expected_inline(
        _shown(graphs.backward[0]),
        """\
[[5, 3], [7, 3], [0]] = ppo._linear_grads.default([5, 3], [7, 3], None, [5], None, None, None, torch.bfloat16, -100, None, None, 0, [4, 5], [5], [5], [True, True, False], True)
[5, 3] = _c10d_functional.all_reduce.default([5, 3], sum, 0)
[5, 3] = _c10d_functional.wait_tensor.default([5, 3])""",
    )


def test_hidden_gradient_left_to_the_caller() -> None:
    graphs = _trace(0, reduce_grad_hidden=False)
    names = [name for name in operator_names(graphs.backward[0]) if name.startswith(("ppo.", "_c10d"))]
    assert names == ["ppo._linear_grads.default"]


def test_frozen_weight_is_not_asked_for() -> None:
    graphs = _trace(0, frozen_weight=True)
    (node,) = [n for n in graphs.backward[0].graph.nodes if str(n.target) == "ppo._linear_grads.default"]
    assert list(node.args[15]) == [True, False, False]


def test_no_rank_in_a_graph() -> None:
    texts = []
    for rank in (0, 1):
        graphs = _trace(rank)
        (forward,), (backward,) = graphs.forward, graphs.backward
        texts.append([gm.print_readable(print_output=False) for gm in (forward, backward)])
    assert texts[0] == texts[1]


def test_row_counts_need_three_graphs() -> None:
    torch._dynamo.reset()
    graphs = TracedGraphs()
    compiled = torch.compile(_loss, backend=graphs, fullgraph=True, dynamic=True)
    for rows in (0, 1, 2, 7, 1000, 3, 0, 1):
        leaves, target = _leaves(rows), _target(rows)
        value, expected = compiled(*leaves, target), _loss(*leaves, target)
        torch.testing.assert_close(value, expected)
        grads = [torch.autograd.grad(loss, leaves) for loss in (value, expected)]
        for actual, right in zip(*grads, strict=True):
            assert torch.equal(actual, right)
    assert len(graphs.forward) <= 3
    assert len(graphs.backward) <= 3


def test_compiled_by_inductor_as_eager() -> None:
    torch._dynamo.reset()
    leaves, target = _leaves(5), _target(5)
    compiled = torch.compile(_loss, backend=InductorGraphs(), fullgraph=True)
    value, expected = compiled(*leaves, target), _loss(*leaves, target)
    torch.testing.assert_close(value, expected)
    grads = [torch.autograd.grad(loss, leaves) for loss in (value, expected)]
    for actual, right in zip(*grads, strict=True):
        # Inductor rounds the merge of the statistics otherwise: a few units in the last place of numbers near 1.
        torch.testing.assert_close(actual, right, rtol=1e-5, atol=1e-6)


def test_compiled_under_autocast() -> None:
    torch._dynamo.reset()
    hidden, weight, _ = _leaves(5)
    target = _target(5)

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return ppo_ops.linear_logprob(hidden.bfloat16(), weight, target).sum()

    value, expected = torch.compile(loss, backend=TracedGraphs(), fullgraph=True)(), loss()
    torch.testing.assert_close(value, expected)
    grads = [torch.autograd.grad(given, (hidden, weight)) for given in (value, expected)]
    for actual, right in zip(*grads, strict=True):
        assert torch.equal(actual, right)


class Head(torch.nn.Module):
    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 7)
        self.kept = kept

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        sets = {}
        if self.kept:
            sets = {"keep_ids": target, "keep_offsets": torch.arange(target.shape[0] + 1)}
        weight, bias = self.linear.weight, self.linear.bias
        log_prob, entropy = ppo_ops.linear_logprob_entropy(hidden, weight, target, bias, vocab_size=6, **sets)
        return log_prob - 0.01 * entropy


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_export_keeps_one_node(kept: bool, strict: bool) -> None:
    rows = torch.export.Dim("rows")
    head = Head(kept)
    inputs = (_leaves(5)[0].detach(), _target(5, 6))
    shapes = {"hidden": {0: rows}, "target": {0: rows}}
    program = torch.export.export(head, inputs, strict=strict, dynamic_shapes=shapes)
    names = [name for name in operator_names(program.graph_module) if name.startswith("ppo.")]
    assert names == ["ppo.linear_logprob_entropy.kept" if kept else "ppo.linear_logprob_entropy.default"]
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    decomposed = program.run_decompositions()
    names = [name for name in operator_names(decomposed.graph_module) if name.startswith("ppo.")]
    assert names == ["ppo._linear_vocab_stats.default"]
    for count in (5, 9):
        inputs = (_leaves(count)[0].detach(), _target(count, 6))
        for exported in (program, torch.export.load(buffer) if count == 5 else decomposed):
            assert torch.equal(exported.module()(*inputs), head(*inputs))
