"""Every operator of the namespace ``ppo``, in data-flow order, and the one library object that owns them.

    logits --_vocab_stats--> stats [K, N] --all_gather--> [W, K, N] --merge--> log_prob, entropy, normalizers [K, N]
    backward:  logits, normalizers, upstream gradients --_logits_grad--> grad_logits

    hidden, weight --_linear_vocab_stats--> stats [K, N], then as above
    backward:  hidden, weight, ... --_linear_grads--> grad_hidden (--all_reduce-->), grad_weight, grad_bias

    targets:   logits --_targets_stats--> [2 + K, N] --all_gather, merge--> log_prob     backward: _targets_grad
    top-k:     logits --_topk_stats-----> [2 + 2k, N] --all_gather, merge--> ids, log_probs          _targets_grad
    squares:   logits --_squares_stats--> [3, N] --all_gather, merge--> sum of p^2                   _squares_grad

``N`` rows, ``W`` ranks that share the vocabulary, ``K`` numbers a row: 3 (log-prob), 4 (with entropy), 6 (with entropy
and a kept set). `Library.define` and `impl` are used rather than `torch.library.custom_op`, whose wrappers cost 15 to
40 % more time a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

_F = TypeVar("_F", bound=Callable[..., Any])

NAMESPACE = "ppo"

_OPTIONS = (
    "Tensor? keep_ids=None, Tensor? keep_offsets=None, Tensor? temperature=None, int ignore_index=-100, "
    'SymInt? vocab_size=None, SymInt? vocab_start=None, bool inplace_backward=False, str group_name=""'
)
_LINEAR_OPTIONS = (
    "Tensor? temperature=None, int ignore_index=-100, SymInt? vocab_size=None, SymInt? vocab_start=None, "
    'bool reduce_grad_hidden=True, str group_name=""'
)

PUBLIC = {
    "logprob": f"(Tensor logits, Tensor target, Tensor? keep_mask=None, *, {_OPTIONS}) -> Tensor log_prob",
    "logprob_entropy": f"(Tensor logits, Tensor target, Tensor? keep_mask=None, *, {_OPTIONS}) "
    "-> (Tensor log_prob, Tensor entropy)",
    "linear_logprob": f"(Tensor hidden, Tensor weight, Tensor target, Tensor? bias=None, *, "
    f"Tensor? keep_ids=None, Tensor? keep_offsets=None, {_LINEAR_OPTIONS}) -> Tensor log_prob",
    "linear_logprob_entropy": f"(Tensor hidden, Tensor weight, Tensor target, Tensor? bias=None, *, "
    f"{_LINEAR_OPTIONS}) -> (Tensor log_prob, Tensor entropy)",
}

# Public too. The same restricted to ragged kept sets; an overload, because saved graphs hold the schema above.
OVERLOADS = {
    "linear_logprob_entropy.kept": "(Tensor hidden, Tensor weight, Tensor target, Tensor? bias=None, *, "
    f"Tensor keep_ids, Tensor keep_offsets, {_LINEAR_OPTIONS}) -> (Tensor log_prob, Tensor entropy)",
}

_ROWS = "Tensor logits, Tensor target, Tensor? keep_mask, Tensor? temperature"
_KEPT = "Tensor? keep_ids=None, Tensor? keep_offsets=None"
_UPSTREAM = "Tensor normalizers, Tensor? grad_log_prob, Tensor? grad_entropy"
_PLACE = "SymInt? vocab_size, SymInt? vocab_start, str group_name"
_WHERE = f"int ignore_index, {_PLACE}"
_LAYER = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? temperature, Tensor? keep_ids, "
    f"Tensor? keep_offsets, ScalarType compute, {_WHERE}"
)
_GRADS = "(Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)"

PRIVATE = {
    # The whole computation with its autograd formula; the compiler decomposes it into the two stages below.
    "_logprob_entropy": f"({_ROWS}, {_WHERE}, bool with_entropy, bool inplace_backward, {_KEPT}) "
    "-> (Tensor log_prob, Tensor entropy, Tensor normalizers)",
    # The only device-specific operators. They learn this rank's place when they run, never when they are traced.
    "_vocab_stats": f"({_ROWS}, {_WHERE}, int group_size, bool with_entropy, {_KEPT}) -> Tensor stats",
    "_logits_grad": f"({_ROWS}, {_UPSTREAM}, {_WHERE}, {_KEPT}) -> Tensor grad_logits",
    # The same gradient written over the logits: the mutation is declared, so autograd's version counter knows of it.
    "_logits_grad_": f"({_ROWS}, {_UPSTREAM}, {_WHERE}, {_KEPT}) -> ()".replace("Tensor logits", "Tensor(a!) logits"),
    # hidden @ weight.T chunk by chunk: the core, its forward stage, and backward as a composition and as a stage.
    "_linear_logprob_entropy": f"({_LAYER}, bool with_entropy, bool reduce_grad_hidden) "
    "-> (Tensor log_prob, Tensor entropy, Tensor normalizers)",
    "_linear_vocab_stats": f"({_LAYER}, int group_size, bool with_entropy) -> Tensor stats",
    "_linear_backward": f"({_LAYER}, {_UPSTREAM}, bool[3] wanted, bool reduce_grad_hidden) -> {_GRADS}",
    "_linear_grads": f"({_LAYER}, {_UPSTREAM}, bool[3] wanted, bool wide_grad_hidden) -> {_GRADS}",
}

_TARGETS = f"Tensor logits, Tensor target, Tensor? temperature, {_WHERE}"
_LOGITS = f"Tensor logits, Tensor? temperature, {_PLACE}"

# Private too, behind the Python functions of `multi_target.py`, `topk.py` and `squared_probs.py`.
EXTRA = {
    "_targets_logprob": f"({_TARGETS}) -> (Tensor log_prob, Tensor normalizers)",
    "_targets_stats": f"({_TARGETS}, int group_size) -> Tensor stats",
    "_targets_grad": f"({_TARGETS}, Tensor normalizers, Tensor grad_log_prob) -> Tensor grad_logits",
    "_vocab_topk": f"({_LOGITS}, int k) -> (Tensor log_probs, Tensor ids, Tensor normalizers)",
    "_topk_stats": f"({_LOGITS}, int group_size, int k) -> Tensor packed",
    "_sum_squared_probs": f"({_LOGITS}) -> (Tensor squares, Tensor normalizers)",
    "_squares_stats": f"({_LOGITS}, int group_size) -> Tensor stats",
    "_squares_grad": f"({_LOGITS}, Tensor normalizers, Tensor grad_squares) -> Tensor grad_logits",
}


class _Registry:
    """Defines the operators once a process, also when the package's modules are imported anew."""

    def __init__(self) -> None:
        namespace = vars(torch.ops.ppo)
        self.active = "_owner" not in namespace
        if self.active:
            self.library = torch.library.Library(NAMESPACE, "DEF")
            # The operators live as long as the process, not as long as this module object.
            setattr(torch.ops.ppo, "_owner", self)  # noqa: B010
            for name, schema in {**PUBLIC, **OVERLOADS, **PRIVATE, **EXTRA}.items():
                # One shape, one stride order: Inductor must hand the kernels the layout that the fake kernels saw.
                self.library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))

    def impl(self, name: str, dispatch_key: str) -> Callable[[_F], _F]:
        def register(fn: _F) -> _F:
            if self.active:
                self.library.impl(name, fn, dispatch_key)
            return fn

        return register

    def impl_below_autograd(self, name: str) -> Callable[[_F], _F]:
        """Register the step between autograd and the kernels, which receives the dispatch keys as first argument."""

        def register(fn: _F) -> _F:
            if self.active:
                self.library.impl(name, fn, "ADInplaceOrView", with_keyset=True)
            return fn

        return register

    def fake(self, name: str) -> Callable[[_F], _F]:
        def register(fn: _F) -> _F:
            if self.active:
                torch.library.register_fake(f"{NAMESPACE}::{name}", fn, lib=self.library)
            return fn

        return register

    def autograd(self, name: str, setup_context: Callable[..., None]) -> Callable[[_F], _F]:
        def register(fn: _F) -> _F:
            if self.active:
                op = f"{NAMESPACE}::{name}"
                torch.library.register_autograd(op, fn, setup_context=setup_context, lib=self.library)
            return fn

        return register

    def no_gradient(self, name: str, message: str) -> None:
        """Make differentiating an operator an error; without a formula it would be a warning and a wrong number."""

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            pass

        def backward(ctx: Any, *grads: torch.Tensor) -> NoReturn:
            raise RuntimeError(message)

        self.autograd(name, setup_context)(backward)

    def decomposed(self, name: str) -> Callable[[_F], _F]:
        """Register what a compiler's trace takes an operator apart into. While exporting it stays whole."""

        def register(composition: _F) -> _F:
            def dispatch(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
                if mode.export:
                    return mode.__torch_dispatch__(func, types, args, kwargs)
                plain = (FakeTensor, FunctionalTensor)
                if any(not issubclass(t, plain) and t is not torch.Tensor for t in types):
                    return NotImplemented
                with mode:
                    return composition(*args, **(kwargs or {}))

            if self.active:
                op = f"{NAMESPACE}::{name}"
                torch.library.register_torch_dispatch(op, FunctionalTensorMode, dispatch, lib=self.library)
            return composition

        return register


REGISTRY = _Registry()


def accumulation_dtype(logits: torch.Tensor) -> torch.dtype:
    """Dtype of statistics and outputs: float64 for float64 logits, else float32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
