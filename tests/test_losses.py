"""The blocks of policy losses: against scalar loops in Python floats, and compiled from logits as one graph."""

from __future__ import annotations

import doctest
import math
import statistics
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ppo_ops
from ppo_ops import losses
from tests.compiler.harness import TracedGraphs, operators
from tests.tolerances import assert_exact, assert_fp64

SEQUENCES, TOKENS, VOCAB = 6, 7, 11


@pytest.fixture
def data() -> dict[str, Tensor]:
    """float64; log-ratios wide enough that every branch of every clip is taken; one sequence without tokens."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.tensor([7, 3, 1, 0, 5, 7])
    return {
        "logits": normal(SEQUENCES, TOKENS, VOCAB),
        "target": torch.randint(VOCAB, (SEQUENCES, TOKENS), generator=generator),
        "old": -1.0 + 0.7 * normal(SEQUENCES, TOKENS),
        "new": -1.0 + 0.7 * normal(SEQUENCES, TOKENS),
        "ref": -1.0 + 0.7 * normal(SEQUENCES, TOKENS),
        "value": normal(SEQUENCES, TOKENS),
        "reward": normal(SEQUENCES, TOKENS),
        "score": normal(SEQUENCES),
        "mask": torch.arange(TOKENS) < lengths[:, None],
    }


def _each(function: Callable[..., float], *tensors: Tensor) -> Tensor:
    """`function` of Python floats, element by element."""
    broadcast = torch.broadcast_tensors(*tensors)
    values = [function(*numbers) for numbers in zip(*(t.flatten().tolist() for t in broadcast), strict=True)]
    return torch.tensor(values, dtype=torch.float64).reshape(broadcast[0].shape)


def _clipped_by_cases(log_ratio: float, advantage: float, low: float, high: float, dual: float | None) -> float:
    """The clipped loss as the cases that the papers describe, without a max or a min."""
    ratio = math.exp(log_ratio)
    if advantage >= 0:
        return -advantage * (1 + high if ratio > 1 + high else ratio)
    if ratio < 1 - low:
        return -advantage * (1 - low)
    return -advantage * (dual if dual is not None and ratio > dual else ratio)


@pytest.mark.parametrize(("low", "high", "dual"), [(0.2, None, None), (0.2, 0.28, None), (0.1, 0.3, 1.5)])
def test_clipped_policy_loss(data: dict[str, Tensor], low: float, high: float | None, dual: float | None) -> None:
    log_ratio, advantage = data["new"] - data["old"], data["score"][:, None]
    loss = losses.clipped_policy_loss(log_ratio, advantage, clip_low=low, clip_high=high, dual_clip=dual)
    limits = (low, low if high is None else high, dual)
    assert_fp64(loss, _each(lambda x, a: _clipped_by_cases(x, a, *limits), log_ratio, advantage))


@pytest.mark.parametrize("dual", [None, 1.5])
def test_clipped_policy_loss_gradient(data: dict[str, Tensor], dual: float | None) -> None:
    """-A r where nothing clips, 0 where something does: the derivative of the cases."""
    log_ratio = (data["new"] - data["old"]).requires_grad_()
    advantage = data["score"][:, None]
    losses.clipped_policy_loss(log_ratio, advantage, clip_low=0.2, clip_high=0.28, dual_clip=dual).sum().backward()

    def derivative(x: float, a: float) -> float:
        ratio = math.exp(x)
        clipped = ratio > 1.28 if a >= 0 else (ratio < 0.8 or (dual is not None and ratio > dual))
        return 0.0 if clipped else -a * ratio

    assert_fp64(log_ratio.grad, _each(derivative, log_ratio.detach(), advantage))


@pytest.mark.parametrize("gap", [-1e4, 1e4])
def test_a_huge_ratio_gives_finite_losses_and_gradients(gap: float) -> None:
    log_prob = torch.full((4,), gap, requires_grad=True)
    old_log_prob, advantage = torch.zeros(4), torch.tensor([1.0, 0.0, -1.0, -2.0])
    total = (
        losses.clipped_policy_loss(log_prob - old_log_prob, advantage, dual_clip=3.0)
        + losses.cispo_loss(log_prob, old_log_prob, advantage, clip_high=0.2)
        + losses.kl_estimate(log_prob, old_log_prob, "k3")
    )
    total.sum().backward()
    assert total.isfinite().all()
    assert log_prob.grad is not None
    assert log_prob.grad.isfinite().all()


def test_sequence_log_ratio(data: dict[str, Tensor]) -> None:
    """exp of it is the geometric mean of the tokens' ratios; 1 for a sequence without tokens."""
    log_ratio, mask = data["new"] - data["old"], data["mask"]
    expected = [
        math.prod(math.exp(x) for x in row[keep].tolist()) ** (1 / max(1, int(keep.sum())))
        for row, keep in zip(log_ratio, mask, strict=True)
    ]
    ratio = losses.sequence_log_ratio(log_ratio, mask).exp()
    assert_fp64(ratio, torch.tensor(expected, dtype=torch.float64))


