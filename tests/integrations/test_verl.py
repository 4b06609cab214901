"""verl's functions: the adapters against values everywhere, and against verl itself where it is installed."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ppo_ops import reference
from ppo_ops.integrations import verl as ours
from tests.cases import Case
from tests.distributed.harness import Pool
from tests.integrations import hosts
from tests.integrations.hosts import Evaluated, case_of
from tests.tolerances import assert_same_bits

INSTALLED = all(importlib.util.find_spec(name) for name in ("verl", "megatron"))
needs_verl = pytest.mark.skipif(not INSTALLED, reason="verl is not installed: docs/verl.md says how to run this")

DTYPES = [torch.float32, torch.bfloat16]
# Name of the function -> what it returns, and the dtype of it for bfloat16 logits on the CPU.
WHOLE = {
    "logprobs_from_logits": ("log_prob", torch.bfloat16),
    "entropy_from_logits": ("entropy", torch.bfloat16),
    "entropy_from_logits_with_chunking": ("entropy", torch.float32),
}
PARALLEL = {
    "vocab_parallel_log_probs_from_logits": ("log_prob", torch.float32),
    "vocab_parallel_entropy": ("entropy", torch.bfloat16),
    "vocab_parallel_entropy_with_chunking": ("entropy", torch.float32),
}
HOMES = dict.fromkeys(WHOLE, "verl.utils.torch_functional") | dict.fromkeys(
    PARALLEL, "verl.utils.megatron.tensor_parallel"
)


def _as_tuple(function: Callable[..., Tensor], **more: Any) -> hosts.Function:
    """The function as `hosts` takes it: entropies have no target."""

    def wrapped(logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        arguments = (logits,) if "entropy" in function.__name__ else (logits, target)
        return (function(*arguments, **more),)

    return wrapped


def _theirs(name: str) -> Callable[..., Tensor]:
    return getattr(importlib.import_module(HOMES[name]), name)  # type: ignore[no-any-return]


def _case(name: str, dtype: torch.dtype) -> Case:
    case = case_of(f"verl {name}", dtype)
    if name != "entropy_from_logits_with_chunking":
        return case
    # verl's takes two dimensions.
    return Case(case.name, case.logits.flatten(0, 1), case.target.flatten())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*WHOLE, *PARALLEL])
def test_values(name: str, dtype: torch.dtype) -> None:
    which, low = (WHOLE | PARALLEL)[name]
    case = _case(name, dtype)
    more = {"tp_group": ""} if name in PARALLEL else {}
    near = hosts.plainly(case, (which,), low if dtype == torch.bfloat16 else dtype)
    hosts.judge(hosts.evaluate(_as_tuple(getattr(ours, name), **more), case, (which,)), near, case, (which,))


@needs_verl
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WHOLE)
def test_is_that_of_verl(name: str, dtype: torch.dtype) -> None:
    which, _ = WHOLE[name]
    case = _case(name, dtype)
    hosts.check(_as_tuple(getattr(ours, name)), _as_tuple(_theirs(name)), case, which)


def _both(group: ProcessGroup, name: str, dtype: torch.dtype, tp: int) -> tuple[Evaluated, Evaluated]:
    """On each of four ranks, whose tensor-parallel groups have `tp` ranks."""
    state = hosts.megatron_state(tp)
    try:
        case, (which, _) = _case(name, dtype), PARALLEL[name]
        logits = hosts.columns(case, state.get_tensor_model_parallel_group())
        # verl hands a multiplication to torch.compile; without, it is the same formula and starts at once.
        with torch.compiler.set_stance("force_eager"):
            theirs = hosts.evaluate(_as_tuple(_theirs(name)), case, (which,), logits)
        return hosts.evaluate(_as_tuple(getattr(ours, name)), case, (which,), logits), theirs
    finally:
        hosts.end_megatron()


@needs_verl
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PARALLEL)
def test_is_that_of_verl_on_ranks(ranks: Pool, name: str, dtype: torch.dtype, tp: int) -> None:
    replies = ranks.run(_both, name, dtype, tp, size=4)[:tp]
    which, _ = PARALLEL[name]
    mine, theirs = (hosts.join([reply[i] for reply in replies]) for i in range(2))
    hosts.judge(mine, theirs, _case(name, dtype), (which,))


def _on_rank(group: ProcessGroup, name: str, dtype: torch.dtype) -> Evaluated:
    case = _case(name, dtype)
    function = _as_tuple(getattr(ours, name), tp_group=group)
    return hosts.evaluate(function, case, (PARALLEL[name][0],), hosts.columns(case, group))


@pytest.mark.parametrize("name", PARALLEL)
def test_values_on_two_ranks(ranks: Pool, name: str) -> None:
    case, (which, _) = _case(name, torch.float32), PARALLEL[name]
    found = hosts.join(ranks.run(_on_rank, name, torch.float32, size=2))
    hosts.judge(found, hosts.plainly(case, (which,), torch.float32), case, (which,))


# Where verl is wrong.


def _banned(dtype: torch.dtype = torch.float32) -> Case:
    """Some logits are -inf, as after a grammar or a top-k filter; targets are not among them."""
    case = case_of("verl banned", dtype)
    logits = case.logits.index_fill(-1, torch.tensor([5, 77]), -torch.inf)
    return Case(case.name, logits, case.target.masked_fill((case.target == 5) | (case.target == 77), 0))


@pytest.mark.parametrize("name", [name for name in (WHOLE | PARALLEL) if "entropy" in name])
def test_banned_tokens_have_an_entropy(name: str) -> None:
    """Values and gradient against float64. verl's value is NaN, and so is its gradient in most functions."""
    case = _banned()
    case = Case(case.name, case.logits.flatten(0, 1), case.target.flatten())
    more = {"tp_group": ""} if name in PARALLEL else {}
    found = hosts.evaluate(_as_tuple(getattr(ours, name), **more), case, ("entropy",))
    hosts.judge(found, hosts.plainly(case, ("entropy",), torch.float32), case, ("entropy",))
    if INSTALLED and name in WHOLE:
        theirs = hosts.evaluate(_as_tuple(_theirs(name)), case, ("entropy",))
        assert theirs.outputs[0].isnan().all()
        assert theirs.grad_logits.isnan().any()


