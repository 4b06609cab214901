"""DTensor logits on 1-D and 2-D meshes: values, gradients and placements, eager and compiled, and what is refused."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import ppo_ops
from ppo_ops import reference
from tests.distributed.harness import Pool
from tests.tolerances import assert_fp64

# The meshes' dimensions and the placements on them, for logits [rows, V] or, with a third index, [rows, 2, V].
LAYOUTS: dict[str, tuple[int, tuple[int, ...], tuple[Any, ...]]] = {
    "one_rank": (1, (1,), (Shard(1),)),
    "two": (2, (2,), (Shard(1),)),
    "four": (4, (4,), (Shard(1),)),
    "replicated": (2, (2,), (Replicate(),)),
    "batch": (2, (2,), (Shard(0),)),
    "batch_and_vocabulary": (4, (2, 2), (Shard(0), Shard(1))),
    "vocabulary_and_batch": (4, (2, 2), (Shard(1), Shard(0))),
    "replicated_and_vocabulary": (4, (2, 2), (Replicate(), Shard(1))),
    "twice_batch": (4, (2, 2), (Shard(0), Shard(0))),
    "sequence_and_vocabulary": (4, (2, 2), (Shard(1), Shard(2))),
}
# Even; one rank short; one rank short and one empty.
COLUMNS = (8, 7, 5)
SLOW = 150.0


class Reply(NamedTuple):
    log_prob: Tensor
    entropy: Tensor
    grad_logits: Tensor
    placements: tuple[Any, ...]
    grad_placements: tuple[Any, ...]


@functools.cache
def _square() -> DeviceMesh:
    """Made once, by all four ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@functools.cache
def _dimension(name: str) -> DeviceMesh:
    """One object for each: Note [DTensors that torch does not compile] in `ppo_ops/dtensor.py`."""
    return _square()[name]


