"""Where there is a GPU, a skipped test here is a failed one: what was not run has shown nothing."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch

from tests.gpu.devices import TOO_SMALL


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What runs on the CPU is small: threads that other processes keep waiting would only cost time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _no_skip(report: Any) -> Any:
    """The report, failed where it was a skip although there is a GPU."""
    if report.skipped and torch.cuda.is_available():
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if TOO_SMALL not in reason:
            report.outcome = "failed"
            report.longrepr = f"not run although there is a GPU: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Generator[None, Any, Any]:
    return _no_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: Any) -> Generator[None, Any, Any]:
    return _no_skip((yield))