def test_gspo_gradient_is_the_papers(data: dict[str, Tensor]) -> None:
    """Equation of the paper without clipping: grad = mean_i A_i s_i (1 / |y_i|) sum_t grad log_prob_it."""
    log_prob, mask, advantage = data["new"].clone().requires_grad_(), data["mask"], data["score"]
    log_ratio = losses.sequence_log_ratio(log_prob - data["old"], mask)
    losses.clipped_policy_loss(log_ratio, advantage, clip_low=1e3, clip_high=1e3).mean().backward()
    length = mask.sum(-1).clamp(min=1)
    weight = -advantage * log_ratio.detach().exp() / length / SEQUENCES
    assert_fp64(log_prob.grad, weight[:, None] * mask)


def test_cispo_loss(data: dict[str, Tensor]) -> None:
    log_prob, old, advantage = data["new"].clone().requires_grad_(), data["old"], data["score"][:, None]
    loss = losses.cispo_loss(log_prob, old, advantage, clip_low=0.3, clip_high=0.4)

    def weight(new: float, old: float) -> float:
        return sorted((0.7, math.exp(new - old), 1.4))[1]

    weights = _each(weight, log_prob.detach(), old)
    assert_fp64(loss.detach(), -weights * advantage * log_prob.detach())
    loss.sum().backward()
    assert_fp64(log_prob.grad, -weights * advantage)


def test_cispo_has_no_lower_limit_by_default() -> None:
    log_prob, old, advantage = torch.tensor([-9.0]), torch.tensor([-1.0]), torch.tensor([1.0])
    # float32 exp and two products: a few roundings of 6e-8 each.
    expected = torch.tensor([9.0 * math.exp(-8.0)])
    torch.testing.assert_close(losses.cispo_loss(log_prob, old, advantage, clip_high=0.2), expected, rtol=1e-6, atol=0)


def test_kl_estimates(data: dict[str, Tensor]) -> None:
    new, ref = data["new"], data["ref"]
    assert_fp64(losses.kl_estimate(new, ref, "k1"), _each(lambda p, q: p - q, new, ref))
    assert_fp64(losses.kl_estimate(new, ref, "k2"), _each(lambda p, q: (p - q) ** 2 / 2, new, ref))
    k3 = losses.kl_estimate(new, ref, "k3")
    assert_fp64(k3, _each(lambda p, q: math.exp(q) / math.exp(p) - 1 - (q - p), new, ref))
    assert_exact(k3, losses.kl_estimate(new, ref))


def test_kl_estimates_have_the_stated_means(data: dict[str, Tensor]) -> None:
    """Summed over all tokens with their probabilities: k1 and k3 give the KL, k2's gradient is the KL's, k1's is 0."""
    logits = data["logits"].flatten(0, 1).requires_grad_()
    log_p, log_q = logits.log_softmax(-1), torch.linspace(-2, 1, VOCAB, dtype=torch.float64).log_softmax(-1)
    p = log_p.detach().exp()
    kl = torch.nn.functional.kl_div(log_q.expand_as(log_p), log_p, reduction="none", log_target=True).sum(-1)
    (kl_grad,) = torch.autograd.grad(kl.sum(), logits, retain_graph=True)
    mean = {kind: (p * losses.kl_estimate(log_p, log_q, kind)).sum(-1) for kind in ("k1", "k2", "k3")}
    grad = {kind: torch.autograd.grad(mean[kind].sum(), logits, retain_graph=True)[0] for kind in ("k1", "k2")}
    assert_fp64(mean["k1"].detach(), kl.detach())
    assert_fp64(mean["k3"].detach(), kl.detach())
    assert_fp64(grad["k2"], kl_grad)
    assert_fp64(grad["k1"], torch.zeros_like(kl_grad))
    assert (mean["k2"] - kl).abs().max() > 0.1  # biased, as its documentation says


