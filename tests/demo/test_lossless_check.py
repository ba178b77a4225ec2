"""The check must pass what comes from the law, and fail what does not."""

import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_server.demo.lossless import REST, Tokens, enumerate_law, greedy_mismatches, p_value, surprise_z

MATRIX = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.25, 0.25, 0.5]])


def markov(sequences: Sequence[Tokens]) -> torch.Tensor:
    return MATRIX[[sequence[-1] for sequence in sequences]]


def draw(count: int, length: int, seed: int, matrix: torch.Tensor = MATRIX) -> list[Tokens]:
    rng, rows = random.Random(seed), matrix.tolist()
    drawn = []
    for _ in range(count):
        tokens = [0]
        for _ in range(length):
            tokens += rng.choices(range(3), rows[tokens[-1]])
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


def along(tokens: Tokens, matrix: torch.Tensor = MATRIX) -> torch.Tensor:
    """The logits before each token of a response that begins behind token 0."""
    return matrix[[0, *tokens[:-1]]].log()


def test_surprises_of_the_law_itself_are_standard_normal() -> None:
    """Of responses of any length; 200 values have a mean beyond 0.25 once in 2,000 times, a deviation beyond 0.2."""
    found = torch.tensor(
        [surprise_z((along(each), each) for each in draw(20, 1 + seed % 40, seed)) for seed in range(200)]
    )
    assert abs(float(found.mean())) < 0.25
    assert float(found.std()) == pytest.approx(1, abs=0.2)


@pytest.mark.slow
def test_responses_that_end_where_they_like_are_no_more_surprising() -> None:
    """Each ends behind its first token 1, which is likelier than others to be surprising."""
    ended = [each[: 1 + each.index(1)] for each in draw(3000, 100, 3)]
    assert abs(surprise_z((along(each), each) for each in ended)) < 4


@pytest.mark.slow
@settings(max_examples=20)
@given(st.floats(0.2, 0.5), st.integers(0, 2**32))
def test_tokens_of_another_law_are_surprising(share: float, seed: int) -> None:
    """A share of them is drawn evenly, whatever the law says."""
    other = (1 - share) * MATRIX + share / 3
    drawn = draw(60, 500, seed, other)
    assert abs(surprise_z((along(each), each) for each in drawn)) > 5


def test_tokens_that_the_law_excludes_are_infinitely_surprising() -> None:
    never = torch.tensor([[0.75, 0.25, 0.0]]).log()
    assert surprise_z([(never, (2,)), (never, (1,))]) == math.inf
    # each token is log 3 from the other: the likely one a quarter of that below the entropy, of deviation √3/4 of it
    assert surprise_z([(never, (0,))]) == pytest.approx(-1 / math.sqrt(3))


def test_laws_without_likely_tokens_tell_nothing() -> None:
    with pytest.raises(ValueError, match="tells nothing"):
        surprise_z([(torch.tensor([[0.0, -math.inf], [0.0, 0.0]]), (0, 1))])
