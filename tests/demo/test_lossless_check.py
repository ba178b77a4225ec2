"""The check must pass what comes from the law, and fail what does not."""

import random
from collections.abc import Sequence

import pytest
import torch

from tlt_server.demo.lossless import REST, Tokens, enumerate_law, greedy_mismatches, p_value

MATRIX = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.25, 0.25, 0.5]])


def markov(sequences: Sequence[Tokens]) -> torch.Tensor:
    return MATRIX[[sequence[-1] for sequence in sequences]]


def draw(count: int, length: int, seed: int, matrix: torch.Tensor = MATRIX) -> list[Tokens]:
    rng = random.Random(seed)
    drawn = []
    for _ in range(count):
        tokens = [0]
        for _ in range(length):
            tokens += rng.choices(range(3), matrix[tokens[-1]].tolist())
        drawn.append(tuple(tokens[1:]))
    return drawn


def test_the_law_is_enumerated() -> None:
    law = enumerate_law(markov, (2, 0), 2, rarest=0.0)
    assert len(law) == 10
    assert law[(1, 2)] == pytest.approx(0.3 * 0.8)
    assert law[REST] == pytest.approx(0, abs=1e-6)


def test_rare_continuations_are_one_outcome() -> None:
    law = enumerate_law(markov, (0,), 3, rarest=0.05)
    assert min(p for each, p in law.items() if each != REST) >= 0.05
    assert sum(law.values()) == pytest.approx(1)


def test_p_values_of_the_law_itself_are_uniform() -> None:
    """Kolmogorov-Smirnov: 200 values stray from uniform by more than 0.138 once in 1,000 times."""
    law = enumerate_law(markov, (0,), 3, rarest=0.01)
    values = sorted(p_value(draw(300, 3, seed), law) for seed in range(200))
    assert max(abs((i + 0.5) / 200 - value) for i, value in enumerate(values)) < 0.138


@pytest.mark.parametrize("moved", [0.15, 0.3])
def test_another_law_is_found_out(moved: float) -> None:
    other = MATRIX.clone()
    other[0] += torch.tensor([-moved, moved, 0.0])
    law = enumerate_law(markov, (0,), 3, rarest=0.001)
    assert p_value(draw(2000, 3, 5, other), law) < 1e-6


def test_the_impossible_is_not_excused() -> None:
    law = enumerate_law(markov, (0,), 1, rarest=0.0)
    assert p_value([*draw(1000, 1, 3), (7,)], law) == 0.0


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="sample more"):
        p_value(draw(4, 3, 1), enumerate_law(markov, (0,), 3, rarest=0.001))


def test_mismatches_are_counted() -> None:
    assert greedy_mismatches([(1, 2), (3,), ()], [(1, 2), (3, 4), ()]) == 1
    with pytest.raises(ValueError, match="shorter"):
        greedy_mismatches([(1,)], [])
