"""`patch`: what it replaces and puts back, on a framework made up here and on the real ones that are installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ppo_ops.integrations import _frameworks, _patch, areal, patch

INSTALLED = {"verl": "verl", "trl": "trl", "megatron": "megatron", "areal": "areal"}


def _installed(framework: str) -> Any:
    missing = importlib.util.find_spec(INSTALLED[framework]) is None
    return pytest.param(framework, marks=pytest.mark.skipif(missing, reason=f"{framework} is not installed"))


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """A framework of two modules, the second of which said `from first import gather_logprobs`, twice."""

    # Here and not in this module, which is a loaded one, too.
    def original(
        logits: Any, labels: Any, temperature: float = 1.0, tp_group: Any = None, chunk_size: int = 1024
    ) -> str:
        return "the framework's own"

    home, user = types.ModuleType("made_up.home"), types.ModuleType("made_up.user")
    home.gather_logprobs = user.gather_logprobs = user.alias = original  # type: ignore[attr-defined]
    user.other = len  # type: ignore[attr-defined]
    for module in (home, user):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    framework = _frameworks.Framework("made-up", ("1.0", "1.1"), areal.__name__, {"made_up.home": ("gather_logprobs",)})
    monkeypatch.setitem(_frameworks.FRAMEWORKS, "made_up", framework)
    found = types.SimpleNamespace(home=home, user=user, version="1.1", original=original)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found.version)
    yield found
    assert _patch._active == {}


def _functions(framework: types.SimpleNamespace) -> list[Any]:
    return [framework.home.gather_logprobs, framework.user.gather_logprobs, framework.user.alias]


def _is_own(framework: types.SimpleNamespace) -> bool:
    return all(function is framework.original for function in _functions(framework))


def _is_patched(framework: types.SimpleNamespace) -> bool:
    (function,) = set(_functions(framework))
    return isinstance(function(torch.zeros(1, 4), torch.tensor([0])), torch.Tensor)


PLACES = ("made_up.home.gather_logprobs", "made_up.user.gather_logprobs", "made_up.user.alias")


def test_replaces_every_reference_and_restores(
    made_up: types.SimpleNamespace, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A logger of its own: AReaL, where it is installed, exchanges the root and turns off what it finds.
    assert _patch.logger.name == "ppo_ops.integrations"
    logger = logging.Logger(_patch.logger.name, logging.INFO)
    logger.addHandler(caplog.handler)
    monkeypatch.setattr(_patch, "logger", logger)
    before = dict(vars(made_up.user))
    with patch("made_up") as done:
        assert _is_patched(made_up)
        assert set(done.patched) >= set(PLACES)
        assert all(place in caplog.text for place in PLACES)
        assert repr(done).startswith("<made_up patched: ")
        assert made_up.user.other is len
    assert _is_own(made_up)
    assert dict(vars(made_up.user)) == before
    assert repr(done).startswith("<made_up restored: ")


def test_as_a_call(made_up: types.SimpleNamespace) -> None:
    done = patch("made_up")
    assert _is_patched(made_up)
    done.restore()
    assert _is_own(made_up)
    done.restore()


def test_restores_after_an_exception(made_up: types.SimpleNamespace) -> None:
    def fail() -> None:
        with patch("made_up"):
            assert _is_patched(made_up)
            raise RuntimeError("from inside")

    with pytest.raises(RuntimeError, match="from inside"):
        fail()
    assert _is_own(made_up)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first in, first out", "last in, first out"])
def test_nested(made_up: types.SimpleNamespace, order: tuple[int, int]) -> None:
    """The last restore counts, whichever it is, and one patch cannot be ended twice in another's stead."""
    both = patch("made_up"), patch("made_up")
    assert both[0].patched == both[1].patched
    both[order[0]].restore()
    both[order[0]].restore()
    assert _is_patched(made_up)
    both[order[1]].restore()
    assert _is_own(made_up)


