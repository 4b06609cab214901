"""The comparator must object to wrong kernels, else its silence about ours says nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ppo_ops.kernels import cpu
from tests import cases, oracle, plain_kernels

CONTROL = ("3x129", "everything", "offset_1e6", "mask_drops_target", "float64_kept_set", "bfloat16_kept_set")


def _objections(monkeypatch: pytest.MonkeyPatch, kernels: Any) -> list[str]:
    """Names of the cases in which `oracle.check` objects to these kernels."""
    monkeypatch.setattr(cpu, "_kernels", lambda dtype: kernels)
    names = []
    for name in CONTROL:
        try:
            oracle.check(cases.by_name(name))
        except AssertionError:
            names.append(name)
    return names


def test_accepts_the_copied_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _objections(monkeypatch, plain_kernels.make()) == []


@pytest.mark.parametrize("flip", plain_kernels.FLIPS)
def test_objects_to_one_flipped_sign(monkeypatch: pytest.MonkeyPatch, flip: str) -> None:
    assert _objections(monkeypatch, plain_kernels.make(flip)) == list(CONTROL)


def test_objects_to_a_gradient_rounded_to_bfloat16_first(monkeypatch: pytest.MonkeyPatch) -> None:
    right = plain_kernels.make()

    def logits_grad(*args: Any, **kwargs: Any) -> None:
        right.logits_grad(*args, **kwargs)
        args[7].copy_(args[7].to(torch.bfloat16))

    kernels = SimpleNamespace(vocab_stats=right.vocab_stats, logits_grad=logits_grad)
    assert _objections(monkeypatch, kernels) == [name for name in CONTROL if not name.startswith("bfloat16")]


def test_objects_to_statistics_of_one_float32_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row maximum and log-sum added up and rounded: the gradient at an offset of 1e6 is lost, elsewhere it survives."""
    right = plain_kernels.make()

    def logits_grad(*args: Any, **kwargs: Any) -> None:
        normalizers = args[4].clone()
        scale = 1.0 if args[3] is None else args[3].to(normalizers.dtype)
        for largest, log_sum in ((0, 1), (4, 5))[: 1 if len(normalizers) < 6 else 2]:
            normalizers[largest] += normalizers[log_sum] * scale
            normalizers[log_sum] = 0.0
        right.logits_grad(*args[:4], normalizers, *args[5:], **kwargs)

    kernels = SimpleNamespace(vocab_stats=right.vocab_stats, logits_grad=logits_grad)
    assert _objections(monkeypatch, kernels) == ["offset_1e6"]
