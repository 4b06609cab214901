"""NeMo-RL's vocabulary-parallel log-probabilities and entropies, computed by `torch.ops.ppo`.

    log_prob = z_target - lse        sum_p_log_p = sum_v p_v log p_v = -entropy        (nats)

Import them from here instead of `nemo_rl.distributed.model_utils`, or `ppo_ops.integrations.patch("nemo_rl")`, which
replaces the classes; NeMo-RL's own functions then call these. NeMo-RL itself is not imported here. Its autograd
functions are classes with `apply` here too, and its entropy keeps its sign: it is sum p log p, at most 0.

Arguments that all of them share:

vocab_start_index, vocab_end_index   this rank's columns, global ids; their difference must be V_local
tp_group, group                      the group that shares the vocabulary
inference_only                       the result requires no grad; nothing is saved
chunk_size                           None or positive; has no effect. NeMo-RL bounds its memory with it, at the cost of
                                     three collectives a chunk forward and two backward. Here memory does not depend
                                     on it: nothing of the size of the logits is made, and there is one collective.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_ops.functional import Group
from ppo_ops.integrations._nemo_rl_sequences import (
    from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs_packed_sequences,
    shard_log_prob,
)
from ppo_ops.integrations._shared import check_chunk_size, entropy_of

__all__ = [
    "ChunkedDistributedEntropy",
    "ChunkedDistributedGatherLogprob",
    "ChunkedDistributedLogprob",
    "DistributedLogprob",
    "from_parallel_logits_to_logprobs",
    "from_parallel_logits_to_logprobs_packed_sequences",
]


class DistributedLogprob:
    """`DistributedLogprob.apply(vocab_parallel_logits, target, vocab_start_index, vocab_end_index, group)`."""

    @staticmethod
    def apply(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        group: Group,
        inference_only: bool = False,
    ) -> Tensor:
        """Computes the log-probability of each target; no shift.

        Args:
            vocab_parallel_logits: ``[..., V_local]`` floating point.
            target: ``[...]`` global token ids.
            vocab_start_index, vocab_end_index, group, inference_only: see the module.

        Returns:
            log_prob: ``[...]`` float32 (float64 for float64 logits), the same bits on every rank.

        Raises:
            ValueError: for vocabulary indices that do not fit the logits, naming them; else as `ppo_ops.logprob`.

        Cost:
            One all-gather of 3 numbers a row in forward (NeMo-RL: three all-reduces), none in backward.

        Example:
            >>> import torch
            >>> from ppo_ops.integrations.nemo_rl import DistributedLogprob
            >>> log_prob = DistributedLogprob.apply(torch.zeros(1, 2, 4), torch.tensor([[0, 3]]), 0, 4, None)
            >>> print([f"{x:.4f}" for x in log_prob[0].tolist()])
            ['-1.3863', '-1.3863']

        Source:
            NeMo-RL, `nemo_rl/distributed/model_utils.py`, commits 8c6d533 and 0433dae.
        """
        return shard_log_prob(
            vocab_parallel_logits, target, vocab_start_index, vocab_end_index, group, inference_only=inference_only
        )


class ChunkedDistributedLogprob:
    """`DistributedLogprob` with a `chunk_size`, which has no effect."""

    @staticmethod
    def apply(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int,
        tp_group: Group,
        inference_only: bool = False,
    ) -> Tensor:
        """Computes what `DistributedLogprob.apply` does, to the bit, for any positive `chunk_size`."""
        check_chunk_size(chunk_size)
        return shard_log_prob(
            vocab_parallel_logits, target, vocab_start_index, vocab_end_index, tp_group, inference_only=inference_only
        )


class ChunkedDistributedGatherLogprob:
    """`DistributedLogprob` for K tokens a position, with a `chunk_size`, which has no effect."""

    @staticmethod
    def apply(
        vocab_parallel_logits: Tensor,
        global_indices: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int,
        tp_group: Group,
        inference_only: bool = False,
    ) -> Tensor:
        """Computes the log-probabilities of ``global_indices [..., K]``; the rest as `DistributedLogprob.apply`."""
        check_chunk_size(chunk_size)
        return shard_log_prob(
            vocab_parallel_logits, global_indices, vocab_start_index, vocab_end_index, tp_group, inference_only
        )


class ChunkedDistributedEntropy:
    """`ChunkedDistributedEntropy.apply(vocab_parallel_logits, chunk_size, tp_group)`: sum p log p, at most 0."""

    @staticmethod
    def apply(vocab_parallel_logits: Tensor, chunk_size: int, tp_group: Group, inference_only: bool = False) -> Tensor:
        """Computes sum p log p of each position: the entropy with a minus sign, as NeMo-RL.

        Args:
            vocab_parallel_logits: ``[..., V_local]`` floating point (NeMo-RL: three dimensions).
            chunk_size, tp_group, inference_only: see the module.

        Returns:
            sum_p_log_p: ``[...]`` float32 (float64 for float64 logits), the same bits on every rank.

        Raises:
            ValueError: for a `chunk_size` that is not a positive integer, naming it.

        Cost:
            One all-gather of 4 numbers a row in forward (NeMo-RL: three all-reduces a chunk, in backward again).

        Numerics:
            A -inf logit counts as absent; NeMo-RL's result is NaN then.

        Example:
            >>> import torch
            >>> from ppo_ops.integrations.nemo_rl import ChunkedDistributedEntropy
            >>> print(f"{ChunkedDistributedEntropy.apply(torch.zeros(1, 1, 4), 128, None).item():.4f}")
            -1.3863

        Source:
            NeMo-RL, `nemo_rl/distributed/model_utils.py`, commits 8c6d533 and 0433dae.
        """
        check_chunk_size(chunk_size)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            return -entropy_of(vocab_parallel_logits, tp_group)