def test_k3_of_close_policies_keeps_its_digits() -> None:
    """d^2 / 2 to leading order; exp(-d) - 1 + d would be 0 or a rounding error of 6e-8 in float32."""
    new = torch.tensor([0.0])
    for gap in (1e-3, 1e-2):
        k3 = losses.kl_estimate(new + gap, new).item()
        # expm1 is right to a rounding of d; left of the difference is 6e-8 / d of its value, at d = 1e-3 some 1e-4.
        assert k3 == pytest.approx(math.expm1(-gap) + gap, rel=1e-3)


def test_means(data: dict[str, Tensor]) -> None:
    values, mask = data["value"], data["mask"]
    rows = [row[keep].tolist() for row, keep in zip(values, mask, strict=True)]
    flat = [x for row in rows for x in row]
    token_mean, sequence_mean = losses.token_mean(values, mask), losses.sequence_mean(values, mask)
    assert_fp64(token_mean, torch.tensor(statistics.fmean(flat), dtype=torch.float64))
    expected = statistics.fmean(statistics.fmean(row) for row in rows if row)
    assert_fp64(sequence_mean, torch.tensor(expected, dtype=torch.float64))
    assert abs(token_mean - sequence_mean) > 0.01  # the data can tell one from the other


@pytest.mark.parametrize("mean", [losses.token_mean, losses.sequence_mean])
def test_means_leave_out_masked_positions_whatever_they_hold(mean: Callable[..., Tensor]) -> None:
    values = torch.tensor([[1.0, torch.nan], [torch.inf, 3.0]], requires_grad=True)
    mean(values, torch.tensor([[True, False], [False, True]])).backward()
    assert_exact(values.grad, torch.tensor([[0.5, 0.0], [0.0, 0.5]]))
    assert_exact(mean(values, torch.zeros(2, 2, dtype=torch.bool)), torch.tensor(0.0))


def test_group_normalized_advantage(data: dict[str, Tensor]) -> None:
    score = data["score"]
    groups = [score[:3].tolist(), score[3:].tolist()]
    scaled = [(r - statistics.fmean(g)) / (statistics.stdev(g) + 1e-6) for g in groups for r in g]
    centered = [r - statistics.fmean(g) for g in groups for r in g]
    assert_fp64(losses.group_normalized_advantage(score, 3), torch.tensor(scaled, dtype=torch.float64))
    got = losses.group_normalized_advantage(score, 3, scale=False)
    assert_fp64(got, torch.tensor(centered, dtype=torch.float64))


def test_large_rewards_in_float16_are_told_apart() -> None:
    advantage = losses.group_normalized_advantage(torch.tensor([0.0, 1000.0], dtype=torch.float16), 2)
    right = torch.tensor([-0.5, 0.5], dtype=torch.float64).mul(math.sqrt(2)).to(torch.float16)
    assert_exact(advantage, right)


@pytest.mark.parametrize("size", [2, 3, 7, 10])
def test_equal_rewards_give_exactly_no_advantage(size: int) -> None:
    """The float32 mean of `size` times 0.1 need not be 0.1, and 1e-8 / eps would be an advantage of 0.01."""
    advantage = losses.group_normalized_advantage(torch.full((size,), 0.1), size)
    assert_exact(advantage, torch.zeros(size))


def _gae_by_loop(reward: list[float], value: list[float], gamma: float, lam: float) -> list[float]:
    advantage, following, carried = [0.0] * len(reward), 0.0, 0.0
    for t in reversed(range(len(reward))):
        carried = reward[t] + gamma * following - value[t] + gamma * lam * carried
        advantage[t], following = carried, value[t]
    return advantage


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (0.99, 0.0), (1.0, 1.0)])
def test_gae(data: dict[str, Tensor], gamma: float, lam: float, holes: bool) -> None:
    """The textbook loop over the tokens that count, with everything else taken out of the sequence beforehand."""
    reward, value, mask = data["reward"], data["value"], data["mask"].clone()
    if holes:
        mask[:, 1::3] = False
    expected = torch.zeros_like(value)
    for row in range(SEQUENCES):
        keep = mask[row]
        numbers = _gae_by_loop(reward[row][keep].tolist(), value[row][keep].tolist(), gamma, lam)
        expected[row, keep] = torch.tensor(numbers, dtype=torch.float64)
    advantage, returns = losses.gae(reward, value, mask, gamma=gamma, lam=lam)
    assert_fp64(advantage, expected)
    assert_fp64(returns, torch.where(mask, expected + value, 0.0))


