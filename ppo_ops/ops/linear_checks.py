"""Validation of the arguments of `ppo::linear_logprob_entropy`; see `checks.py`, whose rules hold here too."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from ppo_ops.ops.checks import LOGITS_DTYPES, TARGET_DTYPES, _names
from ppo_ops.ops.groups import group_size


def compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """What the operands of the GEMMs are rounded to: under autocast its dtype, as `F.linear` does, else their own."""
    if torch.is_autocast_enabled(hidden.device.type) and torch.float64 not in (hidden.dtype, weight.dtype):
        return torch.get_autocast_dtype(hidden.device.type)
    return hidden.dtype


def check_linear_arguments(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    keep_ids: Tensor | None,
    keep_offsets: Tensor | None,
    temperature: Tensor | None,
    vocab_size: int | None,
    vocab_start: int | None,
    group_name: str,
) -> None:
    """Raise `TypeError` or `ValueError` for anything that the stages could not compute rightly."""
    given = {"hidden": hidden, "weight": weight, "bias": bias}
    for name, tensor in given.items():
        if tensor is not None:
            _check_plain(name, tensor)
            _check_dtype(name, tensor, hidden)
    torch._check_value(hidden.dim() >= 1, lambda: "hidden must have the shape [..., H], got a 0-dim tensor")
    torch._check_value(weight.dim() == 2, lambda: f"weight must have the shape [V_local, H], got {tuple(weight.shape)}")
    _check_sizes("weight", weight, (weight.shape[0], hidden.shape[-1]), "[V_local, H]")
    _check_device("weight", weight, hidden)
    if bias is not None:
        _check_sizes("bias", bias, (weight.shape[0],), "[V_local]")
        _check_device("bias", bias, hidden)
    torch._check_type(target.dtype in TARGET_DTYPES, lambda: f"target must have an integer dtype, got {target.dtype}")
    _check_sizes("target", target, tuple(hidden.shape[:-1]), "of hidden without the last dimension")
    _check_device("target", target, hidden)
    if keep_ids is not None or keep_offsets is not None:
        _check_keep_sets(hidden, target, keep_ids, keep_offsets)
    if temperature is not None:
        _check_temperature(temperature, hidden, target)
    _check_vocabulary(weight.shape[0], vocab_size, vocab_start, group_name)


def _check_plain(name: str, tensor: Tensor) -> None:
    sharded = sys.modules.get("torch.distributed.tensor")
    if sharded is not None and isinstance(tensor, sharded.DTensor):
        raise TypeError(
            f"{name} must be a plain tensor, this rank's part, got a DTensor; pass {name}.to_local() and the group"
        )


def _check_dtype(name: str, tensor: Tensor, hidden: Tensor) -> None:
    torch._check_type(
        tensor.dtype in LOGITS_DTYPES, lambda: f"{name} must be one of {_names(LOGITS_DTYPES)}, got {tensor.dtype}"
    )
    converted = torch.is_autocast_enabled(hidden.device.type) and torch.float64 not in (tensor.dtype, hidden.dtype)
    torch._check_type(
        tensor.dtype == hidden.dtype or converted,
        lambda: f"{name} must have the dtype of hidden ({hidden.dtype}) outside autocast, got {tensor.dtype}",
    )


def _check_sizes(name: str, tensor: Tensor, shape: tuple[int | torch.SymInt, ...], meaning: str) -> None:
    def message() -> str:
        return f"{name} must have the shape {meaning} {tuple(shape)}, got {tuple(tensor.shape)}"

    torch._check_value(tensor.dim() == len(shape), message)
    for size, expected in zip(tensor.shape, shape, strict=True):
        torch._check_value(size == expected, message)


def _check_device(name: str, tensor: Tensor, hidden: Tensor) -> None:
    torch._check_value(
        tensor.device == hidden.device,
        lambda: f"{name} must be on the device of hidden ({hidden.device}), got {tensor.device}",
    )


def _check_keep_sets(hidden: Tensor, target: Tensor, keep_ids: Tensor | None, keep_offsets: Tensor | None) -> None:
    if keep_ids is None or keep_offsets is None:
        missing = "keep_ids" if keep_ids is None else "keep_offsets"
        raise ValueError(f"keep_ids and keep_offsets must be given together, got {missing}=None")
    for name, tensor in (("keep_ids", keep_ids), ("keep_offsets", keep_offsets)):
        dtype, dimensions = tensor.dtype, tensor.dim()
        if dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64, got {dtype}")
        if dimensions != 1:
            raise ValueError(f"{name} must have one dimension, got {dimensions}")
        _check_device(name, tensor, hidden)
    _check_sizes("keep_offsets", keep_offsets, (target.numel() + 1,), "[N + 1]")


def _check_temperature(temperature: Tensor, hidden: Tensor, target: Tensor) -> None:
    allowed = (torch.float32, torch.float64) if hidden.dtype == torch.float64 else (torch.float32,)
    torch._check_type(
        temperature.dtype in allowed,
        lambda: f"temperature must be {_names(allowed)} for {hidden.dtype} hidden, got {temperature.dtype}",
    )
    if temperature.dim() > 0:
        _check_sizes("temperature", temperature, tuple(target.shape), "() or that of target")
    _check_device("temperature", temperature, hidden)
    torch._check_value(
        not (temperature.requires_grad and torch.is_grad_enabled()),
        lambda: "temperature must not require grad: its gradient is not computed; pass temperature.detach()",
    )


def _check_vocabulary(width: int, vocab_size: int | None, vocab_start: int | None, group_name: str) -> None:
    size = group_size(group_name)
    if vocab_size is not None:
        torch._check_value(vocab_size >= 1, lambda: f"vocab_size must be at least 1, got {vocab_size}")
        if vocab_start is None:
            torch._check_value(
                vocab_size <= size * width,
                lambda: (
                    f"vocab_size must be at most the {size * width} rows of weight that the {size} ranks of the "
                    f"group hold together, got {vocab_size}"
                ),
            )
    if vocab_start is not None:
        torch._check_value(vocab_start >= 0, lambda: f"vocab_start must not be negative, got {vocab_start}")
        if not group_name:
            torch._check_value(
                vocab_start == 0,
                lambda: (
                    f"vocab_start must be 0 without a group, because weight then holds the whole vocabulary; got "
                    f"{vocab_start}"
                ),
            )