def test_a_module_that_came_while_patched_is_restored(
    made_up: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with patch("made_up"):
        late = types.ModuleType("made_up.late")
        late.function = made_up.home.gather_logprobs  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "made_up.late", late)
    assert late.function is made_up.original


def test_the_adapter_itself_is_left_alone(made_up: types.SimpleNamespace) -> None:
    """Whoever imported the adapter keeps it, during the patch and after."""
    before = areal.gather_logprobs
    with patch("made_up"):
        assert areal.gather_logprobs is before
        assert made_up.home.gather_logprobs is not before
    assert areal.gather_logprobs is before


def test_unknown_framework() -> None:
    with pytest.raises(ValueError, match=r"framework must be one of 'verl', .*'slime', got 'veril'"):
        patch("veril")


def test_unknown_version(made_up: types.SimpleNamespace) -> None:
    made_up.version = "2.0"
    with pytest.raises(ValueError, match=r"made-up must be of a known version \(1\.0, 1\.1\), got 2\.0"):
        patch("made_up")
    assert _is_own(made_up)
    with patch("made_up", any_version=True):
        assert _is_patched(made_up)
    assert _is_own(made_up)


def test_another_signature(made_up: types.SimpleNamespace) -> None:
    def changed(logits: Any, temperature: Any, labels: Any) -> None: ...

    made_up.home.gather_logprobs = changed
    text = r"gather_logprobs must take the arguments \(logits, labels, .*\), got \(logits, temperature, labels\)"
    with pytest.raises(ValueError, match=text):
        patch("made_up", any_version=True)
    assert made_up.home.gather_logprobs is changed


def test_a_function_that_is_gone(made_up: types.SimpleNamespace) -> None:
    del made_up.home.gather_logprobs
    with pytest.raises(ValueError, match="gather_logprobs does not exist in this version"):
        patch("made_up", any_version=True)


def test_not_installed(made_up: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match="made-up is not installed"):
        patch("made_up")


@pytest.mark.parametrize("framework", [_installed(name) for name in INSTALLED])
def test_real_frameworks(framework: str) -> None:
    """All their functions, in their home modules and wherever loaded modules of theirs imported them from there."""
    known = _frameworks.FRAMEWORKS[framework]
    modules = {home: importlib.import_module(home) for home in known.functions}

    def functions() -> dict[str, Any]:
        names = [(home, name) for home, names in known.functions.items() for name in names]
        return {f"{home}.{name}": getattr(modules[home], name) for home, name in names}

    before = functions()
    with patch(framework) as done:
        assert done.skipped == {}
        assert set(before) <= set(done.patched)
        assert all(found is not before[place] for place, found in functions().items())
        assert all(found.__module__ == known.adapter for found in functions().values())
    after = functions()
    assert all(after[place] is before[place] for place in before)


@pytest.mark.parametrize("framework", [_installed("megatron")])
def test_a_module_that_imported_the_function_is_patched(framework: str) -> None:
    from megatron.core import tensor_parallel
    from megatron.core.models.common.language_module import language_module

    with patch(framework) as done:
        name = "megatron.core.models.common.language_module.language_module.fused_vocab_parallel_cross_entropy"
        assert name in done.patched
        for function, more in (
            (tensor_parallel.vocab_parallel_cross_entropy, {"tp_group": ""}),
            (language_module.fused_vocab_parallel_cross_entropy, {"tp_group": ""}),
        ):
            loss = function(torch.zeros(1, 1, 4), torch.zeros(1, 1, dtype=torch.int64), **more)
            torch.testing.assert_close(loss, torch.full((1, 1), 4.0).log())


@pytest.mark.parametrize("framework", [_installed("verl")])
def test_verl_without_megatron(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that need megatron-core are left out, and the patch says so."""
    home = "verl.utils.megatron.tensor_parallel"
    monkeypatch.setitem(sys.modules, home, None)
    with patch(framework) as done:
        assert list(done.skipped) == [home]
        assert not [place for place in done.patched if place.startswith("verl.utils.megatron")]
        assert "verl.utils.torch_functional.entropy_from_logits" in done.patched
