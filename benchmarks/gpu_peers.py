"""GPU kernels of other projects, as providers, where their packages can be imported. They know no entropy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.inputs import Inputs
from benchmarks.providers import Deviation, Outputs, Provider, ppo_ops_providers


def liger_providers(device: str) -> list[Provider]:
    """Liger's cross entropy; its forward makes the gradient too, over the logits."""
    from liger_kernel.transformers.functional import liger_cross_entropy

    def function(logits: Tensor, inputs: Inputs) -> Outputs:
        return -liger_cross_entropy(logits, inputs.target, reduction="none"), None

    low = ((torch.bfloat16, Deviation(2e-2, 2e-2, "rounds log-prob to bfloat16, and the gradient twice")),)
    return [Provider("liger", function, "liger-kernel", entropy=False, bytes_per_element=1, deviations=low)]


def flash_attn_providers(device: str) -> list[Provider]:
    """flash-attn's Triton cross entropy, with the gradient in new memory and over the logits."""
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    def provider(name: str, inplace: bool) -> Provider:
        def function(logits: Tensor, inputs: Inputs) -> Outputs:
            return -cross_entropy_loss(logits, inputs.target, inplace_backward=inplace)[0], None

        return Provider(name, function, "flash-attn", entropy=False, only_grad=inplace, bytes_per_element=5)

    return [provider("flash-attn", False), provider("flash-attn, in place", True)]


def quack_providers(device: str) -> list[Provider]:
    """quack's CuTe cross entropy, with the gradient in new memory and over the logits."""
    from quack.cross_entropy import cross_entropy

    def provider(name: str, inplace: bool) -> Provider:
        def function(logits: Tensor, inputs: Inputs) -> Outputs:
            return -cross_entropy(logits, inputs.target, reduction="none", inplace_backward=inplace), None

        return Provider(name, function, "quack-kernels", entropy=False, only_grad=inplace, bytes_per_element=5)

    return [provider("quack", False), provider("quack, in place", True)]


# `providers.LOADERS` has plain torch and TRL. Ours are those of CUDA, also where the interpreter plays the GPU.
LOADERS: dict[str, Callable[[str], list[Provider]]] = {
    "ppo-ops": lambda device: ppo_ops_providers("cuda"),
    "liger-kernel": liger_providers,
    "flash-attn": flash_attn_providers,
    "quack-kernels": quack_providers,
}
PACKAGES = ["ppo-ops", "torch", "trl", *list(LOADERS)[1:]]