@functools.cache
def _line(group: ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu")


def _mesh(group: ProcessGroup, shape: tuple[int, ...]) -> DeviceMesh:
    return _square() if len(shape) == 2 else _line(group)


def _whole(layout: str, columns: int, rows: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, target (with an ignored one), keep_mask and temperatures of all ranks together."""
    source = torch.Generator().manual_seed(columns)
    shape = (rows, 2) if layout.startswith("sequence") else (rows,)
    logits = torch.randn(*shape, columns, generator=source, dtype=torch.float64)
    target = torch.randint(columns, shape, generator=source)
    target.view(-1)[-1] = -100
    mask = torch.rand(logits.shape, generator=source) < 0.6
    return logits, target, mask, 0.5 + torch.rand(shape, generator=source, dtype=torch.float64)


def _rows(layout: str) -> tuple[Any, ...]:
    """Placements of results: replicated where the vocabulary is sharded."""
    _, _, placements = LAYOUTS[layout]
    last = 2 if layout.startswith("sequence") else 1
    return tuple(Replicate() if p == Shard(last) else p for p in placements)


def _put(tensor: Tensor, mesh: DeviceMesh, placements: tuple[Any, ...]) -> Any:
    """A DTensor cut from what every rank holds, without communication."""
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def _both(logits: Any, target: Any, mask: Any, temperature: Any) -> Any:
    return ppo_ops.logprob_entropy(logits, target, mask, temperature=temperature)


def call(
    group: ProcessGroup, layout: str, columns: int, plain: bool, function: Callable[..., Any], rows: int = 5
) -> Reply:
    _, shape, placements = LAYOUTS[layout]
    mesh = _mesh(group, shape)
    logits, *more = _whole(layout, columns, rows)
    logits = _put(logits, mesh, placements).requires_grad_()
    target, mask, temperature = (
        _put(tensor, mesh, where)
        for tensor, where in zip(more, (_rows(layout), placements, _rows(layout)), strict=True)
    )
    if plain:
        target, mask, temperature = target.to_local(), mask.to_local(), temperature.to_local()
    log_prob, entropy = function(logits, target, mask, temperature)
    (grad,) = torch.autograd.grad((log_prob * 2 + entropy * 3).sum(), logits)
    whole = [tensor.detach().full_tensor() for tensor in (log_prob, entropy, grad)]
    assert log_prob.placements == entropy.placements
    return Reply(*whole, log_prob.placements, grad.placements)


def _run(group: ProcessGroup, layout: str, columns: int, plain: bool, backend: str | None, rows: int = 5) -> Reply:
    if backend is None:
        return call(group, layout, columns, plain, _both, rows)
    torch._dynamo.reset()
    return call(group, layout, columns, plain, torch.compile(_both, backend=backend, fullgraph=True), rows)


def _expected(layout: str, columns: int, rows: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    logits, target, mask, temperature = _whole(layout, columns, rows)
    logits.requires_grad_()
    log_prob, entropy = reference.logprob_entropy(logits, target, mask, temperature=temperature)
    (grad,) = torch.autograd.grad((log_prob * 2 + entropy * 3).sum(), logits)
    return log_prob.detach(), entropy.detach(), grad


def _check(layout: str, columns: int, replies: list[Reply], rows: int = 5) -> None:
    expected = _expected(layout, columns, rows)
    for reply in replies:
        for actual, right in zip(reply[:3], expected, strict=True):
            assert_fp64(actual, right)
        assert reply.placements == _rows(layout)
        assert reply.grad_placements == LAYOUTS[layout][2]


@pytest.mark.parametrize("plain", [False, True], ids=["all_dtensors", "plain_others"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_eager(ranks: Pool, layout: str, plain: bool) -> None:
    for columns in COLUMNS:
        _check(layout, columns, ranks.run(_run, layout, columns, plain, None, size=LAYOUTS[layout][0]))


def test_an_empty_batch_shard(ranks: Pool) -> None:
    replies = ranks.run(_run, "batch_and_vocabulary", 7, True, None, 1, size=4)
    _check("batch_and_vocabulary", 7, replies, 1)


@pytest.mark.parametrize(
    ("layout", "columns"),
    [*itertools.product(("two", "replicated"), COLUMNS), ("four", 7), ("batch_and_vocabulary", 5)],
)
def test_compiled(ranks: Pool, layout: str, columns: int) -> None:
    """`test_dtensor_compiled.py` has Inductor, and the other columns on four ranks."""
    size = LAYOUTS[layout][0]
    replies = ranks.run(_run, layout, columns, columns == 7, "aot_eager", size=size, timeout=SLOW)
    _check(layout, columns, replies)


def _extras(logits: Any, many: Any) -> tuple[Any, ...]:
    ids, log_probs = ppo_ops.vocab_parallel_topk(logits, 3)
    return log_probs, ppo_ops.logprob(logits, many, temperature=0.7), ppo_ops.sum_squared_probs(logits), ids


def _run_extras(group: ProcessGroup, layout: str, columns: int, plain: bool, compiled: bool) -> list[Any]:
    _, shape, placements = LAYOUTS[layout]
    mesh = _mesh(group, shape)
    whole = _whole(layout, columns)[0]
    logits = _put(whole, mesh, placements).requires_grad_()
    many = _put(torch.arange(10).reshape(5, 2) % columns, mesh, _rows(layout))
    if compiled:
        torch._dynamo.reset()
    function = torch.compile(_extras, backend="aot_eager", fullgraph=True) if compiled else _extras
    *outputs, ids = function(logits, many.to_local() if plain else many)
    (grad,) = torch.autograd.grad(sum(output.sum() for output in outputs), logits)
    assert grad.placements == placements
    assert all(output.placements == _rows(layout) for output in (*outputs, ids))
    return [output.detach().full_tensor() for output in (*outputs, grad, ids)]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("layout", ["replicated", "four", "batch_and_vocabulary"])
def test_topk_and_many_targets_and_squares(ranks: Pool, layout: str, compiled: bool) -> None:
    columns = 7
    leaf = _whole(layout, columns)[0].requires_grad_()
    right_ids = leaf.detach().sort(dim=-1, descending=True)[1][:, :3]
    log_p, many = leaf.log_softmax(-1), torch.arange(10).reshape(5, 2) % columns
    right = [log_p.gather(1, right_ids), (leaf / 0.7).log_softmax(-1).gather(1, many), log_p.exp().square().sum(-1)]
    (grad,) = torch.autograd.grad(sum(output.sum() for output in right), leaf)
    size = LAYOUTS[layout][0]
    for *outputs, ids in ranks.run(_run_extras, layout, columns, compiled, compiled, size=size, timeout=SLOW):
        assert torch.equal(ids, right_ids)
        for actual, expected in zip(outputs, (*right, grad), strict=True):
            assert_fp64(actual, expected.detach())


def _ragged(group: ProcessGroup, layout: str, plain: bool) -> Tensor:
    """The kept sets of `_whole`'s mask as ragged rows of this rank, or of all as a replicated DTensor."""
    _, shape, placements = LAYOUTS[layout]
    mesh = _mesh(group, shape)
    logits, target, mask, _ = _whole(layout, 7)
    if plain:
        mask = _put(mask, mesh, _rows(layout)).to_local()
    ids, offsets = ppo_ops.keep_sets_from_mask(mask)
    sets = (ids, offsets) if plain else tuple(_put(t, mesh, _rows(layout)) for t in (ids, offsets))
    where = _put(target, mesh, _rows(layout))
    logits = _put(logits, mesh, placements)
    log_prob = ppo_ops.logprob(logits, where, keep_ids=sets[0], keep_offsets=sets[1])
    whole: Tensor = log_prob.full_tensor()
    return whole


@pytest.mark.parametrize(("layout", "plain"), [("four", True), ("four", False), ("batch_and_vocabulary", True)])
def test_ragged_sets(ranks: Pool, layout: str, plain: bool) -> None:
    logits, target, mask, _ = _whole(layout, 7)
    assert bool(mask.any(1).all())  # a row that keeps nothing would mean another thing as a mask
    expected, _ = reference.logprob_entropy(logits, target, mask)
    for actual in ranks.run(_ragged, layout, plain, size=LAYOUTS[layout][0]):
        assert_fp64(actual, expected)


def _refused(group: ProcessGroup) -> dict[str, str]:
    """What each bad call on a 2 x 2 mesh raises, of logits [4, 8]."""
    mesh, last = _square(), Shard(1)
    whole, target = torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)

    def logits(*placements: Any) -> Any:
        return _put(whole, mesh, placements)

    good, local = logits(Shard(0), last), target[:2]
    partial = DTensor.from_local(whole, mesh, (Replicate(), Partial()))
    other = DeviceMesh.from_group(group, "cpu")
    calls: dict[str, Callable[[], Any]] = {
        "vocabulary twice": lambda: ppo_ops.logprob(logits(last, last), target),
        "partial": lambda: ppo_ops.logprob(partial, target),
        "partial squares": lambda: ppo_ops.sum_squared_probs(partial),
        "group": lambda: ppo_ops.logprob(good, local, group=group),
        "vocab_start": lambda: ppo_ops.logprob(good, local, vocab_start=0),
        "vocab_size": lambda: ppo_ops.logprob(good, local, vocab_size=9),
        "inplace_backward": lambda: ppo_ops.logprob(good, local, inplace_backward=True),
        "all rows plain": lambda: ppo_ops.logprob(good, target),
        "target placement": lambda: ppo_ops.logprob(good, _put(target, mesh, (Replicate(), Replicate()))),
        "target mesh": lambda: ppo_ops.logprob(good, _put(target, other, (Replicate(),))),
        "mask of all columns": lambda: ppo_ops.logprob(good, local, torch.ones(2, 8, dtype=torch.bool)),
        "mask placement": lambda: ppo_ops.logprob(
            good, local, _put(torch.ones(4, 8, dtype=torch.bool), mesh, (Shard(0), Replicate()))
        ),
        "temperature of all rows": lambda: ppo_ops.logprob(good, local, temperature=torch.ones(4)),
        "ragged": lambda: ppo_ops.logprob(
            good, local, keep_ids=_put(target, mesh, (Replicate(), Replicate())), keep_offsets=torch.zeros(3).long()
        ),
        "not chunks": lambda: ppo_ops.logprob(
            DTensor.from_local(torch.zeros(4, 2), mesh, (Replicate(), last), shape=(4, 8), stride=(8, 1)), target
        ),
        "operator": lambda: torch.ops.ppo.logprob(good, _put(target, mesh, (Shard(0), Replicate()))),
        "operator, mixed": lambda: torch.ops.ppo.logprob(good, target),
        "plain logits": lambda: ppo_ops.logprob(whole, _put(target, mesh, (Replicate(), Replicate()))),
    }
    texts = {}
    for name, call in calls.items():
        try:
            call()
            texts[name] = "no error"
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}"
    return texts


