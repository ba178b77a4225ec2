"""The law of what is taken by noise: chi-squared tests of many draws, by any implementation of the noisy argmax."""

from collections.abc import Callable, Iterator

import torch

from tlt_server.demo.lossless import p_value

Take = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From scores [rows, vocab] float32, seeds [rows] and positions [rows], both int64, to tokens [rows] int64."""

SEEDS = (0, 1, -1, 2**32, 2**63 - 1, -(2**63), 0x9E3779B97F4A7C15 - 2**64)
"""Neighbours, and those at the borders of words."""
EXPECTED = 5.0


def long_tail(vocab: int, exponent: float = 1.3) -> torch.Tensor:
    """A law that falls as a power of the rank, its tokens in random order: [vocab] float64."""
    law = (torch.arange(vocab, dtype=torch.float64) + 2) ** -exponent
    return law[torch.randperm(vocab, generator=torch.Generator().manual_seed(0))] / law.sum()


def grouped(law: torch.Tensor, draws: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's group, [vocab] int64, and each group's probability: the rare ones together, until 5 are expected."""
    order = law.argsort(descending=True)
    rare_from = int((law * draws >= EXPECTED).sum())
    expected = (law[order[rare_from:]] * draws).cumsum(0)
    groups = torch.empty_like(order)
    groups[order[:rare_from]] = torch.arange(rare_from)
    # Twice what the test asks: a group begins with its first token to cross a multiple of 10, and so keeps 5 or more.
    last = max(0, int(expected[-1:].sum() / (2 * EXPECTED)) - 1)
    groups[order[rare_from:]] = rare_from + (expected / (2 * EXPECTED)).long().clamp(max=last)
    return groups, torch.zeros(int(groups.max()) + 1, dtype=torch.float64).index_add_(0, groups, law)


def draw(take: Take, law: torch.Tensor, draws: int, device: str, rows: int) -> Iterator[torch.Tensor]:
    """Tokens of the law, `rows` at a time: every seed in turn, at positions from 0."""
    scores, seeds = law.log().float().to(device), torch.tensor(SEEDS)
    for at in torch.arange(draws).split(rows):
        keys, positions = (each.to(device) for each in (seeds[at % len(seeds)], at // len(seeds)))
        yield take(scores.expand(len(at), -1), keys, positions).cpu()


def p_of_law(take: Take, law: torch.Tensor, draws: int, device: str = "cpu", rows: int = 512) -> float:
    """The p-value of that many draws from the law, [vocab] float64, its tail included."""
    groups, masses = grouped(law, draws)
    tokens = torch.cat(list(draw(take, law, draws, device, rows)))
    return p_value(((each,) for each in groups[tokens].tolist()), {(i,): p for i, p in enumerate(masses.tolist())})


def p_of_pairs(take: Take, draws: int, seed_step: int, position_step: int, vocab: int = 8) -> float:
    """The p-value of two draws being independent that are that far apart in their seeds and positions."""
    law = long_tail(vocab)
    scores = law.log().float().expand(draws, -1)
    seeds, positions = (
        torch.arange(draws) // 1000 * (1 + abs(seed_step)),
        torch.arange(draws) % 1000 * (1 + position_step),
    )
    first, second = take(scores, seeds, positions), take(scores, seeds + seed_step, positions + position_step)
    joint = {(i, j): float(law[i] * law[j]) for i in range(vocab) for j in range(vocab)}
    return p_value(zip(first.tolist(), second.tolist(), strict=True), joint)
