"""The pages of docs/: their code runs and prints what it says, their links lead somewhere, every adapter has a page."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

import ppo_ops.integrations
from tests.test_readme import README, ROOT, promised_output

PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCKS = [
    pytest.param(code, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))
]


@pytest.mark.parametrize("code", BLOCKS)
def test_code_prints_what_it_says(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks that import a framework run where it is installed."""
    for framework in re.findall(r"^from (verl|trl|megatron)\b", code, re.MULTILINE):
        if importlib.util.find_spec(framework) is None:
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
    """slime's is described in the README."""
    folder = Path(ppo_ops.integrations.__file__).parent
    adapters = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")} - {"slime"}
    assert adapters <= {page.stem for page in PAGES}
