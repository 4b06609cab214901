"""Log-probability, entropy and perplexity of a held-out sentence under a byte-level language model trained here.

    python examples/01_single_device.py

The text is real: this repository's README and the docstrings of its package. A small recurrent network
learns to predict the next byte with `ppo_ops.logprob` as its loss. One sentence of the README is kept out of training;
its log-prob and entropy come from `ppo_ops.logprob_entropy`, are checked against the float64 specification
`ppo_ops.reference`, and so is the gradient. Exits non-zero where a check fails.
"""

from __future__ import annotations

import ast
import math
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import ppo_ops
from ppo_ops import reference

REPOSITORY = Path(__file__).resolve().parents[1]
HELD_OUT = "A term whose logit is -inf contributes exactly nothing, to the sums and to the gradient alike."
STEPS, BATCH, LENGTH = 150, 32, 48

# Outputs are float32 numbers below 32, whose spacing is at most 1.9e-6; a few roundings stay below this.
OUTPUT_TOLERANCE = 1e-5
# Gradient entries are below 1.1 (spacing 1.2e-7), with the relative rounding of probabilities, a few 1e-7.
GRADIENT_TOLERANCE = 1e-6


def docstrings(path: Path) -> list[str]:
    """All docstrings of one Python file, in order."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, documented)]
    return [text for text in map(ast.get_docstring, nodes) if text]


def repository_text() -> str:
    """The README and all docstrings of the package, runs of white space made one space."""
    parts = [(REPOSITORY / "README.md").read_text()]
    for path in sorted((REPOSITORY / "ppo_ops").rglob("*.py")):
        parts += docstrings(path)
    return " ".join(" ".join(parts).split())


def to_bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()))


class ByteModel(nn.Module):
    """Bytes ``[B, L]`` -> next-byte logits ``[B, L, 256]``."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.recurrent = nn.GRU(64, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.embedding(tokens))
        return self.head(hidden)


def train(model: ByteModel, corpus: Tensor) -> None:
    """Maximise the mean log-probability of the next byte."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS)
    for step in range(STEPS):
        starts = torch.randint(len(corpus) - LENGTH, (BATCH, 1))
        window = corpus[starts + torch.arange(LENGTH + 1)]
        log_prob = ppo_ops.logprob(model(window[:, :-1]), window[:, 1:])
        loss = -log_prob.mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == STEPS - 1:
            print(f"step {step:4d}   loss {loss.item():.3f} nats a byte")


def frequencies(corpus: Tensor) -> Tensor:
    return corpus.bincount(minlength=256) / len(corpus)


def largest_error(ours: Tensor, truth: Tensor) -> float:
    return (ours.double() - truth.double()).abs().max().item()


def main() -> int:
    torch.manual_seed(0)
    text = repository_text()
    if HELD_OUT not in text:
        print(f"the held-out sentence is not in the README: {HELD_OUT!r}")
        return 1
    corpus = to_bytes(text.replace(HELD_OUT, ""))
    print(f"{len(corpus)} bytes of README and docstrings, without: {HELD_OUT!r}")

    start = time.perf_counter()
    model = ByteModel()
    train(model, corpus)
    print(f"trained in {time.perf_counter() - start:.1f} s\n")

    sentence = to_bytes(" " + HELD_OUT)
    logits = model(sentence[None, :-1])[0].detach().requires_grad_()
    target = sentence[1:]
    log_prob, entropy = ppo_ops.logprob_entropy(logits, target)
    upstream = torch.linspace(-1.0, 1.0, len(target))
    (grad,) = torch.autograd.grad((log_prob * upstream + 0.01 * entropy).sum(), logits)

    exact_logits = logits.detach().double().requires_grad_()
    exact_log_prob, exact_entropy = reference.logprob_entropy(exact_logits, target)
    exact_loss = (exact_log_prob * upstream + 0.01 * exact_entropy).sum()
    (exact_grad,) = torch.autograd.grad(exact_loss, exact_logits)

    print("byte  log_prob  entropy   (nats)")
    for byte, lp, h in list(zip(HELD_OUT, log_prob.tolist(), entropy.tolist(), strict=True))[:20]:
        print(f"{byte!r:5} {lp:8.3f} {h:8.3f}")
    perplexity = math.exp(-log_prob.mean().item())
    from_frequencies = math.exp(-frequencies(corpus)[target].log().mean().item())
    print(f"...  {len(target)} bytes in all")
    print(f"mean log_prob {log_prob.mean():.4f}   mean entropy {entropy.mean():.4f}")
    print(f"perplexity {perplexity:.2f}; from the frequencies of single bytes {from_frequencies:.2f}")

    errors = {
        "log_prob": (largest_error(log_prob, exact_log_prob), OUTPUT_TOLERANCE),
        "entropy": (largest_error(entropy, exact_entropy), OUTPUT_TOLERANCE),
        "gradient": (largest_error(grad, exact_grad), GRADIENT_TOLERANCE),
    }
    print()
    for name, (error, tolerance) in errors.items():
        print(f"{name}: largest difference from the float64 reference {error:.1e} (allowed {tolerance:.0e})")
    # A model that has learned how bytes follow each other does far better than one that knows only their frequencies.
    learned = perplexity < from_frequencies / 2
    ok = learned and all(error <= tolerance for error, tolerance in errors.values())
    print("OK" if ok else "FAILED")
    return 0 if ok else 1


if __name__ == "__main__":
    torch.set_num_threads(1)  # a network this small gains little from more
    sys.exit(main())