REFUSED = {
    "vocabulary twice": r"ValueError: logits must be a DTensor with the placements Shard\(1\) on at most one .*got",
    "partial": "ValueError: logits must be a DTensor with the placements .*got .*Partial.*redistribute",
    "partial squares": "ValueError: logits must be a DTensor with the placements .*got .*Partial.*redistribute",
    "group": "ValueError: group must be None for DTensor logits",
    "vocab_start": "ValueError: vocab_start must be None for DTensor logits.*got 0",
    "vocab_size": "ValueError: vocab_size must be at most the 8 columns .*got 9",
    "inplace_backward": "ValueError: inplace_backward must be False for DTensor logits",
    "all rows plain": r"ValueError: target as a plain tensor must be this rank's part, of shape \(2,\).*got \(4,\)",
    "target placement": "ValueError: target must have the placements .*Shard.*got .*Replicate.*Replicate",
    "target mesh": "ValueError: target must be on the mesh of logits",
    "mask of all columns": r"ValueError: keep_mask as a plain tensor .*\(2, 4\).*got \(2, 8\)",
    "mask placement": "ValueError: keep_mask must have the placements",
    "temperature of all rows": r"ValueError: temperature as a plain tensor .*\(2,\).*got \(4,\)",
    "ragged": "ValueError: keep_ids must be a plain tensor of this rank's rows",
    "not chunks": "ValueError: logits of 8 columns on 2 ranks must have 4 here, got 2",
    "operator": "NotImplementedError: Operator ppo.* does not have a sharding strategy",
    "operator, mixed": "RuntimeError: ppo.*got mixed torch.Tensor and DTensor",
    "plain logits": "RuntimeError: ppo.*got mixed torch.Tensor and DTensor",
}


def test_errors(ranks: Pool) -> None:
    for texts in ranks.run(_refused, size=4):
        assert texts.keys() == REFUSED.keys()
        for name, pattern in REFUSED.items():
            assert re.match(pattern, texts[name], re.DOTALL), (name, texts[name])
