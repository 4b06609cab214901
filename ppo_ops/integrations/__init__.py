"""Adapters to training frameworks: thin, imported on demand, none needed for the operators.

slime      slime's log-probs and entropy, of rows and of packed responses with top-p sets
megatron   Megatron's [s, b, V_local] layout, its tensor-parallel group, and what its training loop takes
verl       verl's log-probabilities and entropies, whole, vocabulary-parallel and from hidden states
nemo_rl    NeMo-RL's: vocabulary start and end, next-token shift, sum p log p
trl        TRL's selective_log_softmax and entropies
areal      AReaL's gather_logprobs and gather_logprobs_entropy
patch      replaces a framework's own functions by these, in every module that holds one, and puts them back
"""

from ppo_ops.integrations._patch import Patch, patch

__all__ = ["Patch", "patch"]
