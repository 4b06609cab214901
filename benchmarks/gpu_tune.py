"""``python -m benchmarks.gpu --tune``: which of a few tile sizes is the fastest on the device at hand.

The library does not tune: its sizes are a table by dtype in `ppo_ops.kernels.triton`, so that no first call takes long
and no two runs differ in bits. This prints what the table should say.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu_cells import DTYPES, MAIN_ROWS, MAIN_VOCAB, Plan, Row, make_inputs, make_run
from benchmarks.inputs import Cell, Inputs
from benchmarks.timing import Run, interleave

SHAPES = ((MAIN_ROWS, MAIN_VOCAB), (4096, 18_992))
# Loads of 128 bits that a thread has in flight, columns that a program takes, threads of a program.
FORWARD = tuple(itertools.product((2, 4, 8), (32_768, 65_536), (128, 256)))
BACKWARD = tuple(itertools.product((1, 2, 4), (8192, 32_768), (128, 256)))
TOY = ((2, 32_768, 128),)
TOY_SHAPES = ((2, 136),)


Choice = tuple[int, int, int]


class Step:
    """A launcher on a cell's inputs, with a choice in place of what the table says."""

    def __init__(self, kernels: ModuleType, inputs: Inputs, name: str) -> None:
        self.kernels, self.name, self.dtype = kernels, name, inputs.cell.dtype
        self.columns = "SPLIT_COLUMNS" if name == "forward" else "SPAN_COLUMNS"
        self.function = _forward(kernels, inputs) if name == "forward" else _backward(kernels, inputs)

    def present(self) -> Choice:
        return (
            getattr(self.kernels.TILES[self.dtype], self.name),
            getattr(self.kernels, self.columns),
            self.kernels.LANES,
        )

    def run(self, choice: Choice) -> Tensor:
        loads, columns, lanes = choice
        tiles = {**self.kernels.TILES, self.dtype: self.kernels.TILES[self.dtype]._replace(**{self.name: loads})}
        with mock.patch.multiple(self.kernels, TILES=tiles, LANES=lanes, **{self.columns: columns}):
            return self.function()


def _forward(kernels: ModuleType, inputs: Inputs) -> Callable[[], Tensor]:
    where = {"ignore_index": -100, "vocab_start": 0, "columns": inputs.cell.vocab}
    stats = torch.empty(4, inputs.cell.rows, device=inputs.cell.device)

    def forward() -> Tensor:
        kernels.vocab_stats(inputs.source, inputs.target, None, None, stats, **where)
        return stats

    return forward


def _backward(kernels: ModuleType, inputs: Inputs) -> Callable[[], Tensor]:
    where = {"ignore_index": -100, "vocab_start": 0, "columns": inputs.cell.vocab}
    row_max, total, target_logit, shifted = _forward(kernels, inputs)()
    normalizers = torch.stack([row_max, total.log(), target_logit, total.log() - shifted / total])

    def backward() -> Tensor:
        arguments = (inputs.source, inputs.target, None, None, normalizers, *inputs.upstream, inputs.work)
        kernels.logits_grad(*arguments, **where)
        return inputs.work

    return backward


def tune(plan: Plan, kernels: ModuleType) -> Iterator[Row]:
    """One row a choice, a step's fastest first; the time limit decides how many are tried."""
    for (rows, vocab), dtype in itertools.product(TOY_SHAPES if plan.toy else SHAPES, DTYPES):
        inputs = make_inputs(Cell(rows, vocab, dtype, plan.device))
        for name, choices in (("forward", FORWARD), ("backward", BACKWARD)):
            step = Step(kernels, inputs, name)
            runs = _runs(plan, step, [step.present(), *(TOY if plan.toy else choices)])
            if runs:
                interleave(list(runs.values()), plan.rounds, plan.budget_s)
            found = [(run.medians()[0], choice) for choice, run in runs.items()]
            for seconds, choice in sorted(found):
                row = {"rows": rows, "vocab": vocab, "dtype": inputs.cell.dtype_name, "step": name}
                row |= dict(zip(("loads", "columns", "threads"), choice, strict=True))
                yield {**row, "present": choice == step.present(), "ms": 1e3 * seconds}


def _runs(plan: Plan, step: Step, choices: list[Choice]) -> dict[Choice, Run]:
    """Runs of the choices that compile in time, and give what the first one gives."""
    expected, runs = None, {}
    for choice in dict.fromkeys(choices):
        if plan.left() <= 0:
            break
        result = step.run(choice).clone()
        expected = result if expected is None else expected
        # Sums in another order: rounding of float32; the gradient is rounded to its dtype on top.
        torch.testing.assert_close(result, expected, rtol=max(1e-5, torch.finfo(result.dtype).eps), atol=1e-6)

        def timed(_: Any, choice: Choice = choice) -> Tensor:
            return step.run(choice)

        runs[choice] = make_run(plan, str(choice), [timed], lambda: None, nullcontext)
    return runs
