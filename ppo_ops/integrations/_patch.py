"""`patch`: a framework's own functions replaced by the adapters here, and put back exactly.

A replacement is a copy of the adapter's function or class, made for one patch, so that whatever holds it after the
patch holds it because of the patch, and the user's own import of the adapter is never mistaken for it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import logging
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from ppo_ops.integrations._frameworks import FRAMEWORKS, Framework

logger = logging.getLogger("ppo_ops.integrations")


_lock = threading.RLock()
_active: dict[str, _Applied] = {}


@dataclass
class _Applied:
    """What one framework's patch has replaced, and how many handles keep it."""

    pairs: list[tuple[Any, Any]]  # original, replacement
    holders: int = 0
    patched: tuple[str, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)


class Patch:
    """A framework with its functions replaced; `patch` makes it. Leaving its `with` block, or `restore`, ends it."""

    def __init__(self, framework: str, applied: _Applied) -> None:
        self.framework = framework
        #: "module.name" of every reference that was replaced.
        self.patched = applied.patched
        #: Modules that were left alone, with the reason.
        self.skipped = dict(applied.skipped)
        self._open = True

    def restore(self) -> None:
        """Puts the framework's functions back once every patch of it has ended; more calls do nothing."""
        with _lock:
            if not self._open:
                return
            self._open = False
            applied = _active[self.framework]
            applied.holders -= 1
            if applied.holders == 0:
                del _active[self.framework]
                for original, replacement in applied.pairs:
                    _replace(replacement, original)
                logger.info("%s has its own functions again", self.framework)

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def __repr__(self) -> str:
        return f"<{self.framework} {'patched' if self._open else 'restored'}: {', '.join(self.patched)}>"


def patch(framework: str, *, any_version: bool = False) -> Patch:
    """Replaces a framework's own functions by those of `ppo_ops.integrations`, until restored.

    Every module that is loaded and holds a reference to one of them is patched, also those that said
    ``from x import f``; modules that are loaded later get the replacement as well. References elsewhere (a function
    kept in an object's attribute, in a container, or compiled before) are not found: patch before engines and trainers
    are built.

    Args:
        framework: "verl", "trl", "megatron", "nemo_rl", "areal" or "slime".
        any_version: True: patch a version that is not known here, too, as long as its functions are there with the same
            arguments.

    Returns:
        A `Patch`: a context manager, which restores on leaving also after an exception, with `restore()` for use as a
        plain call. `patched` lists what was replaced as "module.name", and so does the logger
        "ppo_ops.integrations" at level INFO; `skipped` maps modules that could not be imported to the reason.
        Patching again while patched replaces nothing more, and the last restore counts.

    Raises:
        ValueError: for an unknown framework, a version that is not known, or a function whose arguments differ from
            the known ones in name, place or default; the message names both and the difference. Nothing is replaced
            then. NeMo-RL, AReaL and slime are also run from a checkout without package metadata, thus without a
            version: the arguments alone decide.
        ImportError: where the framework is not installed.

    Cost:
        One look through the loaded modules; calls of the functions cost nothing more.

    Example:
        >>> import ppo_ops.integrations
        >>> try:
        ...     ppo_ops.integrations.patch("nanogpt")
        ... except ValueError as error:
        ...     print(error)
        framework must be one of 'verl', 'trl', 'megatron', 'nemo_rl', 'areal', 'slime', got 'nanogpt'
    """
    if framework not in FRAMEWORKS:
        raise ValueError(f"framework must be one of {', '.join(map(repr, FRAMEWORKS))}, got {framework!r}")
    with _lock:
        if framework not in _active:
            _active[framework] = _apply(FRAMEWORKS[framework], any_version)
        _active[framework].holders += 1
        found = Patch(framework, _active[framework])
    logger.info("%s computes by ppo_ops in %s", framework, ", ".join(found.patched))
    return found


def _apply(framework: Framework, any_version: bool) -> _Applied:
    """Check everything first, then replace."""
    _check_version(framework, any_version)
    adapter = importlib.import_module(framework.adapter)
    applied = _Applied([])
    for home, names in framework.functions.items():
        try:
            module = importlib.import_module(home)
        except ImportError as error:
            if home not in framework.optional:
                raise
            applied.skipped[home] = str(error)
            continue
        for name in names:
            original: Any = getattr(module, name, None)
            replacement = _copy(getattr(adapter, name))
            _check_arguments(f"{home}.{name}", original, replacement, framework.may_lack)
            if name in framework.own_calls:
                replacement = _unless(getattr(adapter, framework.own_calls[name]), original, replacement)
            applied.pairs.append((original, replacement))
    applied.patched = tuple(place for pair in applied.pairs for place in _replace(*pair))
    return applied


