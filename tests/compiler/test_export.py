"""torch.export keeps one node, and what it writes can be saved, loaded, decomposed and run."""

from __future__ import annotations

import io

import pytest
import torch

import ppo_ops
from tests.compiler.harness import operator_names


class Loss(torch.nn.Module):
    def forward(self, logits: torch.Tensor, target: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        log_prob, entropy = ppo_ops.logprob_entropy(logits, target, temperature=temperature, vocab_size=127)
        return log_prob - 0.01 * entropy


def _inputs(rows: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, 129, generator=generator)
    return logits, torch.randint(0, 127, (rows,), generator=generator), torch.tensor(0.7)


@pytest.fixture(params=[False, True], ids=["nonstrict", "strict"])
def program(request: pytest.FixtureRequest) -> torch.export.ExportedProgram:
    rows = torch.export.Dim("rows")
    shapes = {"logits": {0: rows}, "target": {0: rows}, "temperature": None}
    return torch.export.export(Loss(), _inputs(), strict=request.param, dynamic_shapes=shapes)


def test_exported_graph_keeps_one_node(program: torch.export.ExportedProgram) -> None:
    assert operator_names(program.graph_module) == [
        "ppo.logprob_entropy.default",
        "<built-in function getitem>",
        "<built-in function getitem>",
        "aten.mul.Tensor",
        "aten.sub.Tensor",
    ]


def test_export_round_trip(program: torch.export.ExportedProgram) -> None:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer)
    decomposed = program.run_decompositions()
    assert "ppo.logprob_entropy.default" in operator_names(loaded.graph_module)
    for rows in (5, 9):
        inputs = _inputs(rows)
        expected = Loss()(*inputs)
        for exported in (program, loaded, decomposed):
            assert torch.equal(exported.module()(*inputs), expected)


def test_decomposed_program_holds_no_opaque_collective(program: torch.export.ExportedProgram) -> None:
    names = [name for name in operator_names(program.run_decompositions().graph_module) if name.startswith("ppo.")]
    assert names == ["ppo._vocab_stats.default"]
