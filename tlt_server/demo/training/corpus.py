"""Token sequences for training: worked solutions in bulk, and batches of sequences of like length."""

import random
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tlt_server.demo.task import DEMO, Task, solve, training_problems
from tlt_server.demo.tokens import END_ID, PAD_ID

CHUNK = 5000


@dataclass(frozen=True)
class Sequence:
    """Prompt and response as token ids, the end token included; the response begins at `prompt_length`."""

    tokens: np.ndarray
    prompt_length: int


def worked_solutions(count: int, seed: int, tokenizer: Tokenizer, processes: int, task: Task = DEMO) -> list[Sequence]:
    """`count` training problems (rounded up to whole chunks), each solved once by the writer of the task."""
    seeds = [seed * 1_000_003 + chunk for chunk in range(-(-count // CHUNK))]
    work = partial(_solve_chunk, tokenizer=tokenizer.to_str(), task=task)
    if processes == 1:
        chunks = [work(chunk) for chunk in seeds]
    else:
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            chunks = list(pool.map(work, seeds))
    return [sequence for chunk in chunks for sequence in chunk]


def _solve_chunk(seed: int, tokenizer: str, task: Task) -> list[Sequence]:
    encoder, rng = Tokenizer.from_str(tokenizer), random.Random(seed)
    drawn = training_problems(CHUNK, seed, task)
    prompts = encoder.encode_batch([problem.prompt for problem in drawn])
    responses = encoder.encode_batch([solve(problem, rng, task) for problem in drawn])
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
        groups = cut(lengths[order], tokens)
        for group in rng.permutation(len(groups)):
            first, last = groups[group]
            yield [sequences[index] for index in order[first:last]]


def contexts(sequences: list[Sequence], lengths: Mapping[int, int], tokens: int, seed: int) -> Iterator[list[Sequence]]:
    """Batches of `tokens` tokens for long positions: solved problems one after another, without end, in random order.

    lengths: of a batch's sequences, and how often they are so long; each divides `tokens`. A sequence is cut at its
    length; but for its first prompt, prompts are learned like responses: they are a few in a hundred tokens.
    """
    rng, order = np.random.default_rng(seed), np.empty(0, int)
    shares = np.array(list(lengths.values())) / sum(lengths.values())
    while True:
        length, batch = int(rng.choice(list(lengths), p=shares)), list[Sequence]()
        while len(batch) < tokens // length:
            taken, size = list[Sequence](), 0
            while size < length:
                if not len(order):
                    order = rng.permutation(len(sequences))
                taken.append(sequences[order[-1]])
                order, size = order[:-1], size + len(taken[-1].tokens)
            batch.append(Sequence(np.concatenate([one.tokens for one in taken])[:length], taken[0].prompt_length))
        yield batch


def cut(lengths: np.ndarray, tokens: int) -> list[tuple[int, int]]:
    """Ranges of nearly sorted `lengths` whose padded size stays within `tokens` (a single sequence always fits)."""
    ranges, first, longest = [], 0, 0
    for index, length in enumerate(lengths):
        longest = max(longest, int(length))
        if index > first and longest * (index + 1 - first) > tokens:
            ranges.append((first, index))
            first, longest = index, int(length)
    return [*ranges, (first, len(lengths))]
