"""Fixtures of the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from ppo_ops.kernels import native
from tests.kernels.triton_tools import interpreted_kernels

# One warp a program: the interpreter meets lanes one by one, which is most of its time. A block is then 1024 columns
# (bfloat16) or fewer, so that rows of 2501 take several splits.
LANES = 32
SPLIT = 1024


@pytest.fixture(params=["avx512", "avx2", "baseline"])
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a test once with each instruction set of this machine."""
    if native._library.ppo_choose(request.param.encode()) is None:
        pytest.skip(f"this CPU has no {request.param}")
    yield
    native._library.ppo_choose(native.instruction_set().encode())


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The oracle's small operators lose more to a thread pool than they win."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def interpreted_module() -> ModuleType:
    return interpreted_kernels()


@pytest.fixture
def interpreted(interpreted_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`ppo_ops.kernels.triton` in the interpreter, with small programs."""
    monkeypatch.setattr(interpreted_module, "LANES", LANES)
    monkeypatch.setattr(interpreted_module, "SPLIT_COLUMNS", SPLIT)
    monkeypatch.setattr(interpreted_module, "SPAN_COLUMNS", 2 * SPLIT)
    return interpreted_module
