"""Conversions between masks and ragged rows, and the sets of top-p / top-k sampling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ppo_ops
from tests import cases
from tests.tolerances import assert_same_bits


def test_mask_round_trip() -> None:
    mask = cases.random_mask("round_trip", 5, 129)
    ids, offsets = ppo_ops.keep_sets_from_mask(mask)
    assert ids.dtype == torch.int32
    assert torch.equal(ppo_ops.keep_sets_to_mask(ids, offsets, 129), mask)


def test_empty_row_is_unrestricted() -> None:
    mask = ppo_ops.keep_sets_to_mask(torch.tensor([2]), torch.tensor([0, 0, 1]), 4)
    assert mask.tolist() == [[True] * 4, [False, False, True, False]]


@pytest.mark.parametrize(
    ("top_p", "top_k", "expected"),
    [
        # Probabilities 0.5, 0.25, 0.125, 0.125 in the order 1, 3, 0, 2.
        (0.5, None, [1]),
        (0.51, None, [1, 3]),
        (0.8, None, [1, 3, 0]),
        (1.0, None, [1, 3, 0, 2]),
        (1.0, 2, [1, 3]),
        (0.6, 2, [1]),  # renormalised over the two: 2/3 reaches 0.6
        (1e-9, None, [1]),
    ],
)
def test_top_p_top_k(top_p: float, top_k: int | None, expected: list[int]) -> None:
    logits = torch.tensor([[0.125, 0.5, 0.125, 0.25]]).log()
    ids, offsets = ppo_ops.top_p_keep_sets(logits, top_p, top_k)
    assert ids.tolist() == expected
    assert offsets.tolist() == [0, len(expected)]


def test_top_p_never_keeps_a_banned_token() -> None:
    ids, _ = ppo_ops.top_p_keep_sets(torch.tensor([[0.0, -torch.inf, 1.0]]), 1.0)
    assert ids.tolist() == [2, 0]


def test_replayed_log_prob_is_that_of_the_sampling_distribution() -> None:
    logits = cases.random_case("replay", 16, 129).logits
    ids, offsets = ppo_ops.top_p_keep_sets(logits, 0.9)
    mask = ppo_ops.keep_sets_to_mask(ids, offsets, 129)
    sampled_from = logits.masked_fill(~mask, -torch.inf).double().softmax(-1)
    target = torch.multinomial(sampled_from, 1, generator=cases.generator("replay")).squeeze(1)
    log_prob = ppo_ops.logprob(logits, target, keep_ids=ids, keep_offsets=offsets)
    expected = sampled_from.gather(1, target.unsqueeze(1)).squeeze(1).log()
    torch.testing.assert_close(log_prob.double(), expected, rtol=1e-6, atol=1e-6)  # float32 against float64


@pytest.mark.parametrize("wrong", [-1, 3])
def test_no_mask_of_ids_outside_the_vocabulary(wrong: int) -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        ppo_ops.keep_sets_to_mask(torch.tensor([0, wrong]), torch.tensor([0, 2]), 3)


def test_rows_without_columns() -> None:
    for ids, offsets in (
        ppo_ops.keep_sets_from_mask(torch.ones(2, 0, dtype=torch.bool)),
        ppo_ops.top_p_keep_sets(torch.zeros(2, 0), 0.9),
    ):
        assert (ids.tolist(), offsets.tolist()) == ([], [0, 0, 0])


@pytest.mark.parametrize(("top_p", "top_k"), [(0.0, None), (1.5, None), (0.9, 0)])
def test_errors(top_p: float, top_k: int | None) -> None:
    with pytest.raises(ValueError, match=r"top_[pk] must be"):
        ppo_ops.top_p_keep_sets(torch.zeros(1, 3), top_p, top_k)


ROWS = ([3, 1, 128], [], [7], [5, 6])


def _inputs() -> tuple[Tensor, Tensor]:
    case = cases.random_case("kept_inputs", 4, 129)
    return case.logits.requires_grad_(), case.target


def _results(logits: Tensor, target: Tensor, **kept: Any) -> tuple[Tensor, ...]:
    """log_prob, entropy and their gradient, then log_prob alone."""
    outputs = ppo_ops.logprob_entropy(logits, target, **kept)
    (grad,) = torch.autograd.grad(sum(output.sum() for output in outputs), logits)
    return *(output.detach() for output in outputs), grad, ppo_ops.logprob(logits, target, **kept).detach()


def _expected() -> tuple[Tensor, ...]:
    ids, offsets = torch.tensor([i for row in ROWS for i in row]), torch.tensor([0, *map(len, ROWS)]).cumsum(0)
    return _results(*_inputs(), keep_ids=ids, keep_offsets=offsets)


def _jagged(rows: Any = ROWS, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.nested.nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


@pytest.mark.parametrize(
    "keep_ids",
    [
        ROWS,
        list(ROWS),
        [torch.tensor(row, dtype=torch.int32) for row in ROWS],
        [torch.tensor(row).numpy() for row in ROWS[:2]] + [tuple(row) for row in ROWS[2:]],
        _jagged(),
        _jagged(dtype=torch.int32),
        # A jagged view of two-column rows that keeps the first few of each: it has holes.
        torch.nested.nested_tensor_from_jagged(
            torch.tensor([3, 1, 128, 9, 9, 7, 9, 5, 6, 9]), torch.tensor([0, 3, 5, 7, 10]), torch.tensor([3, 0, 1, 2])
        ),
    ],
    ids=["tuple", "list", "int32_tensors", "arrays_and_tuples", "jagged", "jagged_int32", "jagged_with_holes"],
)
def test_every_way_to_give_a_set_gives_the_same_bits(keep_ids: Any) -> None:
    for actual, expected in zip(_results(*_inputs(), keep_ids=keep_ids), _expected(), strict=True):
        assert_same_bits(actual, expected)


def test_lists_under_another_default_device() -> None:
    logits, target = _inputs()
    with torch.device("meta"):
        log_prob = ppo_ops.logprob(logits, target, keep_ids=[[3, 1, 128], (), torch.tensor([7], device="cpu"), [5, 6]])
    assert_same_bits(log_prob.detach(), _expected()[3])


def test_rows_of_lists_are_in_the_order_of_target() -> None:
    logits, target = _inputs()
    shaped = ppo_ops.logprob(logits.view(2, 2, 129), target.view(2, 2), keep_ids=list(ROWS))
    assert_same_bits(shaped.view(4), _expected()[3])


def test_no_lists_for_no_rows() -> None:
    logits = torch.zeros(0, 7, requires_grad=True)
    ppo_ops.logprob(logits, torch.zeros(0, dtype=torch.int64), keep_ids=[]).sum().backward()
    assert logits.grad.shape == (0, 7)


def test_jagged_parts_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    nested, seen = _jagged(), []
    op = ppo_ops.functional._LOGPROB

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        seen.append((kwargs["keep_ids"].data_ptr(), kwargs["keep_offsets"].data_ptr()))
        return op(*args, **kwargs)

    monkeypatch.setattr(ppo_ops.functional, "_LOGPROB", spy)
    ppo_ops.logprob(*_inputs(), keep_ids=nested)
    assert seen == [(nested.values().data_ptr(), nested.offsets().data_ptr())]


@pytest.mark.filterwarnings("ignore:NestedTensor does not implement _stable_hash_for_caching")
def test_jagged_under_compile() -> None:
    """One graph, for sets of another total size too."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs)

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def compiled(logits: Tensor, target: Tensor, keep_ids: Tensor) -> tuple[Tensor, Tensor]:
        return ppo_ops.logprob_entropy(logits, target, keep_ids=keep_ids)

    logits, target = _inputs()
    for rows in (ROWS, ([3, 1], [9], [], [5, 6, 7, 11])):
        outputs = compiled(logits, target, _jagged(rows))
        expected = ppo_ops.logprob_entropy(logits, target, keep_ids=rows)
        grads = [torch.autograd.grad(o[0].sum() + o[1].sum(), logits)[0] for o in (outputs, expected)]
        # The graph merges statistics in float32, one rank in eager mode does it in double: the last bit may differ.
        for actual, value in zip((*outputs, grads[0]), (*expected, grads[1]), strict=True):
            torch.testing.assert_close(actual, value, rtol=4e-7, atol=4e-7)
    assert len(graphs) == 1


