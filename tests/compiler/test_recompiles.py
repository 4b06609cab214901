"""How often Inductor compiles: by row count, temperature and unbacked sizes."""

from __future__ import annotations

import torch

import ppo_ops
from tests.compiler.harness import TracedGraphs


def _loss(logits: torch.Tensor, target: torch.Tensor, temperature: float | torch.Tensor = 1.0) -> torch.Tensor:
    log_prob, entropy = ppo_ops.logprob_entropy(logits, target, temperature=temperature)
    return (log_prob - 0.01 * entropy).sum()


def _inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, 129, generator=generator)
    return logits.requires_grad_(), torch.randint(0, 129, (rows,), generator=generator)


def _assert_as_eager(compiled: object, *args: object) -> None:
    value, expected = compiled(*args), _loss(*args)
    torch.testing.assert_close(value, expected)
    grads = [torch.autograd.grad(loss, args[0])[0] for loss in (value, expected)]
    assert torch.equal(*grads)


def test_row_counts_need_three_graphs() -> None:
    torch._dynamo.reset()
    graphs = TracedGraphs()
    compiled = torch.compile(_loss, backend=graphs, fullgraph=True, dynamic=True)
    for rows in (0, 1, 2, 7, 1000, 3001, 3, 0, 1):
        _assert_as_eager(compiled, *_inputs(rows))
    # 0 and 1 are specialised by the compiler; all other row counts share a graph.
    assert len(graphs.forward) <= 3
    assert len(graphs.backward) <= 3


def test_temperature_tensor_never_recompiles() -> None:
    torch._dynamo.reset()
    graphs = TracedGraphs()
    compiled = torch.compile(_loss, backend=graphs, fullgraph=True)
    for temperature in (0.5, 1.0, 0.7):
        _assert_as_eager(compiled, *_inputs(5), torch.tensor(temperature))
    assert len(graphs.forward) == 1


def test_temperature_number_recompiles_once() -> None:
    for first in (1.0, 0.7):
        torch._dynamo.reset()
        graphs = TracedGraphs()
        compiled = torch.compile(_loss, backend=graphs, fullgraph=True)
        for temperature in (first, 1.3, 0.9, 1.0, 2.0):
            _assert_as_eager(compiled, *_inputs(5), temperature)
        assert len(graphs.forward) <= 2


def test_unbacked_row_count() -> None:
    torch._dynamo.reset()
    graphs = TracedGraphs()

    def chosen_loss(logits: torch.Tensor, target: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        rows = chosen.nonzero().squeeze(1)
        return _loss(logits[rows], target[rows])

    logits, target = _inputs(6)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(chosen_loss, backend=graphs, fullgraph=True)
        for chosen in ([1, 0, 1, 1, 0, 0], [0] * 6, [1] * 6):
            args = (logits, target, torch.tensor(chosen, dtype=torch.bool))
            value, expected = compiled(*args), chosen_loss(*args)
            torch.testing.assert_close(value, expected)
            assert torch.equal(*[torch.autograd.grad(loss, logits)[0] for loss in (value, expected)])
    assert len(graphs.forward) == 1
