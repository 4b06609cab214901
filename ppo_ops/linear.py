"""The Python API of the fused output layer: hidden states and the output weight in, log-prob and entropy out."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_ops.functional import Group, KeepIds, _needs_conversion, _plain, _temperature_tensor, group_name_of
from ppo_ops.keep_sets import as_tensors
from ppo_ops.kernels import linear as _chunked

_LOGPROB = torch.ops.ppo.linear_logprob.default
_LOGPROB_ENTROPY = torch.ops.ppo.linear_logprob_entropy.default
_LOGPROB_ENTROPY_KEPT = torch.ops.ppo.linear_logprob_entropy.kept


def set_workspace_bytes(number: int = _chunked.DEFAULT_WORKSPACE_BYTES) -> None:
    """Sets how many bytes a call may use for the logits of one chunk, forward or backward; 256 MiB by default.

    Process-wide, and read when a call runs: compiled and exported graphs obey it too. A chunk has at least one row.

    Args:
        number: bytes, at least 1; without it the default.

    Raises:
        ValueError: for fewer than 1.
    """
    if number < 1:
        raise ValueError(f"number must be at least 1 byte, got {number}")
    _chunked.set_workspace_bytes(int(number))


def _plain_layer(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    for name, tensor in (("hidden", hidden), ("weight", weight), ("target", target)):
        _plain(name, tensor)
    if bias is not None:
        _plain("bias", bias)


def linear_logprob_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    keep_ids: KeepIds | None = None,
    keep_offsets: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    reduce_grad_hidden: bool = True,
    group: Group = None,
) -> tuple[Tensor, Tensor]:
    """Computes `logprob_entropy(hidden @ weight.T + bias, target)` without the logits in memory.

        x = hidden @ weight.T + bias        z = x / T        lse = log sum_v e^z_v        p = e^(z - lse)
        log_prob = z_target - lse_kept                       (lse over the kept set; over all without one)
        entropy  = lse - sum_v p_v z_v                       (nats, always over the whole vocabulary)

    Args:
        hidden: ``[..., H]`` float16, bfloat16, float32 or float64; the same on every rank of `group`.
        weight: ``[V_local, H]`` in hidden's dtype: this rank's rows of the output layer's weight. Under autocast any
            two of the 16-bit and 32-bit dtypes go together.
        target: ``[...]`` any integer dtype, global token ids.
        bias: ``[V_local]`` like weight, or None.
        keep_ids, keep_offsets: a kept set as ragged rows, as in `logprob_entropy`. There is no `keep_mask`, which would
            be as large as the logits; `keep_sets_from_mask` makes these from one.
        temperature: > 0; a number, or a float32 tensor, 0-dim or shaped like target.
        ignore_index: rows with this target give 0, get a zero gradient, and their hidden states are not read.
        vocab_size: rows of weight whose global id is not below it are padding and count as absent.
        vocab_start: global id of this rank's first row of weight; default ``rank * V_local``.
        reduce_grad_hidden: sum hidden's gradient over the group. False leaves each rank its part of the sum, for a
            caller that reduces by itself, such as the reduce-scatter of sequence parallelism.
        group: ProcessGroup, 1-D DeviceMesh or group name that shares the vocabulary in group-rank order; None where
            weight holds all of it.

    Returns:
        log_prob, entropy: ``[...]`` float32 (float64 for float64 inputs), the same bits on every rank of the group.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
        IndexError: on the CPU, the first row whose target is outside the vocabulary and not `ignore_index`. On other
            devices the log_prob of that row is NaN.

    Cost:
        Forward: 2 N H V floating-point operations, one all-gather of 4 numbers a row (6 with a kept set, none for one
        rank). Backward: 2 N H V for the logits again, 2 N H V each for the gradients of hidden and weight, where
        wanted; one all-reduce of hidden's gradient in float32, where wanted and there is a group. Saves its inputs
        and 4 or 6 numbers a row. Memory: a workspace (`ppo_ops.linear.set_workspace_bytes`) and the gradients, those
        of a 16-bit weight and bias in float32 first. On the CPU, rows that are ignored or have no upstream gradient
        cost nothing; on CUDA, where finding them would cost a synchronisation, they cost as much as the others.

    Numerics:
        Logits are float32 (float64 for float64 inputs) also for 16-bit inputs, and go through no rounding. A row's bits
        may depend on the number of rows, as those of a matrix product do. A NaN in hidden makes its row NaN.

    Gradient:
        Of hidden, weight and bias, each in its own dtype, accumulated in float32 over all chunks and rounded once. What
        needs no gradient is not computed. Differentiating twice raises RuntimeError.

    Example:
        >>> import torch, ppo_ops
        >>> hidden, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 1.0]])
        >>> log_prob, entropy = ppo_ops.linear_logprob_entropy(hidden, weight, torch.tensor([1]))
        >>> print(f"{log_prob.item():.4f} {entropy.item():.4f}")
        -0.5514 0.9753

    Source:
        Chunked output layers as in arXiv:2410.10989; the row kernels of `logprob_entropy`.
    """
    _plain_layer(hidden, weight, target, bias)
    options = {
        "temperature": _temperature_tensor(temperature, hidden),
        "ignore_index": ignore_index,
        "vocab_size": vocab_size,
        "vocab_start": vocab_start,
        "reduce_grad_hidden": reduce_grad_hidden,
        "group_name": group_name_of(group),
    }
    if keep_ids is not None and _needs_conversion(keep_ids, keep_offsets):
        keep_ids, keep_offsets = as_tensors(keep_ids, keep_offsets, target)
    if keep_ids is None and keep_offsets is None:
        return _LOGPROB_ENTROPY(hidden, weight, target, bias, **options)  # type: ignore[no-any-return]
    if keep_ids is None or keep_offsets is None:
        missing = "keep_ids" if keep_ids is None else "keep_offsets"
        raise ValueError(f"keep_ids and keep_offsets must be given together, got {missing}=None")
    sets = {"keep_ids": keep_ids, "keep_offsets": keep_offsets}
    return _LOGPROB_ENTROPY_KEPT(hidden, weight, target, bias, **sets, **options)  # type: ignore[no-any-return]


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    keep_ids: KeepIds | None = None,
    keep_offsets: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    reduce_grad_hidden: bool = True,
    group: Group = None,
) -> Tensor:
    """Computes the log-probability of each target token: `linear_logprob_entropy` without the entropy and its cost.

        log_prob = z_target - log sum_{v kept} e^z_v        z = (hidden @ weight.T + bias) / T        (nats)

    Args:
        hidden, weight, target, bias, keep_ids, keep_offsets, temperature, ignore_index, vocab_size, vocab_start,
            reduce_grad_hidden, group: as `linear_logprob_entropy`.

    Returns:
        log_prob: ``[...]`` float32 (float64 for float64 inputs), the same bits on every rank of the group.

    Raises:
        As `linear_logprob_entropy`.

    Cost:
        One all-gather of 3 numbers a row in forward, also with a kept set; the rest as `linear_logprob_entropy`.

    Numerics, Gradient:
        As `linear_logprob_entropy`.

    Example:
        >>> import torch, ppo_ops
        >>> hidden, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 1.0]])
        >>> print(f"{ppo_ops.linear_logprob(hidden, weight, torch.tensor([1])).item():.4f}")
        -0.5514

    Source:
        As `linear_logprob_entropy`.
    """
    _plain_layer(hidden, weight, target, bias)
    if keep_ids is not None and _needs_conversion(keep_ids, keep_offsets):
        keep_ids, keep_offsets = as_tensors(keep_ids, keep_offsets, target)
    return _LOGPROB(  # type: ignore[no-any-return]
        hidden,
        weight,
        target,
        bias,
        keep_ids=keep_ids,
        keep_offsets=keep_offsets,
        temperature=_temperature_tensor(temperature, hidden),
        ignore_index=ignore_index,
        vocab_size=vocab_size,
        vocab_start=vocab_start,
        reduce_grad_hidden=reduce_grad_hidden,
        group_name=group_name_of(group),
    )
