"""A framework's function and its adapter on the same inputs, both judged by `ppo_ops.reference` in float64.

Functions of this module take ``(logits, target)`` and return a tuple of outputs, of which `WHICH` says what they are:
"log_prob", "entropy", or both. Rule: values and gradients of the adapter may be at most twice as far from the truth as
those of the framework (rule "budget" of `tolerances`), in the framework's shape and dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ppo_ops import reference
from tests import oracle
from tests.cases import Case, generator
from tests.tolerances import assert_budget, assert_same_bits

Function = Callable[[Tensor, Tensor], tuple[Tensor, ...]]

BATCH, LENGTH, VOCABULARY = 3, 7, 128


class Evaluated(NamedTuple):
    outputs: tuple[Tensor, ...]
    grad_logits: Tensor


def case_of(name: str, dtype: torch.dtype = torch.float32) -> Case:
    """``logits [3, 7, 128]`` with a standard deviation of 4."""
    source = generator(name)
    logits = (4 * torch.randn(BATCH, LENGTH, VOCABULARY, generator=source)).to(dtype)
    return Case(name, logits, torch.randint(VOCABULARY, (BATCH, LENGTH), generator=source))


def upstream(case: Case, which: tuple[str, ...]) -> list[Tensor]:
    """Upstream gradients, float64, of values that bfloat16 holds exactly: some outputs have that dtype."""
    grads = dict(zip(("log_prob", "entropy"), oracle.upstream(case), strict=True))
    return [grads[name].bfloat16().double() for name in which]


def evaluate(function: Function, case: Case, which: tuple[str, ...], logits: Tensor | None = None) -> Evaluated:
    """Outputs, and the gradient of logits that are, as in training, an intermediate result of their own."""
    leaf = (case.logits if logits is None else logits).detach().clone().requires_grad_()
    outputs = function(leaf.clone(), case.target)
    grads = [g.to(output.dtype) for g, output in zip(upstream(case, which), outputs, strict=True)]
    (grad,) = torch.autograd.grad(outputs, leaf, grads)
    return Evaluated(tuple(output.detach() for output in outputs), grad)


def truth(case: Case, which: tuple[str, ...]) -> Evaluated:
    def function(logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(("log_prob", "entropy"), reference.logprob_entropy(logits, target), strict=True))
        return tuple(values[name] for name in which)

    return evaluate(function, case, which, case.logits.double())


def judge(ours: Evaluated, theirs: Evaluated, case: Case, which: tuple[str, ...]) -> None:
    right, scale = truth(case, which), oracle.scales(case)
    for name, *values in zip(which, ours.outputs, theirs.outputs, right.outputs, strict=True):
        assert_budget(*values, getattr(scale, name))
    assert_budget(ours.grad_logits, theirs.grad_logits, right.grad_logits, scale.grad_logits)


def check(ours: Function, theirs: Function, case: Case, *which: str) -> None:
    """One rank."""
    judge(evaluate(ours, case, which), evaluate(theirs, case, which), case, which)


def columns(case: Case, group: ProcessGroup) -> Tensor:
    return case.logits.chunk(group.size(), -1)[group.rank()]


def join(parts: list[Evaluated]) -> Evaluated:
    """The ranks' results as one; outputs must be the same bits on all of them."""
    for part in parts[1:]:
        for here, first in zip(part.outputs, parts[0].outputs, strict=True):
            assert_same_bits(here, first)
    return Evaluated(parts[0].outputs, torch.cat([part.grad_logits for part in parts], -1))


