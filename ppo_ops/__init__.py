"""ppo_ops: fused token log-probability and entropy from (vocabulary-sharded) logits, as `torch.ops.ppo`.

Importing this package registers the operators. It imports neither Triton, Megatron nor Inductor.
"""

from ppo_ops import ops  # noqa: F401  (registers the operators)
from ppo_ops.functional import logprob, logprob_entropy
from ppo_ops.keep_sets import keep_sets_from_mask, keep_sets_to_mask, top_p_keep_sets
from ppo_ops.linear import linear_logprob, linear_logprob_entropy
from ppo_ops.squared_probs import sum_squared_probs
from ppo_ops.topk import vocab_parallel_topk

__all__ = [
    "__version__",
    "keep_sets_from_mask",
    "keep_sets_to_mask",
    "linear_logprob",
    "linear_logprob_entropy",
    "logprob",
    "logprob_entropy",
    "sum_squared_probs",
    "top_p_keep_sets",
    "vocab_parallel_topk",
]

__version__ = "0.1.0"
