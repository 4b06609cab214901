"""The ranks that all distributed tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed import harness


@pytest.fixture(scope="session")
def ranks() -> Iterator[harness.Pool]:
    yield harness.POOL
    harness.POOL.stop()