def plainly(case: Case, which: tuple[str, ...], dtype: torch.dtype) -> Evaluated:
    """Unfused float32 torch, its outputs rounded to `dtype`: stands in for a framework that is not installed."""

    def function(logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        both = reference.logprob_entropy(logits, target, dtype=torch.float32)
        values = dict(zip(("log_prob", "entropy"), both, strict=True))
        return tuple(values[name].to(dtype) for name in which)

    return evaluate(function, case, which)


def errors(found: Tensor, right: Tensor) -> float:
    """The largest absolute error."""
    return float((found.double() - right).abs().max())


def megatron_state(tp: int) -> Any:
    """Megatron's parallel state with `tp` tensor-parallel ranks; every rank of the world must call this."""
    from megatron.core import parallel_state

    end_megatron()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    return parallel_state


def end_megatron() -> None:
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


# Frameworks that a registry does not have, or not without much else: modules with the real paths and functions with the
# real arguments, which compute nothing. What they return tells them from the adapters.
OWN = "the framework's own"


def _module(name: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    return module


def _returns_own(*_: Any, **__: Any) -> str:
    return OWN


# Arguments read on 2026-12-02 in NVIDIA-NeMo/RL, nemo_rl/distributed/model_utils.py: the classes have the same in
# commit 8c6d533 (before 0.6.0), in the tree of 0.7.0 and in commit 0433dae (after it); the functions are of 0433dae.
def nemo_rl() -> list[ModuleType]:
    module = _module("nemo_rl.distributed.model_utils")

    class DistributedLogprob(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any,
            vocab_parallel_logits: Any,
            target: Any,
            vocab_start_index: Any,
            vocab_end_index: Any,
            group: Any,
            inference_only: bool = False,
        ) -> Any:
            return OWN

    class ChunkedDistributedLogprob(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any,
            vocab_parallel_logits: Any,
            target: Any,
            vocab_start_index: Any,
            vocab_end_index: Any,
            chunk_size: Any,
            tp_group: Any,
            inference_only: bool = False,
        ) -> Any:
            return OWN

    class ChunkedDistributedGatherLogprob(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any,
            vocab_parallel_logits: Any,
            global_indices: Any,
            vocab_start_index: Any,
            vocab_end_index: Any,
            chunk_size: Any,
            tp_group: Any,
            inference_only: bool = False,
        ) -> Any:
            return OWN

    class ChunkedDistributedEntropy(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, vocab_parallel_logits: Any, chunk_size: Any, tp_group: Any, inference_only: bool = False
        ) -> Any:
            return OWN

    def from_parallel_logits_to_logprobs(
        vocab_parallel_logits: Any,
        target: Any,
        vocab_start_index: Any,
        vocab_end_index: Any,
        tp_group: Any,
        inference_only: bool = False,
        cp_group: Any = None,
        chunk_size: Any = None,
        sampling_params: Any = None,
        *,
        shift_targets: bool = True,
    ) -> Any:
        # The class is found by name at each call, as there.
        where = vocab_start_index, vocab_end_index
        return module.DistributedLogprob.apply(vocab_parallel_logits, target, *where, tp_group, inference_only)

    def from_parallel_logits_to_logprobs_packed_sequences(
        vocab_parallel_logits: Any,
        target: Any,
        cu_seqlens_padded: Any,
        unpacked_seqlen: Any,
        vocab_start_index: Any,
        vocab_end_index: Any,
        group: Any,
        inference_only: bool = False,
        cp_group: Any = None,
        chunk_size: Any = None,
        sampling_params: Any = None,
        target_is_pre_rolled: bool = False,
    ) -> Any:
        return OWN

    classes = DistributedLogprob, ChunkedDistributedLogprob, ChunkedDistributedGatherLogprob, ChunkedDistributedEntropy
    functions = from_parallel_logits_to_logprobs, from_parallel_logits_to_logprobs_packed_sequences
    vars(module).update({thing.__name__: thing for thing in (*classes, *functions)})
    return [module, _module("nemo_rl.user", Distributed=DistributedLogprob, Entropy=ChunkedDistributedEntropy)]


# Arguments read on 2026-12-02 in areal/utils/functional/vocab_parallel.py: inclusionAI/AReaL, commit 8cc6378, and the
# package 1.0.4, without `reuse_logits`; areal-project/AReaL, commits 55fa31d and 60a9824 (2.0 and later), with it.
def areal(reuse_logits: bool = True) -> list[ModuleType]:
    def gather_logprobs(
        logits: Any, labels: Any, temperature: float = 1.0, tp_group: Any = None, chunk_size: int = 1024
    ) -> Any:
        return OWN

    def gather_logprobs_entropy(
        logits: Any,
        labels: Any,
        temperature: float = 1.0,
        tp_group: Any = None,
        chunk_size: int = 1024,
        reuse_logits: bool = False,
    ) -> Any:
        return OWN

    def without(
        logits: Any, labels: Any, temperature: float = 1.0, tp_group: Any = None, chunk_size: int = 1024
    ) -> Any:
        return OWN

    both = gather_logprobs_entropy if reuse_logits else without
    names = {"gather_logprobs": gather_logprobs, "gather_logprobs_entropy": both}
    # The package hands them on, and engines import them from there.
    user = _module("areal.user", gather_logprobs=gather_logprobs, both=both)
    return [_module(f"areal.utils.functional{name}", **names) for name in (".vocab_parallel", "")] + [user]


# Arguments read on 2026-12-02 in THUDM/slime, slime/backends/megatron_utils/loss.py, commit 00c2d6d, and in the call
# that it makes of slime/utils/ppo_utils.py (the same since pull request 2144).
def slime() -> list[ModuleType]:
    def calculate_log_probs_and_entropy(
        logits: Any,
        tokens: Any,
        tp_group: Any,
        with_entropy: bool = False,
        chunk_size: int = -1,
        log_prob_keep_mask: Any = None,
        with_entropy_grad: bool = True,
    ) -> Any:
        return OWN

    def get_log_probs_and_entropy(
        logits: Any,
        *,
        args: Any,
        unconcat_tokens: Any,
        total_lengths: Any,
        response_lengths: Any,
        with_entropy: bool = False,
        non_loss_data: bool = True,
        top_p_token_ids: Any = None,
        top_p_token_offsets: Any = None,
    ) -> Any:
        return OWN

    rows, packed = calculate_log_probs_and_entropy, get_log_probs_and_entropy
    loss = _module(
        "slime.backends.megatron_utils.loss",
        calculate_log_probs_and_entropy=rows,
        get_log_probs_and_entropy=packed,
        get_values=_returns_own,
    )
    utils = _module("slime.utils.ppo_utils", calculate_log_probs_and_entropy=rows)
    return [utils, loss, _module("slime.user", get_log_probs_and_entropy=packed)]