def _check_version(framework: Framework, any_version: bool) -> None:
    try:
        version = importlib.metadata.version(framework.package)
    except importlib.metadata.PackageNotFoundError as error:
        if framework.checkout:
            return  # where there is no checkout either, the import fails
        raise ImportError(f"{framework.package} is not installed") from error
    # What follows "+" names a build; NeMo-RL writes its commit there.
    if version.partition("+")[0] not in framework.versions and not any_version:
        raise ValueError(
            f"{framework.package} must be of a known version ({', '.join(framework.versions)}), got {version}; "
            f"any_version=True patches it all the same if its functions take the same arguments"
        )


def _check_arguments(place: str, original: Any, replacement: Any, may_lack: tuple[str, ...] | None) -> None:
    if original is None:
        raise ValueError(f"{place} does not exist in this version")
    theirs, ours = _parameters(original), _parameters(replacement)
    if found := _differences(theirs, ours, may_lack):
        known, given = (", ".join(str(p.replace(annotation=p.empty)) for p in each) for each in (ours, theirs))
        raise ValueError(f"{place} must take the arguments ({known}), got ({given}): {', '.join(found)}")


def _parameters(function: Any) -> list[inspect.Parameter]:
    """Also those of a class with `apply`, or of an autograd function's `apply`, which has them in `forward`."""
    owner: Any = function if isinstance(function, type) else getattr(function, "__self__", None)
    is_autograd = isinstance(owner, type) and issubclass(owner, torch.autograd.Function)
    if is_autograd:
        function = owner.forward
    elif isinstance(function, type):
        function = function.apply  # type: ignore[attr-defined]
    return list(inspect.signature(function).parameters.values())[int(is_autograd) :]  # without the context


def _differences(
    theirs: list[inspect.Parameter], ours: list[inspect.Parameter], may_lack: tuple[str, ...] | None
) -> list[str]:
    """Why a call that the framework's function takes may mean something else to the replacement."""
    known = {p.name: p for p in ours}
    places = [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD]
    found = []
    for place, p in enumerate(theirs):
        if p.name not in known:
            found.append(f"{p.name} is not known")
        elif p.kind is not p.KEYWORD_ONLY and places[place : place + 1] != [p.name]:
            found.append(f"{p.name} is in another place")
        elif p.default is not p.empty and p.default != known[p.name].default:
            found.append(f"{p.name} has another default")
    missing = [p for p in ours if p.name not in {q.name for q in theirs}]
    if may_lack is None:
        missing = [p for p in missing if p.default is p.empty]
    return found + [f"{p.name} is missing" for p in missing if p.name not in (may_lack or ())]


def _copy(thing: Any) -> Any:
    if isinstance(thing, type):
        names = {name: value for name, value in vars(thing).items() if name not in ("__dict__", "__weakref__")}
        return type(thing)(thing.__name__, thing.__bases__, names)
    copy = types.FunctionType(thing.__code__, thing.__globals__, thing.__name__, thing.__defaults__, thing.__closure__)
    copy.__kwdefaults__ = thing.__kwdefaults__
    copy.__dict__.update(thing.__dict__)
    for name in ("__doc__", "__annotations__", "__qualname__", "__module__"):
        setattr(copy, name, getattr(thing, name))
    return copy


def _unless(own: Callable[..., bool], original: Callable[..., Any], replacement: Callable[..., Any]) -> Any:
    """The replacement, except for calls that are the framework's own."""

    @functools.wraps(replacement)
    def function(*args: Any, **more: Any) -> Any:
        return (original if own(*args, **more) else replacement)(*args, **more)

    return function


def _replace(old: Any, new: Any) -> list[str]:
    """Let every name in a loaded module that means `old` mean `new`; the names that did."""
    places = []
    for module_name, module in list(sys.modules.items()):
        # Not `getattr`: lazily loading modules would load what nobody asked for.
        names: Any = getattr(module, "__dict__", None)
        if not isinstance(names, dict):
            continue
        for name in [name for name, value in list(names.items()) if value is old]:
            names[name] = new
            places.append(f"{module_name}.{name}")
    return places
