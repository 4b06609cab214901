"""Ways to cut a vocabulary over ranks, and cases cut that way."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.cases import Case

# even      rank r holds the columns r * V_local on, the last ranks are padded with NaN; start and size by default
# uneven    some rank is empty at 4 ranks; `vocab_start` alone
# reversed  the first rank holds the last columns; `vocab_start` and `vocab_size`
# one_rank  the last rank holds everything; `vocab_start` and `vocab_size`
CUTS = ("even", "uneven", "reversed", "one_rank")


def cuts(size: int) -> tuple[str, ...]:
    """Names of the cuts that differ on so many ranks."""
    return CUTS if size > 1 else ("even", "uneven")


def bounds(cut: str, columns: int, size: int) -> list[tuple[int, int]]:
    """First column and end, a rank."""
    if cut == "even":
        width = -(-columns // size)
        edges = [min(rank * width, columns) for rank in range(size + 1)]
    elif cut == "uneven":
        edges = {1: [0], 2: [0, columns // 3], 4: [0, columns // 7, columns // 7, columns // 2]}[size] + [columns]
    elif cut == "reversed":
        edges = [columns * rank // size for rank in range(size + 1)]
    else:
        edges = [0] * size + [columns]
    pieces = list(itertools.pairwise(edges))
    return pieces[::-1] if cut == "reversed" else pieces


class Shard(NamedTuple):
    """One rank's part of a case: the case with fewer columns, and the arguments that say which ones."""

    case: Case
    options: dict[str, Any]


def shard(case: Case, cut: str, rank: int, size: int) -> Shard:
    columns = case.logits.shape[-1]
    start, end = bounds(cut, columns, size)[rank]
    logits, mask = case.logits[..., start:end], case.keep_mask
    if mask is not None:
        mask = mask[..., start:end]
    options: dict[str, Any] = {}
    vocab_size = case.vocab_size
    if cut == "even":
        padding = -(-columns // size) - (end - start)
        if columns % size:
            vocab_size = columns if vocab_size is None else vocab_size
        if padding:
            logits = pad(logits, (0, padding), value=torch.nan)
            mask = None if mask is None else pad(mask, (0, padding), value=True)
    else:
        options["vocab_start"] = start
        if cut != "uneven" and vocab_size is None:
            vocab_size = columns
    return Shard(dataclasses.replace(case, logits=logits, keep_mask=mask, vocab_size=vocab_size), options)


def assemble(case: Case, cut: str, pieces: list[Tensor]) -> Tensor:
    """The whole gradient from that of every rank; the padding's must be 0."""
    columns = case.logits.shape[-1]
    whole = torch.full(case.logits.shape, torch.nan, dtype=case.logits.dtype)
    for piece, (start, end) in zip(pieces, bounds(cut, columns, len(pieces)), strict=True):
        whole[..., start:end] = piece[..., : end - start]
        assert not piece[..., end - start :].any(), "gradient of padding columns"
    return whole
