"""TRL's own trainers, with and without `patch("trl")`: the same losses, step after step, on a tiny random Qwen2."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_ops.integrations import patch
from tests.cases import generator

INSTALLED = importlib.util.find_spec("trl") is not None
pytestmark = pytest.mark.skipif(not INSTALLED, reason="trl is not installed (extra 'bench')")

WORDS = 60
# The function that a trainer calls, and where it says so.
TRAINERS = {"tpo": "selective_log_softmax_and_entropy", "cpo": "selective_log_softmax"}


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def _data() -> Any:
    from datasets import Dataset

    source = generator("trl trainers")

    def text(length: int) -> str:
        return "".join(f" w{i}" for i in torch.randint(WORDS, (length,), generator=source).tolist())

    lengths = {"prompt": 4, "chosen": 5, "rejected": 3, "reference": 4}
    return Dataset.from_list([{name: text(length) for name, length in lengths.items()} for _ in range(8)])


def _train(kind: str, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of three steps, and the model after them."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from trl.experimental import cpo, tpo

    config, trainer = {"tpo": (tpo.TPOConfig, tpo.TPOTrainer), "cpo": (cpo.CPOConfig, cpo.CPOTrainer)}[kind]
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=WORDS + 3, num_key_value_heads=2, **sizes))
    options = {"report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "save_strategy": "no"}
    options |= {"disable_tqdm": True, "logging_steps": 1, "max_steps": 3, "per_device_train_batch_size": 4, "seed": 0}
    arguments = config(output_dir=str(folder), learning_rate=1e-3, **options)
    training = trainer(model=model, args=arguments, processing_class=_tokenizer(), train_dataset=_data())
    training.train()
    return [row["loss"] for row in training.state.log_history if "loss" in row], model.state_dict()


@pytest.mark.parametrize("kind", TRAINERS)
def test_trainer(kind: str, tmp_path: Path) -> None:
    import trl.trainer.utils

    before, weights = _train(kind, tmp_path / "before")
    called: list[str] = []
    with patch("trl") as done:
        name = f"trl.experimental.{kind}.{kind}_trainer"
        assert f"{name}.{TRAINERS[kind]}" in done.patched
        _count_calls(name, TRAINERS[kind], called)
        patched, patched_weights = _train(kind, tmp_path / "patched")
        # Undone, so that the patch finds its own function again.
        setattr(importlib.import_module(name), TRAINERS[kind], getattr(trl.trainer.utils, TRAINERS[kind]))
    assert len(before) == len(patched) == len(called) == 3
    # float32 roundings through three steps of AdamW, whose first steps are as long as the rate, whatever the gradient.
    torch.testing.assert_close(patched, before, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(patched_weights, weights, rtol=0, atol=3e-4)


def _count_calls(module_name: str, name: str, called: list[str]) -> None:
    module = importlib.import_module(module_name)
    function = getattr(module, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return function(*args, **kwargs)

    setattr(module, name, counting)