@needs_verl
def test_bfloat16_entropy_is_rounded_once() -> None:
    """verl computes it in bfloat16. Ours errs by at most half a unit in the last place of the result."""
    source = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(64, 32000, generator=source)).bfloat16()
    case = Case("verl bfloat16", logits, torch.zeros(64, dtype=torch.int64))
    (right,) = hosts.truth(case, ("entropy",)).outputs
    (mine,), (theirs,) = (
        hosts.evaluate(_as_tuple(f), case, ("entropy",)).outputs
        for f in (ours.entropy_from_logits, _theirs("entropy_from_logits"))
    )
    # Entropies lie in [8, 16), where bfloat16 numbers are 2^-4 apart.
    assert hosts.errors(mine, right) <= 2.0**-5 * 1.001
    assert hosts.errors(theirs, right) > 2 * 2.0**-5


# From hidden states. verl's own needs CUDA, so that values are all there is to compare with.


@pytest.mark.parametrize("reduction", ["none", "Sum", "mean"])
def test_linear_cross_entropy(reduction: str) -> None:
    source = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, 16, generator=source) for shape in ((2, 3), (50,)))
    labels = torch.randint(50, (2, 3), generator=source)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
    log_prob, entropy = ours.linear_cross_entropy(*leaves, labels, 0.7, reduction)
    doubles = [t.double().requires_grad_() for t in (hidden, weight)]
    right, right_entropy = (
        value.flatten() for value in reference.logprob_entropy(doubles[0] @ doubles[1].T, labels, temperature=0.7)
    )
    right = right.sum() if reduction == "Sum" else right.mean() if reduction == "mean" else right
    (log_prob.sum() + entropy.square().sum()).backward()
    (right.sum() + right_entropy.square().sum()).backward()
    pairs = [
        (log_prob, right),
        (entropy, right_entropy),
        *((a.grad, b.grad) for a, b in zip(leaves, doubles, strict=True)),
    ]
    for found, expected in pairs:
        # float32 products of 16 terms, then gradients summed over 50 columns or 6 rows.
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
        assert found.dtype == torch.float32


def _linear_on_rank(group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 16, generator=source) for rows in (6, 50))
    labels = torch.randint(50, (6,), generator=source)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight.chunk(group.size())[group.rank()])]
    log_prob, entropy = ours.linear_cross_entropy(*leaves, labels, 0.7, "none", group)
    (log_prob.sum() + entropy.square().sum()).backward()
    return log_prob.detach(), entropy.detach(), leaves[0].grad, leaves[1].grad  # type: ignore[return-value]