@pytest.mark.parametrize("tokens", [0, 1, 2, 64, 65])
def test_gae_of_any_length(tokens: int) -> None:
    """With gamma = lam = 1 and no values, the advantage is the sum of the rewards to come."""
    reward = torch.arange(2.0 * tokens, dtype=torch.float64).view(2, tokens)
    advantage, _ = losses.gae(reward, torch.zeros_like(reward), torch.ones_like(reward, dtype=torch.bool), lam=1.0)
    assert_exact(advantage, reward.flip(-1).cumsum(-1).flip(-1))


def test_errors() -> None:
    one = torch.ones(6)
    with pytest.raises(ValueError, match=r"dual_clip must be > 1, got 1\.0"):
        losses.clipped_policy_loss(one, one, dual_clip=1.0)
    with pytest.raises(ValueError, match="kind must be 'k1', 'k2' or 'k3', got 'k4'"):
        losses.kl_estimate(one, one, "k4")
    for size in (1, 4):
        with pytest.raises(ValueError, match=f"group_size must be at least 2 and divide the 6 rewards, got {size}"):
            losses.group_normalized_advantage(one, size)


def test_documented_examples() -> None:
    result = doctest.testmod(losses)
    assert result.attempted > 8
    assert result.failed == 0


def _ppo(log_prob: Tensor, entropy: Tensor, d: dict[str, Tensor]) -> Tensor:
    loss = losses.clipped_policy_loss(log_prob - d["old"], d["score"][:, None], clip_high=0.28, dual_clip=3.0)
    return losses.token_mean(loss - 0.01 * entropy, d["mask"])


def _gspo(log_prob: Tensor, entropy: Tensor, d: dict[str, Tensor]) -> Tensor:
    log_ratio = losses.sequence_log_ratio(log_prob - d["old"], d["mask"])
    return losses.clipped_policy_loss(log_ratio, d["score"], clip_low=0.3, clip_high=0.4).mean()


def _cispo(log_prob: Tensor, entropy: Tensor, d: dict[str, Tensor]) -> Tensor:
    return losses.sequence_mean(losses.cispo_loss(log_prob, d["old"], d["score"][:, None], clip_high=0.2), d["mask"])


def _kl(kind: str) -> Callable[..., Tensor]:
    return lambda log_prob, entropy, d: losses.token_mean(losses.kl_estimate(log_prob, d["ref"], kind), d["mask"])


def _gae(log_prob: Tensor, entropy: Tensor, d: dict[str, Tensor]) -> Tensor:
    advantage, _ = losses.gae(d["reward"], d["value"], d["mask"])
    return losses.token_mean(losses.clipped_policy_loss(log_prob - d["old"], advantage), d["mask"])


def _grpo(log_prob: Tensor, entropy: Tensor, d: dict[str, Tensor]) -> Tensor:
    advantage = losses.group_normalized_advantage(d["score"], 3)[:, None]
    loss = losses.clipped_policy_loss(log_prob - d["old"], advantage)
    return losses.sequence_mean(loss + 0.1 * losses.kl_estimate(log_prob, d["ref"]), d["mask"])


LOSSES = {
    "ppo": _ppo,
    "gspo": _gspo,
    "cispo": _cispo,
    "k1": _kl("k1"),
    "k2": _kl("k2"),
    "k3": _kl("k3"),
    "gae": _gae,
    "grpo": _grpo,
}


@pytest.mark.parametrize("name", LOSSES)
def test_from_logits_in_one_graph(data: dict[str, Tensor], name: str) -> None:
    """fullgraph raises at a break. One graph each way, one pass over the logits each way, and eager's numbers."""
    torch._dynamo.reset()
    graphs = TracedGraphs()
    logits = data.pop("logits").requires_grad_()
    # As a trainer has it: tokens that do not count are not read either.
    target = data["target"].masked_fill(~data["mask"], -100)

    def loss(logits: Tensor, target: Tensor, d: dict[str, Tensor]) -> Tensor:
        log_prob, entropy = ppo_ops.logprob_entropy(logits, target)
        return LOSSES[name](log_prob, entropy, d)

    eager = loss(logits, target, data)
    (eager_grad,) = torch.autograd.grad(eager, logits)
    compiled = torch.compile(loss, backend=graphs, fullgraph=True)(logits, target, data)
    (compiled_grad,) = torch.autograd.grad(compiled, logits)
    assert_fp64(compiled.detach(), eager.detach())
    assert_fp64(compiled_grad, eager_grad)
    assert eager_grad.abs().max() > 1e-3
    assert len(graphs.forward) == len(graphs.backward) == 1
    assert operators(graphs.forward[0])["ppo._vocab_stats.default"] == 1
    assert operators(graphs.backward[0])["ppo._logits_grad.default"] == 1