def test_lists_under_compile() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, t: ppo_ops.logprob(x, t, keep_ids=[[0]] * 4), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"keep_ids must be a tensor or a jagged nested tensor under torch\.compile"):
        compiled(*_inputs())


@pytest.mark.parametrize(
    ("kept", "error", "message"),
    [
        ({"keep_ids": 3}, TypeError, "keep_ids must be a tensor, a jagged nested tensor or one list"),
        ({"keep_ids": [[0]] * 3}, ValueError, "keep_ids must be one list for each of target's 4 rows, got 3 lists"),
        (
            {"keep_ids": [0, 1, 2, 3]},
            TypeError,
            r"keep_ids\[0\] must be a list of ids .* got torch.int64 of shape \(\)",
        ),
        ({"keep_ids": [[0], [0.5], [], []]}, TypeError, r"keep_ids\[1\] must be a list of ids .* got torch.float32"),
        ({"keep_ids": [[0], [True], [], []]}, TypeError, r"keep_ids\[1\] must be a list of ids .* got torch.bool"),
        ({"keep_ids": [[0], [200], [], []]}, IndexError, r"keep_ids must be in \[0, 129\), got 200 at position 1"),
        ({"keep_ids": [[0]] * 4, "keep_offsets": torch.arange(5)}, ValueError, "keep_offsets must be None where"),
        ({"keep_ids": _jagged(), "keep_offsets": torch.arange(5)}, ValueError, "keep_offsets must be None where"),
        (
            {"keep_ids": _jagged(ROWS[:3])},
            ValueError,
            r"keep_offsets must have the shape \[N \+ 1\] \(5,\), got \(4,\)",
        ),
        ({"keep_ids": _jagged().to(torch.float32)}, TypeError, "keep_ids must be int32 or int64, got torch.float32"),
        ({"keep_ids": _jagged([[[1, 2]]] * 4)}, ValueError, r"keep_ids must have the shape \[N, j\]"),
        (
            {"keep_ids": torch.nested.nested_tensor([torch.tensor([1])] * 4)},
            ValueError,
            "keep_ids must have layout torch.jagged where it is nested, got torch.strided",
        ),
        (
            {"keep_ids": _jagged(), "keep_mask": torch.ones(4, 129).bool()},
            ValueError,
            "keep_mask and keep_ids must not",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_input_errors(kept: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ppo_ops.logprob(*_inputs(), **kept)


def test_the_output_layer_takes_lists_too() -> None:
    hidden, weight = torch.randn(3, 4), torch.randn(5, 4)
    target, sets = torch.tensor([0, 3, 4]), [[0, 1], [], [2, 4, 3]]
    ragged = {"keep_ids": torch.tensor([0, 1, 2, 4, 3]), "keep_offsets": torch.tensor([0, 2, 2, 5])}
    expected = ppo_ops.linear_logprob_entropy(hidden, weight, target, **ragged)
    found = ppo_ops.linear_logprob_entropy(hidden, weight, target, keep_ids=sets)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(ppo_ops.linear_logprob(hidden, weight, target, keep_ids=sets), expected[0])
