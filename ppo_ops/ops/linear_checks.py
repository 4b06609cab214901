"""Validation of the arguments of `ppo::linear_logprob_entropy`; see `checks.py`, whose rules hold here too."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from ppo_ops.ops.checks import (
    LOGITS_DTYPES,
    TARGET_DTYPES,
    _check_device,
    _check_keep_sets,
    _check_shape,
    _check_temperature,
    _check_vocabulary,
    _names,
)


def _autocast_is_on(device: torch.device) -> bool:
    """Whether autocast converts on this device; to ask about one that knows no autocast, such as meta, is an error."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """What the operands of the GEMMs are rounded to: under autocast its dtype, as `F.linear` does, else their own."""
    if _autocast_is_on(hidden.device) and torch.float64 not in (hidden.dtype, weight.dtype):
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
    _check_shape("weight", weight, (weight.shape[0], hidden.shape[-1]), "[V_local, H]")
    _check_device("weight", weight, hidden, "hidden")
    if bias is not None:
        _check_shape("bias", bias, (weight.shape[0],), "[V_local]")
        _check_device("bias", bias, hidden, "hidden")
    torch._check_type(target.dtype in TARGET_DTYPES, lambda: f"target must have an integer dtype, got {target.dtype}")
    _check_shape("target", target, tuple(hidden.shape[:-1]), "of hidden without the last dimension")
    _check_device("target", target, hidden, "hidden")
    if keep_ids is not None or keep_offsets is not None:
        _check_keep_sets(keep_ids, keep_offsets, hidden, target, "hidden")
    if temperature is not None:
        _check_temperature(temperature, hidden, target, "hidden")
    where = (vocab_size, vocab_start, group_name)
    _check_vocabulary(weight.shape[0], *where, "rows of weight", "weight then holds")


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
    converted = _autocast_is_on(hidden.device) and torch.float64 not in (tensor.dtype, hidden.dtype)
    torch._check_type(
        tensor.dtype == hidden.dtype or converted,
        lambda: f"{name} must have the dtype of hidden ({hidden.dtype}) outside autocast, got {tensor.dtype}",
    )
