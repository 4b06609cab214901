"""Validation of the public operators' arguments.

It runs in the composite operator, above the fake kernels and the real ones, so both raise the same errors; every
message names the argument, what was expected and what came. Sizes may be symbolic: `torch._check*` then adds a guard or
a run-time assertion instead of failing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ppo_ops.ops.groups import group_size

LOGITS_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TARGET_DTYPES = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _plainly_right(logits: Tensor, target: Tensor) -> bool:
    """A quick yes for the most common call: the checks one by one cost 15 microseconds, half of a small call."""
    return (
        logits.dtype in LOGITS_DTYPES
        and target.dtype in TARGET_DTYPES
        and not torch.compiler.is_compiling()
        and not isinstance(logits, FakeTensor)
        and logits.dim() >= 1
        and target.shape == logits.shape[:-1]
        and target.device == logits.device
    )


def _check_shape(name: str, tensor: Tensor, shape: tuple[int | torch.SymInt, ...], meaning: str) -> None:
    def message() -> str:
        return f"{name} must have the shape {meaning} {tuple(shape)}, got {tuple(tensor.shape)}"

    torch._check_value(tensor.dim() == len(shape), message)
    for size, expected in zip(tensor.shape, shape, strict=True):
        torch._check_value(size == expected, message)


def _check_device(name: str, tensor: Tensor, like: Tensor, of: str = "logits") -> None:
    torch._check_value(
        tensor.device == like.device,
        lambda: f"{name} must be on the device of {of} ({like.device}), got {tensor.device}",
    )


def check_arguments(
    logits: Tensor,
    target: Tensor,
    keep_mask: Tensor | None,
    keep_ids: Tensor | None,
    keep_offsets: Tensor | None,
    temperature: Tensor | None,
    vocab_size: int | None,
    vocab_start: int | None,
    inplace_backward: bool,
    group_name: str,
) -> None:
    """Raise `TypeError` or `ValueError` for anything that the stages could not compute rightly."""
    plain = (
        keep_mask is None
        and keep_ids is None
        and keep_offsets is None
        and temperature is None
        and vocab_size is None
        and vocab_start is None
    )
    if plain and not inplace_backward and not group_name and _plainly_right(logits, target):
        return
    torch._check_type(
        logits.dtype in LOGITS_DTYPES, lambda: f"logits must be one of {_names(LOGITS_DTYPES)}, got {logits.dtype}"
    )
    torch._check_value(logits.dim() >= 1, lambda: "logits must have the shape [..., V_local], got a 0-dim tensor")
    torch._check_type(target.dtype in TARGET_DTYPES, lambda: f"target must have an integer dtype, got {target.dtype}")
    rows = logits.shape[:-1]
    _check_shape("target", target, rows, "of logits without the last dimension")
    _check_device("target", target, logits)
    if keep_mask is not None:
        torch._check_type(keep_mask.dtype == torch.bool, lambda: f"keep_mask must be bool, got {keep_mask.dtype}")
        _check_shape("keep_mask", keep_mask, logits.shape, "of logits")
        _check_device("keep_mask", keep_mask, logits)
    if keep_ids is not None or keep_offsets is not None:
        torch._check_value(keep_mask is None, lambda: "keep_mask and keep_ids must not both be given, got both")
        _check_keep_sets(keep_ids, keep_offsets, logits, target)
    if temperature is not None:
        _check_temperature(temperature, logits, target)
    _check_vocabulary(logits.shape[-1], vocab_size, vocab_start, group_name)
    if inplace_backward and not torch.compiler.is_compiling():
        _check_overwritable(logits)


def _check_keep_sets(
    keep_ids: Tensor | None, keep_offsets: Tensor | None, like: Tensor, target: Tensor, of: str = "logits"
) -> None:
    if keep_ids is None or keep_offsets is None:
        missing = "keep_ids" if keep_ids is None else "keep_offsets"
        raise ValueError(f"keep_ids and keep_offsets must be given together, got {missing}=None")
    _check_index("keep_ids", keep_ids, like, of)
    _check_index("keep_offsets", keep_offsets, like, of)
    _check_shape("keep_offsets", keep_offsets, (target.numel() + 1,), "[N + 1]")


def _check_index(name: str, tensor: Tensor, like: Tensor, of: str) -> None:
    torch._check_type(
        tensor.dtype in (torch.int32, torch.int64), lambda: f"{name} must be int32 or int64, got {tensor.dtype}"
    )
    torch._check_value(tensor.dim() == 1, lambda: f"{name} must have one dimension, got {tensor.dim()}")
    _check_device(name, tensor, like, of)


def _check_overwritable(logits: Tensor) -> None:
    """In-place backward destroys the logits' memory: nobody else may own it, and each element must have its own."""
    torch._check_value(
        logits.is_contiguous(),
        lambda: f"logits must be contiguous with inplace_backward, got strides {logits.stride()} for {logits.shape}",
    )
    if not (logits.requires_grad and torch.is_grad_enabled()):
        return
    kind = "a leaf" if logits.is_leaf else "a view of a leaf"
    torch._check_value(
        not (logits.is_leaf or (logits._base is not None and logits._base.is_leaf)),
        lambda: (
            f"logits must be an intermediate result with inplace_backward, whose values the gradient may "
            f"overwrite; got {kind}"
        ),
    )


