"""verl's functions of log-probabilities and entropies, computed by `torch.ops.ppo`.

    log_prob = z_label - lse        entropy = lse - sum_v p_v z_v        (nats)

Import them from here instead of `verl.utils.torch_functional`, `verl.utils.megatron.tensor_parallel` and
`verl.utils.kernel.linear_cross_entropy`, or let `ppo_ops.integrations.patch("verl")` replace verl's own everywhere.
verl itself is not imported; megatron-core only by vocab-parallel functions that are given no group.
"""

from __future__ import annotations

from torch import Tensor

from ppo_ops.functional import Group, logprob
from ppo_ops.integrations._shared import check_chunk_size, entropy_of, may_overwrite, megatron_group
from ppo_ops.integrations.megatron import vocab_parallel_cross_entropy


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Computes the log-probability of each label.

    Args:
        logits: ``[..., V]`` floating point, already divided by the temperature, as verl does.
        labels: ``[...]`` any integer dtype.
        inplace_backward: the gradient overwrites logits that are a contiguous intermediate result; others (leaves,
            slices with gaps, and all under torch.compile) get a gradient of their own, as in verl without flash-attn.
            Pass False where another function saved the same logits before, as verl does where it wants the entropy:
            its backward raises RuntimeError otherwise.

    Returns:
        log_prob: ``[...]`` in verl's dtype: float32 on CUDA, where verl takes flash-attn's loss; on the CPU that of
        the logits, rounded once.

    Raises:
        TypeError, ValueError, IndexError: as `ppo_ops.logprob`.

    Cost:
        Saves the logits themselves and 3 numbers a row; backward writes the gradient over them.

    Example:
        >>> import torch
        >>> from ppo_ops.integrations.verl import logprobs_from_logits
        >>> print(f"{logprobs_from_logits(torch.zeros(1, 4), torch.tensor([3])).item():.4f}")
        -1.3863

    Source:
        Signature of verl 0.9.1, `verl/utils/torch_functional.py`.
    """
    log_prob = logprob(logits, labels, inplace_backward=inplace_backward and may_overwrite(logits))
    return log_prob if logits.is_cuda else log_prob.to(logits.dtype)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Computes the entropy of each row.

    Args:
        logits: ``[..., V]`` floating point.

    Returns:
        entropy: ``[...]`` in the logits' dtype, as verl. It is summed in float32 and rounded once; verl computes it in
        bfloat16 for bfloat16 logits.

    Raises:
        TypeError, ValueError: as `ppo_ops.logprob_entropy`.

    Cost:
        Saves the logits themselves and 4 numbers a row (verl: the logits and two tensors of their size).

    Numerics:
        A -inf logit counts as absent; verl's entropy is NaN then.

    Example:
        >>> import torch
        >>> from ppo_ops.integrations.verl import entropy_from_logits
        >>> print(f"{entropy_from_logits(torch.tensor([[0.0, 0.0, -torch.inf]])).item():.4f}")
        0.6931

    Source:
        Signature of verl 0.9.1, `verl/utils/torch_functional.py`.
    """
    return entropy_of(logits).to(logits.dtype)


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """Computes the entropy of each row, as `entropy_from_logits`, in float32.

    Args:
        logits: ``[..., V]`` floating point (verl: two dimensions).
        chunk_size: positive; has no effect: nothing of the size of the logits is made, in any number of chunks.

    Returns:
        entropy: ``[...]`` float32, as verl; float64 for float64 logits.

    Raises:
        ValueError: for a `chunk_size` that is not a positive integer, naming it.

    Cost, Numerics:
        As `entropy_from_logits`.

    Example:
        >>> import torch
        >>> from ppo_ops.integrations.verl import entropy_from_logits_with_chunking
        >>> print(entropy_from_logits_with_chunking(torch.zeros(1, 4, dtype=torch.bfloat16)).dtype)
        torch.float32

    Source:
        Signature of verl 0.9.1, `verl/utils/torch_functional.py`.
    """
    check_chunk_size(chunk_size)
    return entropy_of(logits)


def vocab_parallel_log_probs_from_logits(logits: Tensor, labels: Tensor, *, tp_group: Group = None) -> Tensor:
    """Computes the log-probability of each label from logits sharded over the vocabulary.

    Args:
        logits: ``[..., V_local]`` floating point. The gradient overwrites float32 ones that are a contiguous
            intermediate result; verl's function overwrites float32 ones in forward.
        labels: ``[...]`` any integer dtype, global token ids.
        tp_group: beyond verl: the group that shares the vocabulary; None takes Megatron's tensor-parallel group.

    Returns:
        log_prob: ``[...]`` float32 (float64 for float64 logits), the same bits on every rank.

    Raises:
        ImportError: no group given and megatron-core is not installed; else as `ppo_ops.logprob`.

    Cost:
        One all-gather of 3 numbers a row in forward (verl: three all-reduces), none in backward.

    Example:
        >>> import torch
        >>> from ppo_ops.integrations.verl import vocab_parallel_log_probs_from_logits
        >>> # In training leave the group out. "" is the name for logits that hold the whole vocabulary.
        >>> log_prob = vocab_parallel_log_probs_from_logits(torch.zeros(1, 4), torch.tensor([3]), tp_group="")
        >>> print(f"{log_prob.item():.4f}")
        -1.3863

    Source:
        Signature of verl 0.9.1, `verl/utils/megatron/tensor_parallel.py`.
    """
    return -vocab_parallel_cross_entropy(logits, labels, tp_group=tp_group)


