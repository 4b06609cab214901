"""Conversions between masks and ragged rows, and the sets of top-p / top-k sampling."""

from __future__ import annotations

import pytest
import torch

import ppo_ops
from tests import cases


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


@pytest.mark.parametrize(("top_p", "top_k"), [(0.0, None), (1.5, None), (0.9, 0)])
def test_errors(top_p: float, top_k: int | None) -> None:
    with pytest.raises(ValueError, match=r"top_[pk] must be"):
        ppo_ops.top_p_keep_sets(torch.zeros(1, 3), top_p, top_k)
