"""The Python API: numbers, groups and meshes in, one operator call out. Everything here traces under Dynamo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ppo_ops import dtensor, multi_target
from ppo_ops.keep_sets import as_tensors
from ppo_ops.ops.schemas import accumulation_dtype

_LOGPROB = torch.ops.ppo.logprob.default
_LOGPROB_ENTROPY = torch.ops.ppo.logprob_entropy.default
_TARGETS_LOGPROB = torch.ops.ppo._targets_logprob.default

Group = Any  # ProcessGroup | 1-D DeviceMesh | group name | None
KeepIds = Tensor | Sequence[Sequence[int] | Tensor]  # [M], or jagged [N, j], or N rows


def group_name_of(group: Group) -> str:
    """Name of the process group that shares the vocabulary; "" for None, that is logits hold all of it.

    Args:
        group: ProcessGroup, 1-D DeviceMesh, the name of a group, or None.

    Raises:
        TypeError: for anything else, also for the placeholder that `new_group` returns on ranks outside the group.
        ValueError: for a DeviceMesh of more than one dimension.
    """
    if group is None:
        return ""
    if isinstance(group, str):
        return group
    if dist.is_available():
        if isinstance(group, dist.ProcessGroup):
            return str(group.group_name)
        from torch.distributed.device_mesh import DeviceMesh

        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(f"group must be a 1-D DeviceMesh, got {group.ndim} dimensions; pass mesh['name']")
            return str(group.get_group().group_name)
    raise TypeError(f"group must be a ProcessGroup, a 1-D DeviceMesh, a group name or None, got {type(group)}")


def _temperature_tensor(temperature: float | Tensor, logits: Tensor) -> Tensor | None:
    """Temperature as the operators take it; None for the number 1, which then costs nothing."""
    if isinstance(temperature, Tensor):
        return temperature
    if not isinstance(temperature, (int, float)):
        raise TypeError(f"temperature must be a number or a tensor, got {type(temperature)}")
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        # A guard on a traced number being 1 would recompile each time that it becomes 1 or ceases to be.
        is_one = statically_known_true(temperature == 1.0)
    else:
        is_one = temperature == 1.0
    if is_one:
        return None
    # `ones() * number` and not `full((), number)`: Inductor turns the former's number into a graph input and
    # recompiles the latter for each value (torch 2.13).
    return torch.ones((), dtype=accumulation_dtype(logits), device=logits.device) * temperature


def _needs_conversion(keep_ids: Any, keep_offsets: Tensor | None) -> bool:
    return keep_offsets is None or not isinstance(keep_ids, Tensor) or keep_ids.is_nested


def _plain(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor)}")


def logprob_entropy(
    logits: Tensor,
    target: Tensor,
    keep_mask: Tensor | None = None,
    *,
    keep_ids: KeepIds | None = None,
    keep_offsets: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    inplace_backward: bool = False,
    group: Group = None,
) -> tuple[Tensor, Tensor]:
    """Computes the log-probability of each target token and the entropy of each row, from logits.

        z = logits / T        lse = log sum_v e^z_v        p = e^(z - lse)
        log_prob = z_target - lse_kept                     (lse over the kept set; over all without one)
        entropy  = lse - sum_v p_v z_v                     (nats, always over the whole vocabulary)

    Args:
        logits: ``[..., V_local]`` float16, bfloat16, float32 or float64; any leading shape and strides. This rank's
            columns where a `group` shares the vocabulary, else all of it.
        target: ``[...]`` any integer dtype, global token ids.
        keep_mask: ``[..., V_local]`` bool, True keeps. Restricts log_prob to the kept set; the target is always kept.
        keep_ids, keep_offsets: the kept set as ragged rows instead of a mask: ``[M]`` and ``[N + 1]`` int32 or int64,
            N rows in the order of target. Row ``i`` keeps the global ids
            ``keep_ids[keep_offsets[i] : keep_offsets[i + 1]]``; an empty row is unrestricted. keep_ids may also be a
            jagged nested tensor ``[N, j]``, whose parts are used without a copy, or (not under torch.compile) N lists
            of ids or 1-D tensors; then keep_offsets is None.
        temperature: > 0; a number, or a float32 tensor, 0-dim or shaped like target.
        ignore_index: rows with this target give 0, get a zero gradient, and their logits are not read.
        vocab_size: columns whose global id is not below it are padding and count as absent.
        vocab_start: global id of this rank's first column; default ``rank * V_local``. Pass it for uneven shards.
        inplace_backward: the gradient overwrites the logits' own memory, so backward allocates none. Contiguous
            non-leaf logits only. Any later use of the logits in backward (a second backward, another operator that
            saved them) raises RuntimeError. Under torch.compile results are the same and the compiler plans the memory.
        group: ProcessGroup, 1-D DeviceMesh or group name that shares the vocabulary in group-rank order; None where
            logits hold all of it.

    Returns:
        log_prob, entropy: ``[...]`` float32 (float64 for float64 logits), the same bits on every rank of the group.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
        IndexError: on the CPU, the first row whose target is outside the vocabulary and not `ignore_index`. On other
            devices, where a host check would cost a synchronisation, the log_prob of that row is NaN.

    Cost:
        One all-gather of 4 numbers a row in forward (6 with a kept set, none for one rank), none in backward. Saves
        the logits themselves and 4 or 6 numbers a row. Forward reads the logits once; backward reads them once and
        writes the gradient once, into new memory or, with `inplace_backward`, over the logits.

    Numerics:
        Accumulates in float32 (float64 for float64 logits) relative to the row maximum; -inf logits contribute 0; a
        NaN or +inf logit, or a row of only -inf, gives NaN in that row alone. A row's bits depend on that row alone.

    Gradient:
        Of logits, in their dtype, rounded once. A zero upstream gradient gives an exactly zero row. Differentiating
        twice raises RuntimeError.

    Example:
        >>> import torch, ppo_ops
        >>> logits = torch.tensor([[0.0, 0.0, -torch.inf]])
        >>> log_prob, entropy = ppo_ops.logprob_entropy(logits, torch.tensor([1]))
        >>> print(f"{log_prob.item():.4f} {entropy.item():.4f}")
        -0.6931 0.6931

    Source:
        slime pull request 2144 (one autograd function for both); arXiv:1805.02867 (online softmax).
    """
    return _call(  # type: ignore[no-any-return]
        logprob_entropy,
        logits,
        target,
        keep_mask,
        keep_ids=keep_ids,
        keep_offsets=keep_offsets,
        temperature=temperature,
        ignore_index=ignore_index,
        vocab_size=vocab_size,
        vocab_start=vocab_start,
        inplace_backward=inplace_backward,
        group=group,
    )


def logprob(
    logits: Tensor,
    target: Tensor,
    keep_mask: Tensor | None = None,
    *,
    keep_ids: KeepIds | None = None,
    keep_offsets: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    inplace_backward: bool = False,
    group: Group = None,
) -> Tensor:
    """Computes the log-probability of each target token: `logprob_entropy` without the entropy and its cost.

        log_prob = z_target - log sum_{v kept} e^z_v        z = logits / T        (nats)

    Args:
        logits, target, keep_mask, keep_ids, keep_offsets, temperature, ignore_index, vocab_size, vocab_start,
            inplace_backward, group: as `logprob_entropy`. target may also be ``[..., K]``: K ids a position, each
            ignored or not by itself, then without a kept set and without inplace_backward.

    Returns:
        log_prob: shaped like target, float32 (float64 for float64 logits), the same bits on every rank of the group.

    Raises:
        As `logprob_entropy`.

    Cost:
        One all-gather of 3 numbers a row in forward, also with a kept set, none in backward; the rest as
        `logprob_entropy`. With K ids a position 2 + K numbers a row instead of 3, and K columns of the gradient
        written twice. With a ragged set (not a mask) forward reads the kept logits alone. Backward reads no more than
        them either, but it has to write a full gradient: zeros, then the kept columns.

    Numerics, Gradient:
        As `logprob_entropy`; with a kept set only kept logits matter, so a NaN in a dropped column has no effect.

    Example:
        >>> import torch, ppo_ops
        >>> logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
        >>> keep = torch.tensor([[True, True, False, False]])
        >>> print(f"{ppo_ops.logprob(logits, torch.tensor([0]), keep).item():.4f}")
        -0.3133

    Source:
        As `logprob_entropy`.
    """
    return _call(  # type: ignore[no-any-return]
        logprob,
        logits,
        target,
        keep_mask,
        keep_ids=keep_ids,
        keep_offsets=keep_offsets,
        temperature=temperature,
        ignore_index=ignore_index,
        vocab_size=vocab_size,
        vocab_start=vocab_start,
        inplace_backward=inplace_backward,
        group=group,
    )


# Options as the operators default to. One that is left out costs nothing, one that is given half a microsecond.
_DEFAULTS = {
    "keep_ids": None,
    "keep_offsets": None,
    "temperature": None,
    "ignore_index": -100,
    "vocab_size": None,
    "vocab_start": None,
    "inplace_backward": False,
    "group_name": "",
}


def _call(function: Any, logits: Tensor, target: Tensor, keep_mask: Tensor | None, **options: Any) -> Any:
    """What `logprob` and `logprob_entropy` do with their arguments; `function` is one of them."""
    if type(logits) is not Tensor and dtensor.is_dtensor(logits):
        return dtensor.logprobs(function, logits, target, keep_mask, options)
    _plain("logits", logits)
    _plain("target", target)
    keep_ids, keep_offsets = options["keep_ids"], options["keep_offsets"]
    temperature = options["temperature"]
    options["group_name"] = group_name_of(options.pop("group"))
    if function is logprob and target.dim() == logits.dim() > 0:
        multi_target.refuse(keep_mask, keep_ids, keep_offsets, options["inplace_backward"], temperature)
        place = (options["ignore_index"], options["vocab_size"], options["vocab_start"], options["group_name"])
        return _TARGETS_LOGPROB(logits, target, _temperature_tensor(temperature, logits), *place)[0]
    if keep_ids is not None and _needs_conversion(keep_ids, keep_offsets):
        options["keep_ids"], options["keep_offsets"] = as_tensors(keep_ids, keep_offsets, target)
    options["temperature"] = _temperature_tensor(temperature, logits)
    given = {name: options[name] for name, default in _DEFAULTS.items() if options[name] is not default}
    return (_LOGPROB if function is logprob else _LOGPROB_ENTROPY)(logits, target, keep_mask, **given)
