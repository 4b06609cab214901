"""ppo_ops: fused token log-probability and entropy from (vocabulary-sharded) logits, as `torch.ops.ppo`.

Importing this package registers the operators. It imports neither Triton, Megatron nor Inductor.
"""

from ppo_ops import ops  # noqa: F401  (registers the operators)
from ppo_ops.functional import logprob, logprob_entropy

__all__ = ["__version__", "logprob", "logprob_entropy"]

__version__ = "0.1.0"
