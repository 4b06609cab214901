# ruff: noqa: E501  (golden texts are as long as they are)
"""Golden of every operator of the namespace: users, saved graphs and other packages depend on the public ones."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline

import ppo_ops  # noqa: F401  (registers the operators)
from ppo_ops.ops.schemas import EXTRA, OVERLOADS, PRIVATE, PUBLIC


def _registered() -> list[str]:
    return [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("ppo::")]


def _operator(name: str) -> torch._ops.OpOverload:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.ppo, packet), overload or "default")


def test_schemas() -> None:
    schemas = [str(_operator(name)._schema) for name in {**PUBLIC, **OVERLOADS, **PRIVATE}]
    assert_expected_inline(
        "\n".join(schemas),
        """\
ppo::logprob(Tensor logits, Tensor target, Tensor? keep_mask=None, *, Tensor? keep_ids=None, Tensor? keep_offsets=None, Tensor? temperature=None, int ignore_index=-100, SymInt? vocab_size=None, SymInt? vocab_start=None, bool inplace_backward=False, str group_name="") -> Tensor log_prob
ppo::logprob_entropy(Tensor logits, Tensor target, Tensor? keep_mask=None, *, Tensor? keep_ids=None, Tensor? keep_offsets=None, Tensor? temperature=None, int ignore_index=-100, SymInt? vocab_size=None, SymInt? vocab_start=None, bool inplace_backward=False, str group_name="") -> (Tensor log_prob, Tensor entropy)
ppo::linear_logprob(Tensor hidden, Tensor weight, Tensor target, Tensor? bias=None, *, Tensor? keep_ids=None, Tensor? keep_offsets=None, Tensor? temperature=None, int ignore_index=-100, SymInt? vocab_size=None, SymInt? vocab_start=None, bool reduce_grad_hidden=True, str group_name="") -> Tensor log_prob
ppo::linear_logprob_entropy(Tensor hidden, Tensor weight, Tensor target, Tensor? bias=None, *, Tensor? temperature=None, int ignore_index=-100, SymInt? vocab_size=None, SymInt? vocab_start=None, bool reduce_grad_hidden=True, str group_name="") -> (Tensor log_prob, Tensor entropy)
ppo::linear_logprob_entropy.kept(Tensor hidden, Tensor weight, Tensor target, Tensor? bias=None, *, Tensor keep_ids, Tensor keep_offsets, Tensor? temperature=None, int ignore_index=-100, SymInt? vocab_size=None, SymInt? vocab_start=None, bool reduce_grad_hidden=True, str group_name="") -> (Tensor log_prob, Tensor entropy)
ppo::_logprob_entropy(Tensor logits, Tensor target, Tensor? keep_mask, Tensor? temperature, int ignore_index, SymInt? vocab_size, SymInt? vocab_start, str group_name, bool with_entropy, bool inplace_backward, Tensor? keep_ids=None, Tensor? keep_offsets=None) -> (Tensor log_prob, Tensor entropy, Tensor normalizers)
ppo::_vocab_stats(Tensor logits, Tensor target, Tensor? keep_mask, Tensor? temperature, int ignore_index, SymInt? vocab_size, SymInt? vocab_start, str group_name, int group_size, bool with_entropy, Tensor? keep_ids=None, Tensor? keep_offsets=None) -> Tensor stats
ppo::_logits_grad(Tensor logits, Tensor target, Tensor? keep_mask, Tensor? temperature, Tensor normalizers, Tensor? grad_log_prob, Tensor? grad_entropy, int ignore_index, SymInt? vocab_size, SymInt? vocab_start, str group_name, Tensor? keep_ids=None, Tensor? keep_offsets=None) -> Tensor grad_logits
ppo::_logits_grad_(Tensor(a!) logits, Tensor target, Tensor? keep_mask, Tensor? temperature, Tensor normalizers, Tensor? grad_log_prob, Tensor? grad_entropy, int ignore_index, SymInt? vocab_size, SymInt? vocab_start, str group_name, Tensor? keep_ids=None, Tensor? keep_offsets=None) -> ()
ppo::_linear_logprob_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? temperature, Tensor? keep_ids, Tensor? keep_offsets, ScalarType compute, int ignore_index, SymInt? vocab_size, SymInt? vocab_start, str group_name, bool with_entropy, bool reduce_grad_hidden) -> (Tensor log_prob, Tensor entropy, Tensor normalizers)
ppo::_linear_vocab_stats(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? temperature, Tensor? keep_ids, Tensor? keep_offsets, ScalarType compute, int ignore_index, SymInt? vocab_size, SymInt? vocab_start, str group_name, int group_size, bool with_entropy) -> Tensor stats
ppo::_linear_backward(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? temperature, Tensor? keep_ids, Tensor? keep_offsets, ScalarType compute, int ignore_index, SymInt? vocab_size, SymInt? vocab_start, str group_name, Tensor normalizers, Tensor? grad_log_prob, Tensor? grad_entropy, bool[3] wanted, bool reduce_grad_hidden) -> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)
ppo::_linear_grads(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? temperature, Tensor? keep_ids, Tensor? keep_offsets, ScalarType compute, int ignore_index, SymInt? vocab_size, SymInt? vocab_start, str group_name, Tensor normalizers, Tensor? grad_log_prob, Tensor? grad_entropy, bool[3] wanted, bool wide_grad_hidden) -> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)""",
    )


def test_no_other_operator_is_registered() -> None:
    assert sorted(_registered()) == sorted(f"ppo::{name}" for name in {**PUBLIC, **OVERLOADS, **PRIVATE, **EXTRA})


def test_tags() -> None:
    """Inductor must hand the kernels the strides that the fake kernels saw."""
    for name in {**PUBLIC, **OVERLOADS, **PRIVATE, **EXTRA}:
        tags = _operator(name).tags
        assert {torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides} <= set(tags), name
