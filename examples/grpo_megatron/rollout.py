"""The task, and the engine that samples answers to it: top-p, recording what each token was sampled from.

The task is to sort digits: ``" 40319>"`` is to be continued by ``"01349\n"``. Text is bytes, one token each. Ids are
rotated by `ROTATION`, so that of two ranks one owns the digits 0 to 4 and the other 5 to 9: kept sets cross the border.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import ppo_ops

VOCAB_SIZE = 256
ROTATION = 75
IGNORE = -100
MIN_DIGITS, MAX_DIGITS = 3, 5
PROMPT, ANSWER = MAX_DIGITS + 1, MAX_DIGITS + 1  # tokens: "40319>" and "01349\n"


def encode(text: str) -> list[int]:
    return [(byte + ROTATION) % VOCAB_SIZE for byte in text.encode()]


def decode(ids: list[int]) -> str:
    return bytes((i - ROTATION) % VOCAB_SIZE for i in ids).decode("latin-1")


END = encode("\n")[0]


def draw_problems(number: int, generator: torch.Generator) -> tuple[Tensor, list[str]]:
    """Prompts ``[number, PROMPT]`` and their answers."""
    prompts, answers = [], []
    for _ in range(number):
        length = int(torch.randint(MIN_DIGITS, MAX_DIGITS + 1, (), generator=generator))
        digits = "".join(map(str, torch.randint(10, (length,), generator=generator).tolist()))
        prompts.append(encode(f"{digits:>{MAX_DIGITS}}>"))
        answers.append("".join(sorted(digits)) + "\n")
    return torch.tensor(prompts), answers


def draw_demonstrations(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens and targets ``[number, PROMPT + ANSWER - 1]`` for the supervised warm-up."""
    prompts, answers = draw_problems(number, generator)
    padded = torch.tensor([encode(answer.ljust(ANSWER, "\n")) for answer in answers])
    tokens = torch.cat([prompts, padded], dim=1)
    return tokens[:, :-1], _targets(tokens)


def _targets(tokens: Tensor) -> Tensor:
    """What each position is to predict: `IGNORE` within the prompt and behind the answer's end."""
    target = tokens[:, 1:].clone()
    target[:, : PROMPT - 1] = IGNORE
    answer = target[:, PROMPT - 1 :]
    ended_before = (answer == END).cumsum(1) - (answer == END).long() > 0
    answer[ended_before] = IGNORE
    return target


class Rollout(NamedTuple):
    """``B`` sampled sequences, laid out as the model sees them: ``S = PROMPT + ANSWER - 1`` positions each."""

    tokens: Tensor  # [B, S]
    target: Tensor  # [B, S], IGNORE where nothing was sampled
    log_prob: Tensor  # [B, S] of the sampled token in the set it was sampled from
    keep_ids: Tensor  # [M] int32, the sets in row-major order
    keep_offsets: Tensor  # [B S + 1] int64; rows where nothing was sampled are empty
    reward: Tensor  # [B] float32
    example: str


def sample(
    policy: Callable[[Tensor], Tensor],
    problems: tuple[Tensor, list[str]],
    samples: int,
    top_p: float,
    generator: torch.Generator,
    group: dist.ProcessGroup,
) -> Rollout:
    """Samples answers, `samples` neighbours for each problem. Every rank draws the same."""
    prompts, answers = problems
    tokens = prompts.repeat_interleave(samples, 0)
    log_probs, ids, sizes = [], [], []
    for _ in range(ANSWER):
        with torch.no_grad():
            logits = _whole_vocabulary(policy(tokens)[:, -1].contiguous(), group)
        keep_ids, keep_offsets = ppo_ops.top_p_keep_sets(logits, top_p)
        dropped = ~ppo_ops.keep_sets_to_mask(keep_ids, keep_offsets, VOCAB_SIZE)
        log_p = logits.masked_fill(dropped, -torch.inf).log_softmax(-1)
        gumbel = -torch.empty_like(log_p).exponential_(generator=generator).log()
        token = (log_p + gumbel).argmax(-1, keepdim=True)
        log_probs.append(log_p.gather(1, token))
        ids.append(keep_ids)
        sizes.append(keep_offsets.diff())
        tokens = torch.cat([tokens, token], 1)
    target = _targets(tokens)
    sampled = target[:, PROMPT - 1 :] != IGNORE
    log_prob = torch.zeros(target.shape, dtype=log_probs[0].dtype)
    log_prob[:, PROMPT - 1 :] = torch.cat(log_probs, 1).masked_fill(~sampled, 0.0)
    keep_ids, keep_offsets = _row_major(ids, sizes, sampled)
    texts = [decode(row) for row in tokens[:, PROMPT:].tolist()]
    right = [text.startswith(answers[i // samples]) for i, text in enumerate(texts)]
    example = f"{decode(tokens[0, :PROMPT].tolist()).strip()}{texts[0].splitlines()[0]}"
    return Rollout(tokens[:, :-1], target, log_prob, keep_ids, keep_offsets, torch.tensor(right).float(), example)


def _whole_vocabulary(logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Columns of all ranks, as an engine has them: ``[B, V_local]`` -> ``[B, V]``."""
    shards = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(shards, logits, group=group)
    return torch.cat(shards, 1)


def _row_major(ids: list[Tensor], sizes: list[Tensor], sampled: Tensor) -> tuple[Tensor, Tensor]:
    """Sets as recorded, one list a decoding step, -> one list in the order of the rows ``[B, S]``, empty in prompts."""
    batch, steps = sampled.shape
    positions = PROMPT - 1 + steps
    row_of_id = torch.cat(
        [
            (torch.arange(batch) * positions + PROMPT - 1 + step).repeat_interleave(count)
            for step, count in enumerate(sizes)
        ]
    )
    used = torch.cat([sampled[:, step].repeat_interleave(count) for step, count in enumerate(sizes)])
    row_of_id, order = row_of_id[used].sort(stable=True)
    counts = torch.bincount(row_of_id, minlength=batch * positions)
    return torch.cat(ids)[used][order], torch.cat([counts.new_zeros(1), counts.cumsum(0)])