def vocab_parallel_entropy(vocab_parallel_logits: Tensor, *, tp_group: Group = None) -> Tensor:
    """Computes the entropy of each row of logits sharded over the vocabulary.

    Args:
        vocab_parallel_logits: ``[..., V_local]`` floating point. Not modified; verl's backward writes to them.
        tp_group: as `vocab_parallel_log_probs_from_logits`.

    Returns:
        entropy: ``[...]`` in the logits' dtype, as verl, rounded once; the same bits on every rank.

    Raises:
        As `vocab_parallel_log_probs_from_logits`.

    Cost:
        One all-gather of 4 numbers a row in forward (verl: three all-reduces), none in backward. Saves the logits and
        4 numbers a row (verl: the logits and a softmax).

    Numerics:
        A -inf logit counts as absent; verl's entropy is NaN then, and off by 0.1 nat for bfloat16 logits.

    Example:
        >>> import torch
        >>> from ppo_ops.integrations.verl import vocab_parallel_entropy
        >>> print(f"{vocab_parallel_entropy(torch.zeros(1, 4), tp_group='').item():.4f}")
        1.3863

    Source:
        Signature of verl 0.9.1, `verl/utils/megatron/tensor_parallel.py`.
    """
    return entropy_of(vocab_parallel_logits, megatron_group(tp_group)).to(vocab_parallel_logits.dtype)


def vocab_parallel_entropy_with_chunking(
    vocab_parallel_logits: Tensor, chunk_size: int = 2048, *, tp_group: Group = None
) -> Tensor:
    """Computes the entropy of each row, as `vocab_parallel_entropy`, in float32.

    Args:
        vocab_parallel_logits, tp_group: as `vocab_parallel_entropy`.
        chunk_size: as `entropy_from_logits_with_chunking`; has no effect.

    Returns:
        entropy: ``[...]`` float32, as verl; float64 for float64 logits.

    Raises:
        As `entropy_from_logits_with_chunking` and `vocab_parallel_entropy`.

    Cost, Numerics:
        As `vocab_parallel_entropy`; verl: three all-reduces a chunk.

    Example:
        >>> import torch
        >>> from ppo_ops.integrations.verl import vocab_parallel_entropy_with_chunking
        >>> print(f"{vocab_parallel_entropy_with_chunking(torch.zeros(1, 1, 4), tp_group='').item():.4f}")
        1.3863

    Source:
        Signature of verl 0.9.1, `verl/utils/megatron/tensor_parallel.py`.
    """
    check_chunk_size(chunk_size)
    return entropy_of(vocab_parallel_logits, megatron_group(tp_group))


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: Group = None,
) -> tuple[Tensor, Tensor]:
    """Computes the log-probability of each label and the entropy of each row from hidden states, without the logits.

    Args:
        hidden: ``[..., H]`` floating point.
        weight: ``[V, H]``, or ``[V_local, H]`` with a group.
        labels: ``[...]`` any integer dtype, global token ids.
        temperature: > 0; a float, as verl asks.
        reduction: "none", or "sum" or "mean" of the log-probs, in any case of letters; the entropy is never reduced.
        dist_process_group: the group that shares the vocabulary; None: weight holds all of it.

    Returns:
        log_prob: ``[N]`` float32 (float64 for float64), N rows of all leading dimensions; 0-dim with a reduction.
        entropy: ``[N]`` float32.

    Raises:
        ValueError: for another reduction, naming it.
        TypeError: for a temperature that is not a float, as verl; else as `ppo_ops.linear_logprob_entropy`.

    Cost:
        As `ppo_ops.linear_logprob_entropy` with ``reduce_grad_hidden=False``: one all-gather forward (verl: three
        all-reduces), none backward. Runs on any device; verl's needs CUDA.

    Gradient:
        With a group, that of hidden is this rank's part of the sum over ranks, as verl's: Megatron's
        `gather_from_sequence_parallel_region`, which makes the hidden states there, adds the parts up in backward.

    Example:
        >>> import torch
        >>> from ppo_ops.integrations.verl import linear_cross_entropy
        >>> log_prob, entropy = linear_cross_entropy(torch.zeros(1, 2, 8), torch.ones(4, 8), torch.tensor([[0, 3]]))
        >>> print(tuple(log_prob.shape), f"{log_prob[0].item():.4f} {entropy[0].item():.4f}")
        (2,) -1.3863 1.3863

    Source:
        Signature of verl 0.9.1, `verl/utils/kernel/linear_cross_entropy.py`.
    """
    from ppo_ops.linear import linear_logprob_entropy

    if not isinstance(temperature, float):
        raise TypeError(f"temperature must be a float, got {type(temperature)}")
    if reduction.lower() not in ("none", "sum", "mean"):
        raise ValueError(f"reduction must be 'none', 'sum' or 'mean', got {reduction!r}")
    log_prob, entropy = linear_logprob_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1),
        temperature=temperature,
        reduce_grad_hidden=False,
        group=dist_process_group,
    )
    if reduction.lower() == "sum":
        log_prob = log_prob.sum()
    elif reduction.lower() == "mean":
        log_prob = log_prob.mean()
    return log_prob, entropy