def _check_temperature(temperature: Tensor, like: Tensor, target: Tensor, of: str = "logits") -> None:
    allowed = (torch.float32, torch.float64) if like.dtype == torch.float64 else (torch.float32,)
    torch._check_type(
        temperature.dtype in allowed,
        lambda: f"temperature must be {_names(allowed)} for {like.dtype} {of}, got {temperature.dtype}",
    )
    if temperature.dim() > 0:
        _check_shape("temperature", temperature, target.shape, "() or that of target")
    _check_device("temperature", temperature, like, of)
    check_no_grad(temperature)


def check_no_grad(temperature: object) -> None:
    """Raise `ValueError` for a temperature that would get a gradient. Below autograd no gradient is seen any more."""
    # Not `torch._check_value`: Dynamo of torch 2.11 meets this outside an operator, and cannot trace its lambda.
    if isinstance(temperature, Tensor) and temperature.requires_grad and torch.is_grad_enabled():
        raise ValueError("temperature must not require grad: its gradient is not computed; pass temperature.detach()")


def check_logits(
    logits: Tensor, temperature: Tensor | None, vocab_size: int | None, vocab_start: int | None, group_name: str
) -> None:
    """`check_arguments` for functions without a target."""
    target = logits.new_zeros((), dtype=torch.int64).expand(logits.shape[:-1] if logits.dim() else ())
    check_arguments(logits, target, None, None, None, temperature, vocab_size, vocab_start, False, group_name)


def _check_vocabulary(
    width: int,
    vocab_size: int | None,
    vocab_start: int | None,
    group_name: str,
    columns: str = "columns",
    hold: str = "logits then hold",
) -> None:
    """`width`: columns of this rank; `columns` and `hold`: how messages call them, and who holds them."""
    size = group_size(group_name)
    if vocab_size is not None:
        torch._check_value(vocab_size >= 1, lambda: f"vocab_size must be at least 1, got {vocab_size}")
        if vocab_start is None:
            torch._check_value(
                vocab_size <= size * width,
                lambda: (
                    f"vocab_size must be at most the {size * width} {columns} that the {size} ranks of the group "
                    f"hold together, got {vocab_size}"
                ),
            )
    if vocab_start is not None:
        torch._check_value(vocab_start >= 0, lambda: f"vocab_start must not be negative, got {vocab_start}")
        if not group_name:
            torch._check_value(
                vocab_start == 0,
                lambda: (
                    f"vocab_start must be 0 without a group, because {hold} the whole vocabulary; got {vocab_start}"
                ),
            )
