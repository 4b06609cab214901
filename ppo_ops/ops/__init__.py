"""The operators of `torch.ops.ppo`; importing this package registers them."""

from ppo_ops.ops import linear, linear_grad, logits_grad, logprob_entropy, vocab_stats

__all__ = ["linear", "linear_grad", "logits_grad", "logprob_entropy", "vocab_stats"]