def test_linear_cross_entropy_on_two_ranks(ranks: Pool) -> None:
    """The gradient of hidden is each rank's part of the sum, as verl's, whose callers sum it."""
    (whole,) = ranks.run(_linear_on_rank, size=1)
    first, second = ranks.run(_linear_on_rank, size=2)
    found = (*first[:2], first[2] + second[2], torch.cat([first[3], second[3]]))
    for mine, expected in zip(found, whole, strict=True):
        # float32 sums in another order.
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(first[2], whole[2], rtol=1e-2)


def test_linear_cross_entropy_refuses() -> None:
    arguments = torch.zeros(1, 2), torch.zeros(3, 2), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="reduction must be 'none', 'sum' or 'mean', got 'max'"):
        ours.linear_cross_entropy(*arguments, 1.0, "max")
    with pytest.raises(TypeError, match="temperature must be a float, got <class 'int'>"):
        ours.linear_cross_entropy(*arguments, 1)


# What has no effect, what is refused, what is in place.


@pytest.mark.parametrize("name", [name for name in (WHOLE | PARALLEL) if "chunking" in name])
def test_chunks_change_no_bit(name: str) -> None:
    function = functools.partial(getattr(ours, name), **({"tp_group": ""} if name in PARALLEL else {}))
    logits = _case(name, torch.float32).logits
    for chunk_size in (1, 5, 10_000):
        assert_same_bits(function(logits, chunk_size=chunk_size), function(logits))
    for bad in (0, -1, 2.0):
        with pytest.raises(ValueError, match="chunk_size must be a positive integer, got"):
            function(logits, chunk_size=bad)


def test_inplace_backward_overwrites_where_it_can() -> None:
    case = case_of("verl in place")
    grads = []
    for inplace in (True, False):
        leaf = case.logits.clone().requires_grad_()
        logits = leaf.clone()
        before = logits.detach().clone()
        ours.logprobs_from_logits(logits, case.target, inplace_backward=inplace).sum().backward()
        assert leaf.grad is not None
        grads.append(leaf.grad)
        assert torch.equal(logits.detach(), before) is not inplace
        if inplace:
            assert torch.equal(logits.detach(), leaf.grad)
    assert_same_bits(*grads)


@pytest.mark.parametrize("kind", ["leaf", "view of a leaf", "gaps", "no gradient"])
def test_inplace_backward_spares_what_it_must(kind: str) -> None:
    case = case_of("verl not in place")
    leaf = case.logits.clone().requires_grad_(kind != "no gradient")
    target = case.target
    logits = {"view of a leaf": leaf.view(leaf.shape), "gaps": leaf.clone()[:, 1:-1]}.get(kind, leaf)
    log_prob = ours.logprobs_from_logits(logits, target[:, 1:-1] if kind == "gaps" else target)
    if kind != "no gradient":
        log_prob.sum().backward()
    assert torch.equal(leaf.detach(), case.logits)


def test_compiles_as_the_engines_do() -> None:
    """verl's engines hand `entropy_from_logits` to torch.compile(dynamic=True)."""
    compiled = torch.compile(ours.entropy_from_logits, dynamic=True, fullgraph=True, backend="aot_eager")
    log_prob = torch.compile(ours.logprobs_from_logits, dynamic=True, fullgraph=True, backend="aot_eager")
    case = case_of("verl compiled")
    # The merge is traced into single steps, whose roundings fall elsewhere: a few units of 1.2e-7.
    near = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(compiled(case.logits), ours.entropy_from_logits(case.logits), **near)
    leaf = case.logits.clone().requires_grad_()
    found = log_prob(leaf.clone(), case.target)
    torch.testing.assert_close(found.detach(), ours.logprobs_from_logits(case.logits, case.target), **near)
    found.sum().backward()
    assert leaf.grad is not None


def test_a_group_must_be_given_without_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="tp_group must be given where megatron-core is not installed"):
        ours.vocab_parallel_entropy(torch.zeros(2, 4))


def test_adapters_import_no_framework() -> None:
    text = (
        "import sys; import ppo_ops.integrations; "
        "from ppo_ops.integrations import areal, megatron, nemo_rl, trl, verl; "
        "print([name for name in ('areal', 'megatron', 'nemo_rl', 'trl', 'verl') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
