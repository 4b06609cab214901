"""A small Megatron GPT on the CPU: tensor-parallel over gloo, with vocabulary-parallel logits."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about CUDA extensions that are not there
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import ModuleSpec


class CausalAttention(nn.Module):
    """Megatron's own attention core allocates on CUDA; this one is torch's, for query, key, value ``[s, b, n, h]``."""

    def __init__(self, **_: object) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        context = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return context.permute(2, 0, 1, 3).flatten(2)


class Policy(nn.Module):
    """tokens ``[b, s]`` -> logits ``[b, s, V_local]`` of this rank's columns."""

    def __init__(self, vocab_size: int, max_tokens: int, layers: int, hidden: int, heads: int) -> None:
        super().__init__()
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            tensor_model_parallel_size=dist.get_world_size(),
            # The whole matrix is drawn on every rank and sliced: the same model for any number of ranks.
            use_cpu_initialization=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bias_dropout_fusion=False,
            gradient_accumulation_fusion=False,
        )
        spec = get_gpt_layer_local_spec()
        spec.submodules.self_attention.submodules.core_attention = ModuleSpec(module=CausalAttention)
        self.gpt = GPTModel(config, spec, vocab_size, max_tokens, position_embedding_type="learned_absolute")

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        return self.gpt(tokens, positions, attention_mask=None)


def start_megatron() -> dist.ProcessGroup:
    """Makes the world one tensor-parallel group and returns it."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    return parallel_state.get_tensor_model_parallel_group()
