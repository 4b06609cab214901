"""What `patch` knows of each framework: its versions, the functions it replaces, and where they live."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Framework:
    package: str  # as its metadata name it
    versions: tuple[str, ...]  # those that the tests have run against, or whose source has been read
    adapter: str
    functions: dict[str, tuple[str, ...]]  # home module -> functions, each in the adapter under the same name
    optional: tuple[str, ...] = ()  # home modules that need more packages; skipped where these are missing
    # Frameworks that are also run from a checkout that nobody installed: without metadata the arguments alone decide.
    checkout: bool = False
    # What the adapter takes and a known version may lack; None: whatever has a default. Without metadata an older
    # function, which may return something else, must not pass for a known one.
    may_lack: tuple[str, ...] | None = None
    # Function -> the adapter's function of the same arguments that tells which calls stay the framework's.
    own_calls: dict[str, str] = field(default_factory=dict)


FRAMEWORKS = {
    "verl": Framework(
        "verl",
        ("0.9.1",),
        "ppo_ops.integrations.verl",
        {
            "verl.utils.torch_functional": (
                "logprobs_from_logits",
                "entropy_from_logits",
                "entropy_from_logits_with_chunking",
            ),
            "verl.utils.megatron.tensor_parallel": (
                "vocab_parallel_log_probs_from_logits",
                "vocab_parallel_entropy",
                "vocab_parallel_entropy_with_chunking",
            ),
            "verl.utils.kernel.linear_cross_entropy": ("linear_cross_entropy",),
        },
        optional=("verl.utils.megatron.tensor_parallel",),
    ),
    "trl": Framework(
        "trl",
        ("1.16.0",),
        "ppo_ops.integrations.trl",
        {"trl.trainer.utils": ("selective_log_softmax", "entropy_from_logits", "selective_log_softmax_and_entropy")},
    ),
    "megatron": Framework(
        "megatron-core",
        ("0.16.1",),
        "ppo_ops.integrations.megatron",
        {
            "megatron.core.tensor_parallel.cross_entropy": ("vocab_parallel_cross_entropy",),
            "megatron.core.fusions.fused_cross_entropy": ("fused_vocab_parallel_cross_entropy",),
        },
    ),
    # The classes' arguments are the same in commit 8c6d533 of NVIDIA-NeMo/RL (before 0.6.0), in the tree of 0.7.0 and
    # in commit 0433dae (after it). The functions that call them differ; they stay NeMo-RL's and find the replacements
    # by name.
    "nemo_rl": Framework(
        "nemo-rl",
        ("0.5.0", "0.6.0", "0.7.0"),
        "ppo_ops.integrations.nemo_rl",
        {
            "nemo_rl.distributed.model_utils": (
                "DistributedLogprob",
                "ChunkedDistributedLogprob",
                "ChunkedDistributedGatherLogprob",
                "ChunkedDistributedEntropy",
            )
        },
        checkout=True,
        may_lack=(),
    ),
    # The tests run against 1.0.4. The others by their source: commit 8cc6378 of inclusionAI/AReaL, and 55fa31d and
    # 60a9824 of areal-project/AReaL, its name since, which have `reuse_logits` as well.
    "areal": Framework(
        "areal",
        ("1.0.0", "1.0.3", "1.0.4", "2.0.0", "2.1.0"),
        "ppo_ops.integrations.areal",
        {"areal.utils.functional.vocab_parallel": ("gather_logprobs", "gather_logprobs_entropy")},
        checkout=True,
        may_lack=("reuse_logits",),
    ),
    # The arguments since pull request 2144 of THUDM/slime (2026-06-29), that is since 0.3.1; commit 00c2d6d.
    "slime": Framework(
        "slime",
        ("0.3.1", "0.3.2", "0.4.0"),
        "ppo_ops.integrations.slime",
        {
            "slime.utils.ppo_utils": ("calculate_log_probs_and_entropy",),
            "slime.backends.megatron_utils.loss": ("get_log_probs_and_entropy",),
        },
        optional=("slime.backends.megatron_utils.loss",),
        checkout=True,
        may_lack=("tp_group", "with_entropy_grad"),
        own_calls={"get_log_probs_and_entropy": "samples_are_cut"},
    ),
}
