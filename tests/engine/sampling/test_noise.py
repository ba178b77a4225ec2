"""The noise: Philox by its published answers, Gumbel variates by float64, and the law of what is taken by it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lib.draws import SEEDS, grouped, long_tail, p_of_law, p_of_pairs
from tlt_server.engine.sampling.noise import add_noise, gumbel, gumbel_of, philox

ONES = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
ANSWERS = {  # Random123's kat_vectors
    (7, (0,) * 4, (0,) * 2): "5f6fb709 0d893f64 4f121f81 4f730a48",
    (7, (ONES,) * 4, (ONES,) * 2): "5207ddc2 45165e59 4d8ee751 8c52f662",
    (7, *PI): "4dfccaba 190a87f0 c47362ba b6b5242a",
    (10, (0,) * 4, (0,) * 2): "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    (10, (ONES,) * 4, (ONES,) * 2): "408f276d 41c83b0e a20bc7c6 6d5451fd",
    (10, *PI): "d16cfe09 94fdcceb 5001e420 24126ea1",
}
words = st.integers(0, ONES)
seeds = st.integers(-(2**63), 2**63 - 1) | st.sampled_from(SEEDS)


def take(scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return gumbel(seeds, positions, scores.shape[1]).add_(scores).argmax(-1)


def words_of(high: int, low: int) -> tuple[np.ndarray, np.ndarray]:
    return np.array([high], np.uint64), np.array([low], np.uint64)


@pytest.mark.parametrize("asked", ANSWERS, ids=str)
def test_philox_gives_the_published_answers(asked: tuple) -> None:
    rounds, counter, key = asked
    answer = philox(tuple(map(np.uint64, counter)), tuple(map(np.uint64, key)), rounds)
    assert " ".join(f"{int(word):08x}" for word in answer) == ANSWERS[asked]


def exact(high: int, low: int) -> float:
    """The variate of 64 bits in float64, by the end of the range that is nearer."""
    bits = high << 32 | low
    if bits < 2**63:
        return -np.log(-np.log1p(-(bits + 0.5) / 2**64))
    return -np.log(-np.log((2**64 - bits - 0.5) / 2**64))


BORDERS = [(0, 0), (0, 1), (0, ONES), (1, 0), (ONES, ONES), (ONES, 0), (ONES - 1, ONES)]
MIDDLE = [(2**31 + shift, low) for shift in (-65, -64, -1, 0, 1, 64, 129) for low in (0, ONES)]


@pytest.mark.parametrize("bits", BORDERS + MIDDLE, ids=lambda bits: f"{bits[0]:x}.{bits[1]:x}")
def test_variates_are_exact_at_borders(bits: tuple[int, int]) -> None:
    assert gumbel_of(*words_of(*bits))[0] == pytest.approx(exact(*bits), rel=3e-7, abs=1.5e-7)


@given(words, words)
def test_variates_are_exact(high: int, low: int) -> None:
    (found,) = gumbel_of(*words_of(high, low))
    assert found.dtype == np.float32
    assert found == pytest.approx(exact(high, low), rel=3e-7, abs=1.5e-7)


@given(words, words, words, words)
def test_variates_fall_as_bits_rise(high: int, low: int, other_high: int, other_low: int) -> None:
    (a, b), ulp = gumbel_of(np.array([high, other_high], np.uint64), np.array([low, other_low], np.uint64)), 4e-6
    assert (a - b) * (1 if (high, low) <= (other_high, other_low) else -1) >= -ulp


def test_the_ends_are_those_of_64_bits() -> None:
    assert gumbel_of(*words_of(0, 0))[0] == pytest.approx(65 * np.log(2))
    assert gumbel_of(*words_of(ONES, ONES))[0] == pytest.approx(-np.log(65 * np.log(2)))


@given(seeds, st.integers(0, ONES), st.integers(1, 65))
def test_a_tokens_noise_is_that_of_its_seed_position_and_token(seed: int, position: int, vocab: int) -> None:
    """By the definition, token by token, in plain integers; whatever rows and tokens stand beside it."""
    noise = gumbel(torch.tensor([7, seed]), torch.tensor([7, position]), vocab)
    assert noise.shape == (2, vocab)
    assert noise.dtype == torch.float32
    assert noise.isfinite().all()
    key = tuple(np.uint64(word) for word in (seed % 2**64 % 2**32, seed % 2**64 >> 32))
    token = vocab - 1
    answer = philox(tuple(map(np.uint64, (token // 2, position, 0, 0))), key)
    high, low = answer[:2] if token % 2 == 0 else answer[2:]
    assert noise[1, token] == gumbel_of(*words_of(int(high), int(low)))[0]


def test_a_larger_vocabulary_has_the_same_noise_at_its_beginning() -> None:
    seeds, positions = torch.tensor([5, -5]), torch.tensor([0, 40_000])
    assert torch.equal(gumbel(seeds, positions, 151_936)[:, :32_001], gumbel(seeds, positions, 32_001))


@pytest.mark.parametrize("rows_each", [1, 3])
@pytest.mark.parametrize("tokens", [None, torch.tensor([4, 0, 9, 8])], ids=["all", "mapped"])
def test_noise_is_added_to_scaled_logits(rows_each: int, tokens: torch.Tensor | None) -> None:
    seeds, inverse, scales = torch.tensor([3, -3]), torch.tensor([0.5, 2.0]), torch.tensor([1.0, 0.0])
    positions = torch.arange(2 * rows_each) + 10
    given = torch.randn(2 * rows_each, 4, generator=torch.Generator().manual_seed(1))
    logits = add_noise(given, seeds, positions, inverse, scales, tokens, rows_each=rows_each)
    for row in range(2 * rows_each):
        request = row // rows_each
        for column in range(4):
            token = column if tokens is None else int(tokens[column])
            noise = gumbel(seeds[request, None], positions[row, None], 10)[0, token]
            wanted = given[row, column] * inverse[request] + noise * scales[request]
            assert logits[row, column] == pytest.approx(float(wanted), abs=1e-6)
    assert torch.equal(logits[rows_each:], given[rows_each:] * 2)


@pytest.mark.slow
@pytest.mark.parametrize(("vocab", "draws", "rows"), [(64, 1_000_000, 1000), (150_001, 700, 1)])
def test_tokens_are_drawn_by_their_law(vocab: int, draws: int, rows: int) -> None:
    assert p_of_law(take, long_tail(vocab), draws, rows=rows) > 0.001


@pytest.mark.parametrize("wrong", ["one word", "no noise", "half"])
def test_the_tests_of_the_law_fail_where_noise_is_wrong(wrong: str) -> None:
    def take_wrong(scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        noise = gumbel(seeds, positions, scores.shape[1])
        if wrong == "one word":  # two neighbours with the same noise
            noise[:, 1::2] = noise[:, ::2]
        return (scores + noise * {"one word": 1.0, "no noise": 0.0, "half": 0.9}[wrong]).argmax(-1)

    assert p_of_law(take_wrong, long_tail(64), 20_000) < 1e-6


@pytest.mark.parametrize(("seed_step", "position_step"), [(0, 1), (0, 1000), (1, 0), (1, 1), (-1, 1), (2**32, 0)])
def test_draws_of_neighbouring_seeds_and_positions_are_independent(seed_step: int, position_step: int) -> None:
    assert p_of_pairs(take, 100_000, seed_step, position_step) > 0.001


def test_pairs_that_are_not_independent_are_found() -> None:
    def take_half(scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return take(scores, seeds, positions // 2)

    assert p_of_pairs(take_half, 10_000, 0, 1) < 1e-6


@given(st.integers(1, 2000), st.integers(10, 10**7))
def test_groups_hold_the_whole_law(vocab: int, draws: int) -> None:
    law = long_tail(vocab)
    groups, masses = grouped(law, draws)
    assert float(masses.sum()) == pytest.approx(1)
    assert torch.equal(groups.unique(), torch.arange(len(masses)))
    assert (masses[:-1] * draws >= 5).all()
    common = law * draws >= 5
    assert groups[common].unique().numel() == int(common.sum())
