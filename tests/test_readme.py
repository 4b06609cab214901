"""README.md says what is so: its code runs and prints what it says, its schemas are the registered ones, its commands
are the ones that CI runs, and the files that it names exist.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ppo_ops
from ppo_ops.ops import schemas

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TIME_LIMIT = 120.0


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def section(title: str) -> str:
    (text,) = re.findall(rf"^## {title}$(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    return str(text)


def promised_output(code: str) -> list[str]:
    """What the comments behind the block's print calls say."""
    return re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)


ON_TWO_RANKS = [code for code in blocks("python") if "init_process_group" in code]
ON_ONE_RANK = [code for code in blocks("python") if code not in ON_TWO_RANKS]


@pytest.mark.parametrize("code", ON_ONE_RANK, ids=range(len(ON_ONE_RANK)))
def test_code_prints_what_it_says(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed
    assert printed == promised_output(code)


def test_two_rank_code_prints_what_it_says_on_both(tmp_path: Path) -> None:
    (code,) = ON_TWO_RANKS
    script = tmp_path / "two_ranks.py"
    script.write_text(code)
    (arguments,) = re.findall(r"`torchrun (.*) two_ranks\.py`", README)
    # Started as a module, torchrun is the one of this environment, and a time limit here ends its ranks, too.
    # Each rank writes to a file of its own: in one stream their lines may meet.
    apart = ["--log-dir", str(tmp_path / "logs"), "--redirects", "3"]
    settings = {"PYTHONPATH": str(Path(ppo_ops.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *apart, *arguments.split(), str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **settings},
    )
    try:
        printed, errors = process.communicate(timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks on SIGTERM
        printed, errors = process.communicate(timeout=TIME_LIMIT)
        pytest.fail(f"torchrun took more than {TIME_LIMIT} s: {printed}{errors}")
    assert process.returncode == 0, errors
    (line,) = promised_output(code)
    files = sorted((tmp_path / "logs").rglob("stdout.log"))
    assert [file.read_text().splitlines() for file in files] == [[line], [line]]


def test_schemas_are_the_registered_ones() -> None:
    text = " ".join(" ".join(blocks("text")).split())
    printed = re.findall(r"ppo::\w+\(.*?\) -> (?:\(.*?\)|Tensor \w+)", text)
    registered = [str(getattr(torch.ops.ppo, name).default._schema) for name in schemas.PUBLIC]
    assert sorted(printed) == sorted(registered)


def ci_variable(name: str) -> str:
    (value,) = re.findall(rf'^{name}="(.*)"$', (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert f'run "${name}"' in (ROOT / ".ci" / "run").read_text()
    return str(value)


def test_ci_runs_the_commands_as_printed() -> None:
    run_it, test_it = re.findall(r"^```sh\n(.*)\n```$", section("Install"), re.MULTILINE)
    assert run_it == ci_variable("SET_UP_AND_RUN")
    assert test_it == ci_variable("SET_UP_AND_TEST")
    (develop,) = re.findall(r"^```sh\n(.*?)\n```$", section("Develop"), re.MULTILINE | re.DOTALL)
    install, checks, _ = develop.splitlines()
    assert install == ci_variable("SET_UP_TO_DEVELOP")
    assert checks == ci_variable("CHECKS")


def test_files_that_it_names_exist() -> None:
    names = re.findall(r"`((?:examples|ppo_ops|tests|benchmarks|\.ci)/[^`\s]*)`", README)
    names += re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert len(names) > 5
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_sections_stand_in_order() -> None:
    titles = re.findall(r"^## (.*)$", README, re.MULTILINE)
    expected = ["The formula", "The op", "Two ranks", "What it costs", "Numerics", "Install", "Develop"]
    assert [title for title in titles if title in expected] == expected
    assert all(section(title).strip() for title in titles)


def test_version_is_the_newest_in_the_changelog() -> None:
    versions = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == ppo_ops.__version__
