"""The pages of docs/: their code runs and prints what it says, their links lead somewhere, every adapter has a page."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

import pytest

import ppo_ops.integrations
from ppo_ops.integrations._frameworks import FRAMEWORKS
from tests.integrations import hosts
from tests.test_readme import README, ROOT, promised_output

PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCKS = [
    pytest.param(code, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))
]


def _stand_in(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules with the paths and arguments of a framework that is in no registry."""
    for module in getattr(hosts, framework)():
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: FRAMEWORKS[framework].versions[-1])


@pytest.mark.parametrize("code", BLOCKS)
def test_code_prints_what_it_says(
    code: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that import a framework run where it is installed, or on modules that stand for it."""
    for framework in re.findall(r"^ *from (verl|trl|megatron|nemo_rl|areal|slime)\b", code, re.MULTILINE):
        if hasattr(hosts, framework):
            _stand_in(framework, monkeypatch)
        elif importlib.util.find_spec(framework) is None:
            pytest.skip(f"{framework} is not installed")
    exec(compile(code, "docs", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed
    assert printed == re.findall(r"^ *print\(.*\)  # (.*)$", code, re.MULTILINE)
    assert set(promised_output(code)) <= set(printed)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    assert text.isascii()
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    names = re.findall(r"`((?:examples|ppo_ops|tests|benchmarks)/[^`\s]*)`", text)
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_every_page_is_in_the_index_and_the_index_in_the_readme() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert [page.name for page in PAGES if page.name != "README.md" and f"]({page.name})" not in index] == []
    assert "](docs/README.md)" in README


def test_every_adapter_has_a_page() -> None:
    folder = Path(ppo_ops.integrations.__file__).parent
    adapters = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")}
    assert adapters <= {page.stem for page in PAGES}


def test_known_versions_are_named() -> None:
    """By the page of each framework that `patch` knows."""
    for framework, known in FRAMEWORKS.items():
        text = (ROOT / "docs" / f"{framework}.md").read_text()
        assert [version for version in known.versions if version not in text] == []
