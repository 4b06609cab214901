"""The hook that turns skips into failures fires where there is a GPU, or where a torch says so that has none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.gpu.devices import TOO_SMALL

ROOT = Path(__file__).parents[2]
CONFTEST = """
import torch
torch.cuda.is_available = lambda: True
from tests.gpu.conftest import pytest_make_collect_report, pytest_runtest_makereport
"""
TESTS = f"""
import pytest
def test_runs(): pass
def test_skips(): pytest.skip("tired")
@pytest.mark.skipif(True, reason="no GPU")
def test_marked(): pass
def test_small(): pytest.skip("{TOO_SMALL}: 1 GiB of 9")
"""


def test_a_skip_fails_where_there_is_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_module.py").write_text("import pytest\npytest.importorskip('no_such_package')\n")
    # One process and no configuration of the project's: the hook alone.
    options = ["-q", "-rA", "--continue-on-collection-errors", "-p", "no:cacheprovider", "-c", os.devnull]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
    )
    assert done.returncode != 0
    assert "1 failed, 1 passed, 1 skipped, 2 errors" in done.stdout, done.stdout
    for reason in ("tired", "no GPU", "could not import 'no_such_package'"):
        assert f"not run although there is a GPU: Skipped: {reason}" in done.stdout
