"""Docstrings are executed, and those of the public functions say what STYLE asks for."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ppo_ops
from ppo_ops import reference

# Sections of every public function; those that take gradients say more.
ALL = ("Args", "Returns", "Cost", "Example")
OPERATORS = (*ALL, "Raises", "Numerics", "Gradient", "Source")


def _modules() -> list[ModuleType]:
    """All but device code, some of which needs packages that may not be there; it holds no examples."""
    names = [info.name for info in pkgutil.walk_packages(ppo_ops.__path__, "ppo_ops.")]
    chosen = [name for name in names if not name.startswith("ppo_ops.kernels")]
    return [ppo_ops, *(importlib.import_module(name) for name in chosen)]


def _public() -> dict[str, Callable[..., Any]]:
    functions = {f"ppo_ops.{name}": getattr(ppo_ops, name) for name in ppo_ops.__all__}
    functions["ppo_ops.reference.logprob_entropy"] = reference.logprob_entropy
    return {name: f for name, f in functions.items() if inspect.isfunction(f)}


def _sections(text: str) -> dict[str, str]:
    """Headings, also joint ones ("Numerics, Gradient:"), with what is indented below."""
    found: dict[str, str] = {}
    for match in re.finditer(r"^([A-Z][a-z]+(?:, [A-Z][a-z]+)*):\n((?:(?:    .*)?\n)*)", text + "\n", re.M):
        for heading in match[1].split(", "):
            found[heading] = match[2]
    return found


def _docstring(function: Callable[..., Any]) -> str:
    text = inspect.getdoc(function)
    assert text is not None
    return text


@pytest.mark.parametrize("module", _modules(), ids=lambda module: module.__name__)
def test_examples_run(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0


def test_examples_are_found() -> None:
    """One example at least for each public function, seen by doctest."""
    finder = doctest.DocTestFinder()
    for name, function in _public().items():
        assert sum(len(test.examples) for test in finder.find(function)) >= 2, name


@pytest.mark.parametrize("name", _public())
def test_sections(name: str) -> None:
    function = _public()[name]
    found = _sections(_docstring(function))
    takes_gradients = "inplace_backward" in inspect.signature(function).parameters
    missing = [heading for heading in (OPERATORS if takes_gradients else ALL) if heading not in found]
    assert not missing
    assert all(text.strip() for text in found.values())


@pytest.mark.parametrize("name", _public())
def test_every_argument_is_described(name: str) -> None:
    function = _public()[name]
    described = re.findall(
        r"^    (\w+(?:, \w+)*)(?:,$|:)|^        (\w+(?:, \w+)*):", _sections(_docstring(function))["Args"], re.M
    )
    words = {word for pair in described for word in ", ".join(pair).split(", ")}
    assert set(inspect.signature(function).parameters) <= words


@pytest.mark.parametrize("name", _public())
def test_first_line_is_a_sentence_in_the_indicative(name: str) -> None:
    first = _docstring(_public()[name]).splitlines()[0]
    assert re.match(r"[A-Z][a-z]+(s|es) ", first), first
    assert first.endswith("."), first


def test_ascii() -> None:
    sources = [*Path(ppo_ops.__file__).parent.rglob("*.py"), *Path(__file__).parent.rglob("*.py")]
    assert len(sources) > 20
    for path in sources:
        assert path.read_bytes().isascii(), path
