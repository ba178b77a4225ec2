"""The law of the probability filters, and of min_new_tokens, against slow references written from their definitions."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_server.engine.sampling.filters import apply_min_new_tokens, filter_probs, stop_token_table

ALL = 1 << 30
COMBINATIONS = list(product([0.5, 1.0, 2.0], [1, 2, 7, ALL], [0.3, 0.7, 0.95, 1.0], [0.0, 0.1, 0.6, 1.0]))
TEMPERATURES, *FILTERS = (torch.tensor(column) for column in zip(*COMBINATIONS, strict=True))


def kept(row: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The tokens that stay, from the definition: [vocab] bool."""
    if top_k == 1:
        return np.arange(len(row)) == row.argmax()
    more_probable = row[None, :] > row[:, None]
    mass = (more_probable * row.astype(np.float64)).sum(1)
    in_top_p = mass < np.float32(top_p) if top_p < 1 else True
    return (more_probable.sum(1) < top_k) & in_top_p & (row >= row.max() * np.float32(min_p))


def upstream_plain_cpu(row: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The tokens that upstream's plain decoding on a CPU may draw: by sort order, and the mass before may be top_p.

    With top_p = 1 it may lose tokens from the tail, where the mass before is above one by rounding; that is left out.
    """
    order = np.argsort(-row, kind="stable")
    before = np.concatenate([[0.0], row[order].astype(np.float64).cumsum()[:-1]])
    stays = np.zeros(len(row), dtype=bool)
    stays[order] = (
        (np.arange(len(row)) < top_k)
        & ((before <= top_p) | (top_p == 1))
        & (row[order] >= row.max() * np.float32(min_p))
    )
    return stays


def logits(kind: str, vocab: int) -> torch.Tensor:
    """One row for each combination: [combinations, vocab]. "tied" has many equal logits, as bf16 has."""
    drawn = torch.randn(len(COMBINATIONS), vocab, generator=torch.Generator().manual_seed(vocab))
    return {"peaked": drawn * 4, "flat": drawn / 4, "tied": (drawn * 2).round(), "uniform": drawn * 0}[kind]


# Beyond 64 tokens the first ranks may not suffice, beyond 512 not the next ones either.
@pytest.mark.parametrize("vocab", [2, 5, 100, 600])
@pytest.mark.parametrize("kind", ["peaked", "flat", "tied", "uniform"])
def test_every_combination_keeps_what_the_definition_says(kind: str, vocab: int) -> None:
    probs = (logits(kind, vocab) / TEMPERATURES[:, None]).softmax(-1)
    filtered = filter_probs(probs, *FILTERS)
    for row, result, (_, *values) in zip(probs.numpy(), filtered.numpy(), COMBINATIONS, strict=True):
        stays = kept(row, *values)
        assert ((result > 0) == stays).all(), values
        np.testing.assert_allclose(result, np.where(stays, row, 0) / row[stays].sum(), rtol=1e-5)
        if kind in {"peaked", "flat"}:  # no two tokens are equally probable
            assert (stays == upstream_plain_cpu(row, *values)).all(), values


@pytest.mark.parametrize(
    ("probs", "top_k", "top_p", "min_p", "expected"),
    [
        ([0.25, 0.25, 0.25, 0.25], 2, 1.0, 0.0, [0.25, 0.25, 0.25, 0.25]),  # equals stay together
        ([0.5, 0.125, 0.25, 0.125], 3, 1.0, 0.0, [0.5, 0.125, 0.25, 0.125]),
        ([0.25, 0.5, 0.25, 0.0], 2, 0.25, 0.0, [0, 1, 0, 0]),
        ([0.5, 0.25, 0.25, 0.0], ALL, 0.5, 0.0, [1, 0, 0, 0]),  # the mass before is top_p: out
        ([0.5, 0.25, 0.25, 0.0], ALL, 0.5 + 2**-24, 0.0, [0.5, 0.25, 0.25, 0]),
        ([0.5, 0.25, 0.25, 0.0], ALL, 1.0, 0.5, [0.5, 0.25, 0.25, 0]),  # min_p times the largest: in
        ([0.5, 0.25, 0.25, 0.0], ALL, 1.0, 0.5 + 2**-24, [1, 0, 0, 0]),
        ([0.25, 0.375, 0.375, 0.0], 1, 1.0, 0.0, [0, 1, 0, 0]),  # greedy takes the first of equals
        ([0.25, 0.375, 0.375, 0.0], ALL, 1e-6, 0.0, [0, 0.5, 0.5, 0]),
        ([0.25, 0.375, 0.375, 0.0], ALL, 1.0, 1.0, [0, 0.5, 0.5, 0]),
    ],
)
def test_ties_and_bounds(probs: list[float], top_k: int, top_p: float, min_p: float, expected: list[float]) -> None:
    filtered = filter_probs(torch.tensor([probs]), torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
    assert filtered.tolist() == [expected]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    probs = logits("peaked", 100).softmax(-1)
    together = filter_probs(probs, *FILTERS)
    for i in range(0, len(COMBINATIONS), 7):
        assert torch.equal(
            together[i : i + 1], filter_probs(probs[i : i + 1], *(column[i : i + 1] for column in FILTERS))
        )


def test_greedy_rows_are_exactly_one_hot_on_argmax() -> None:
    probs = logits("tied", 100).softmax(-1)
    greedy = filter_probs(probs, torch.ones(len(probs), dtype=torch.int32), *FILTERS[1:])
    assert torch.equal(greedy, torch.nn.functional.one_hot(probs.argmax(-1), 100).float())


def test_neutral_values_change_nothing() -> None:
    probs = logits("flat", 100).softmax(-1)
    rows = len(probs)
    neutral = torch.full((rows,), ALL, dtype=torch.int32), torch.ones(rows), torch.zeros(rows)
    assert filter_probs(probs) is probs
    for given_values in product(*[(None, value) for value in neutral]):
        torch.testing.assert_close(filter_probs(probs, *given_values), probs, rtol=1e-6, atol=0)


def test_filtering_leaves_its_argument_alone_and_twice_is_once_without_top_p() -> None:
    probs = logits("peaked", 100).softmax(-1)
    before = probs.clone()
    once = filter_probs(probs, FILTERS[0], None, FILTERS[2])
    torch.testing.assert_close(filter_probs(once, FILTERS[0], None, FILTERS[2]), once, rtol=1e-6, atol=0)
    assert torch.equal(probs, before)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.sets(st.integers(0, 5), max_size=3)), min_size=1, max_size=4),
    st.integers(1, 4),
    st.data(),
)
@settings(deadline=None)
def test_stop_tokens_are_forbidden_after_early_nodes_only(
    requests: list[tuple[int, set[int]]], nodes: int, data: Any
) -> None:
    lens = [[data.draw(st.integers(1, 6)) for _ in range(nodes)] for _ in requests]
    before = torch.randn(len(requests) * nodes, 6)
    after = before.clone()
    minimum, stops = zip(*requests, strict=True)
    apply_min_new_tokens(after, torch.tensor(lens), torch.tensor(minimum), stop_token_table(stops))
    for i, j, token in product(range(len(requests)), range(nodes), range(6)):
        row = i * nodes + j
        forbidden = lens[i][j] < minimum[i] and token in stops[i]
        assert after[row, token] == (float("-inf") if forbidden else before[row, token])
