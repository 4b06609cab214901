"""verl's own training code, with and without `patch("verl")`: the same losses and gradients.

Its FSDP engine's `forward_step` with `ppo_loss` on a tiny random Qwen2, and its Megatron engine's head on two ranks.
The engines are made without their constructors, which want a GPU; what is called is verl's, unchanged.
"""

from __future__ import annotations

import functools
import importlib.util
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ppo_ops.integrations import patch
from tests.cases import generator
from tests.distributed.harness import Pool
from tests.integrations import hosts
from tests.tolerances import assert_same_bits

INSTALLED = all(importlib.util.find_spec(name) for name in ("verl", "megatron"))
pytestmark = pytest.mark.skipif(not INSTALLED, reason="verl is not installed: docs/verl.md says how to run this")

VOCABULARY = 64
PROMPTS, RESPONSES = (3, 5, 4), (6, 2, 4)
# float32 roundings of log-probs up to 8, through one layer and back.
NEAR = {"rtol": 1e-5, "atol": 2e-6}


class Step(NamedTuple):
    loss: Tensor
    log_probs: Tensor
    entropy: Tensor
    grads: dict[str, Tensor]


def _jagged(parts: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def _micro_batch(remove_padding: bool) -> Any:
    from verl.utils.tensordict_utils import get_tensordict

    source = generator("verl engine")
    prompts, responses = (
        [torch.randint(VOCABULARY, (length,), generator=source) for length in lengths]
        for lengths in (PROMPTS, RESPONSES)
    )
    ids = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    tensors = {
        "input_ids": ids,
        "position_ids": [torch.arange(len(i)) for i in ids],
        "prompts": prompts,
        "responses": responses,
        "response_mask": [torch.ones(length) for length in RESPONSES],
        "old_log_probs": [-4 - torch.rand(length, generator=source) for length in RESPONSES],
        "advantages": [torch.randn(length, generator=source) for length in RESPONSES],
    }
    options = {"temperature": 0.8, "use_remove_padding": remove_padding, "calculate_entropy": True, "dp_size": 1}
    options |= {"batch_num_tokens": None, "global_batch_size": None}
    return get_tensordict({name: _jagged(parts) for name, parts in tensors.items()}, options)


def _fsdp_step(monkeypatch: pytest.MonkeyPatch, remove_padding: bool, chunking: bool) -> Step:
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from verl.utils import torch_functional
    from verl.workers.config.actor import ActorConfig
    from verl.workers.engine.fsdp import transformer_impl
    from verl.workers.utils.losses import ppo_loss

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes))
    engine = object.__new__(transformer_impl.FSDPEngineWithLMHead)
    engine.module, engine._autocast_dtype = model, torch.float32
    engine.pad_to_length = engine.use_ulysses_sp = False
    engine.engine_config = types.SimpleNamespace(
        entropy_checkpointing=False, entropy_from_logits_with_chunking=chunking, entropy_from_logits_chunk_size=4
    )
    # As the constructor chooses it.
    name = "entropy_from_logits_with_chunking" if chunking else "entropy_from_logits"
    engine.compute_entropy_from_logits = getattr(torch_functional, name)
    engine.get_data_parallel_group = lambda: None
    monkeypatch.setattr(transformer_impl, "get_device_id", lambda: "cpu")
    config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, entropy_coeff=0.01)
    loss, output = engine.forward_step(_micro_batch(remove_padding), functools.partial(ppo_loss, config), False)
    loss.backward()
    found = output["model_output"]
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Step(loss.detach(), found["log_probs"].values(), found["entropy"].values(), grads)


@pytest.mark.parametrize("chunking", [False, True])
@pytest.mark.parametrize("remove_padding", [False, True])
def test_fsdp_engine_and_ppo_loss(monkeypatch: pytest.MonkeyPatch, remove_padding: bool, chunking: bool) -> None:
    before = _fsdp_step(monkeypatch, remove_padding, chunking)
    with patch("verl") as done:
        patched = _fsdp_step(monkeypatch, remove_padding, chunking)
    assert "verl.workers.engine.fsdp.transformer_impl.logprobs_from_logits" in done.patched
    torch.testing.assert_close(patched, before, **NEAR)
    assert not torch.equal(patched.log_probs, before.log_probs), "no other function was called"
    after = _fsdp_step(monkeypatch, remove_padding, chunking)
    for one, other in zip(after[:3], before[:3], strict=True):
        assert_same_bits(one, other)


def _megatron_head(group: ProcessGroup, patched: bool, chunking: bool) -> tuple[Tensor, Tensor, Tensor] | str:
    """Log-probs, entropy and the gradient of this rank's logits, from verl's Megatron engine; or an error."""
    state = hosts.megatron_state(2)
    from verl.workers.engine.megatron import transformer_impl

    try:
        case, rank = hosts.case_of("verl megatron"), state.get_tensor_model_parallel_rank()
        leaf = case.logits.chunk(2, -1)[rank].clone().requires_grad_()
        engine = object.__new__(transformer_impl.MegatronEngineWithLMHead)
        engine.engine_config = types.SimpleNamespace(
            entropy_from_logits_with_chunking=chunking, entropy_from_logits_chunk_size=4
        )
        options = {"calculate_sum_pi_squared": False, "distillation_use_topk": False, "distillation_only": False}
        options |= {"logits_processor_func": None, "batch": None, "data_format": "bshd", "calculate_entropy": True}

        def head() -> Any:
            temperature = torch.full(case.target.shape, 0.7)
            # verl hands a multiplication to torch.compile; without, it is the same formula and starts at once.
            with torch.compiler.set_stance("force_eager"):
                return engine._lm_head_logits_processor(leaf.clone(), case.target, temperature, **options)

        if patched:
            with patch("verl"):
                found = head()
        else:
            found = head()
        loss = found["log_probs"].mean() - 0.01 * found["entropy"].mean()
        try:
            loss.backward()
        except RuntimeError as error:
            return str(error)
        assert leaf.grad is not None
        return found["log_probs"].detach(), found["entropy"].detach(), leaf.grad
    finally:
        hosts.end_megatron()


def test_megatron_engine_on_two_ranks(ranks: Pool) -> None:
    before, patched = (ranks.run(_megatron_head, flag, False, size=4)[:2] for flag in (False, True))
    for mine, theirs in zip(patched, before, strict=True):
        # verl sums p z of unshifted logits, up to 25 at this temperature: roundings of 2e-6 each.
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    for one, other in zip(patched[0][:2], patched[1][:2], strict=True):
        assert_same_bits(one, other)


def test_megatron_engine_with_chunked_entropy(ranks: Pool) -> None:
    """verl's backward of more than one chunk fails: the first writes to logits that the others saved. Ours does not."""
    (before, _), (patched, _), (whole, _) = (
        ranks.run(_megatron_head, *flags, size=4)[:2] for flags in ((False, True), (True, True), (True, False))
    )
    assert "has been modified by an inplace operation" in before
    for one, other in zip(patched, whole, strict=True):
        assert_same_bits(one, other)
