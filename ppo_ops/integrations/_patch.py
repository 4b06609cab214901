"""`patch`: a framework's own functions replaced by the adapters here, and put back exactly.

A replacement is a copy of the adapter's function object, made for one patch, so that whatever holds it after the patch
holds it because of the patch, and the user's own import of the adapter is never mistaken for it.
"""

from __future__ import annotations

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

logger = logging.getLogger("ppo_ops.integrations")


@dataclass(frozen=True)
class _Framework:
    package: str  # as the registry names it
    versions: tuple[str, ...]  # those that the tests have run against
    adapter: str
    functions: dict[str, tuple[str, ...]]  # home module -> functions, each in the adapter under the same name
    optional: tuple[str, ...] = ()  # home modules that need more packages; skipped where these are missing


_FRAMEWORKS = {
    "verl": _Framework(
        "verl",
        ("0.9.1",),
        "ppo_ops.integrations.verl",
        {
            "verl.utils.torch_functional": (
                "logprobs_from_logits",
                "entropy_from_logits",
                "entropy_from_logits_with_chunking",
            ),
            "verl.utils.megatron.tensor_parallel": (
                "vocab_parallel_log_probs_from_logits",
                "vocab_parallel_entropy",
                "vocab_parallel_entropy_with_chunking",
            ),
            "verl.utils.kernel.linear_cross_entropy": ("linear_cross_entropy",),
        },
        optional=("verl.utils.megatron.tensor_parallel",),
    ),
    "trl": _Framework(
        "trl",
        ("1.16.0",),
        "ppo_ops.integrations.trl",
        {"trl.trainer.utils": ("selective_log_softmax", "entropy_from_logits", "selective_log_softmax_and_entropy")},
    ),
    "megatron": _Framework(
        "megatron-core",
        ("0.16.1",),
        "ppo_ops.integrations.megatron",
        {
            "megatron.core.tensor_parallel.cross_entropy": ("vocab_parallel_cross_entropy",),
            "megatron.core.fusions.fused_cross_entropy": ("fused_vocab_parallel_cross_entropy",),
        },
    ),
}

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
        framework: "verl", "trl" or "megatron".
        any_version: True: patch a version that this library's tests have not run against, too, as long as its functions
            are there with the same arguments.

    Returns:
        A `Patch`: a context manager, which restores on leaving also after an exception, with `restore()` for use as a
        plain call. `patched` lists what was replaced as "module.name", and so does the logger
        "ppo_ops.integrations" at level INFO; `skipped` maps modules that could not be imported to the reason.
        Patching again while patched replaces nothing more, and the last restore counts.

    Raises:
        ValueError: for an unknown framework, or a version or a function that is not the known one; the message names
            the known ones. Nothing is replaced then.
        ImportError: where the framework is not installed.

    Cost:
        One look through the loaded modules; calls of the functions cost nothing more.

    Example:
        >>> import ppo_ops.integrations
        >>> try:
        ...     ppo_ops.integrations.patch("nanogpt")
        ... except ValueError as error:
        ...     print(error)
        framework must be one of 'verl', 'trl', 'megatron', got 'nanogpt'
    """
    if framework not in _FRAMEWORKS:
        raise ValueError(f"framework must be one of {', '.join(map(repr, _FRAMEWORKS))}, got {framework!r}")
    with _lock:
        if framework not in _active:
            _active[framework] = _apply(_FRAMEWORKS[framework], any_version)
        _active[framework].holders += 1
        found = Patch(framework, _active[framework])
    logger.info("%s computes by ppo_ops in %s", framework, ", ".join(found.patched))
    return found


def _apply(framework: _Framework, any_version: bool) -> _Applied:
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
            original = getattr(module, name, None)
            replacement = _copy(getattr(adapter, name))
            _check_signature(f"{home}.{name}", original, replacement)
            applied.pairs.append((original, replacement))
    applied.patched = tuple(place for pair in applied.pairs for place in _replace(*pair))
    return applied


def _check_version(framework: _Framework, any_version: bool) -> None:
    try:
        version = importlib.metadata.version(framework.package)
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f"{framework.package} is not installed") from error
    if version not in framework.versions and not any_version:
        raise ValueError(
            f"{framework.package} must be of a known version ({', '.join(framework.versions)}), got {version}; "
            f"any_version=True patches it all the same if its functions take the same arguments"
        )


def _check_signature(place: str, original: Any, replacement: Callable[..., Any]) -> None:
    if original is None:
        raise ValueError(f"{place} does not exist in this version")
    # The `apply` of an autograd function shows its arguments in `forward`, behind the context.
    owner: Any = getattr(original, "__self__", None)
    is_apply = isinstance(owner, type) and issubclass(owner, torch.autograd.Function)
    theirs = list(inspect.signature(owner.forward if is_apply else original).parameters)[int(is_apply) :]
    ours = inspect.signature(replacement).parameters
    positional = [name for name, p in ours.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    extra = [ours[name] for name in positional[len(theirs) :]]
    if positional[: len(theirs)] != theirs or any(p.default is inspect.Parameter.empty for p in extra):
        raise ValueError(f"{place} must take the arguments ({', '.join(positional)}), got ({', '.join(theirs)})")


def _copy(function: types.FunctionType) -> types.FunctionType:
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    for name in ("__doc__", "__annotations__", "__qualname__", "__module__"):
        setattr(copy, name, getattr(function, name))
    return copy


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
