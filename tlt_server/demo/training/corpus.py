"""Token sequences for training: worked solutions in bulk, and batches of sequences of like length."""

import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tlt_server.demo.task import solve, training_problems
from tlt_server.demo.tokens import END_ID, PAD_ID

CHUNK = 5000


@dataclass(frozen=True)
class Sequence:
    """Prompt and response as token ids, the end token included; the response begins at `prompt_length`."""

    tokens: np.ndarray
    prompt_length: int


def worked_solutions(count: int, seed: int, tokenizer: Tokenizer, processes: int) -> list[Sequence]:
    """`count` training problems (rounded up to whole chunks), each solved once by the writer of the task."""
    seeds = [seed * 1_000_003 + chunk for chunk in range(-(-count // CHUNK))]
    work = partial(_solve_chunk, tokenizer=tokenizer.to_str())
    if processes == 1:
        chunks = [work(chunk) for chunk in seeds]
    else:
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            chunks = list(pool.map(work, seeds))
    return [sequence for chunk in chunks for sequence in chunk]


def _solve_chunk(seed: int, tokenizer: str) -> list[Sequence]:
    encoder, rng = Tokenizer.from_str(tokenizer), random.Random(seed)
    drawn = training_problems(CHUNK, seed)
    prompts = encoder.encode_batch([problem.prompt for problem in drawn])
    responses = encoder.encode_batch([solve(problem, rng) for problem in drawn])
    return [
        Sequence(np.array([*prompt.ids, *response.ids, END_ID], dtype=np.int16), len(prompt.ids))
        for prompt, response in zip(prompts, responses, strict=True)
    ]


@dataclass(frozen=True)
class Batch:
    """Sequences padded at the end: tokens [B, T] int64; `is_response` [B, T] is False for prompts and padding."""

    tokens: Tensor
    is_response: Tensor


def collate(sequences: list[Sequence], device: torch.device) -> Batch:
    """Pad `sequences` to the longest of them."""
    width = max(len(sequence.tokens) for sequence in sequences)
    tokens = np.full((len(sequences), width), PAD_ID, dtype=np.int64)
    is_response = np.zeros((len(sequences), width), dtype=bool)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence.tokens)] = sequence.tokens
        is_response[row, sequence.prompt_length : len(sequence.tokens)] = True
    return Batch(torch.from_numpy(tokens).to(device), torch.from_numpy(is_response).to(device))


def batches(sequences: list[Sequence], tokens: int, seed: int) -> Iterator[list[Sequence]]:
    """Batches of at most `tokens` tokens, padding included, without end: each epoch in another order."""
    lengths = np.array([len(sequence.tokens) for sequence in sequences])
    rng = np.random.default_rng(seed)
    while True:
        order = np.argsort(lengths + rng.uniform(0, 16, len(lengths)))
        groups = _cut(lengths[order], tokens)
        for group in rng.permutation(len(groups)):
            first, last = groups[group]
            yield [sequences[index] for index in order[first:last]]


def _cut(lengths: np.ndarray, tokens: int) -> list[tuple[int, int]]:
    """Ranges of nearly sorted `lengths` whose padded size stays within `tokens` (a single sequence always fits)."""
    ranges, first, longest = [], 0, 0
    for index, length in enumerate(lengths):
        longest = max(longest, int(length))
        if index > first and longest * (index + 1 - first) > tokens:
            ranges.append((first, index))
            first, longest = index, int(length)
    return [*ranges, (first, len(lengths))]
