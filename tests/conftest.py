"""Fixtures of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ppo_ops.kernels import aten, cpu, native


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Uninitialized tensors start as NaN, so an element that a kernel forgets to write shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(params=("aten", "native"))
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, poisoned_memory: None) -> Iterator[str]:
    """Runs a test once with each set of CPU kernels, in poisoned memory.

    The ATen kernels run on one thread: they are hundreds of short parallel regions, each of which costs a time slice
    where another process wants the core too (0.03 s become 2.4 s). Tests that are about threads set their number.
    """
    threads = torch.get_num_threads()
    if request.param == "native":
        if not native.available():
            pytest.skip(f"native kernels: {native.why_unavailable()}")
        monkeypatch.setattr(cpu, "_kernels", lambda dtype: native if native.supports(dtype) else aten)
    else:
        monkeypatch.setattr(cpu, "_kernels", lambda dtype: aten)
        torch.set_num_threads(1)
    yield str(request.param)
    torch.set_num_threads(threads)
