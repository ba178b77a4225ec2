"""One function takes every token: verification says what plain decoding would say one token after the other."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_server.engine.cpu.verification import verify_tree_greedy_cpu
from tlt_server.engine.sampling.choice import choose
from tlt_server.engine.sampling.filters import filter_probs
from tlt_server.engine.sampling.noise import gumbel

VOCAB, ALL = 6, 1 << 30
Tokens = tuple[int, ...]


def info(seeds: list[int], *asked: dict[str, Any]) -> SimpleNamespace:
    """Upstream's `SamplingBatchInfo`, as far as it is read."""
    each = [{"temperature": 1.0, "top_k": ALL, "top_p": 1.0, "min_p": 0.0, **one} for one in asked or [{}] * len(seeds)]
    return SimpleNamespace(
        sampling_seed=torch.tensor(seeds),
        temperatures=torch.tensor([[one["temperature"]] for one in each]),
        top_ks=torch.tensor([one["top_k"] for one in each]),
        top_ps=torch.tensor([one["top_p"] for one in each]),
        min_ps=torch.tensor([one["min_p"] for one in each]),
        is_all_greedy=all(one["top_k"] == 1 for one in each),
        need_top_k_sampling=any(one["top_k"] != ALL for one in each),
        need_top_p_sampling=any(one["top_p"] != 1 for one in each),
        need_min_p_sampling=any(one["min_p"] > 0 for one in each),
    )


def after(prefix: Tokens, salt: int) -> torch.Tensor:
    """The target's logits after a prefix: [VOCAB]."""
    generator = torch.Generator().manual_seed(hash((salt, *prefix)) % (1 << 62))
    return torch.randn(VOCAB, generator=generator) * 2


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Parents, the root's -1, and tokens, of which siblings may share one."""
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, draw(st.integers(2, 8))))]
    return parents, [draw(st.integers(0, VOCAB - 1)) for _ in parents]


asks = st.sampled_from([{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2, "top_p": 0.9}])


@given(trees(), st.integers(-(2**63), 2**63 - 1), st.integers(0, 10_000), asks)
@settings(deadline=None, max_examples=100)
def test_whatever_is_drafted_the_same_is_said(
    tree: tuple[list[int], list[int]], seed: int, start: int, asked: dict[str, Any]
) -> None:
    parents, tokens = tree
    batch = info([seed], asked)
    families = [[node for node, parent in enumerate(parents) if parent == this] for this in range(len(parents))]
    siblings = {elder: younger for family in families for elder, younger in pairwise(family)}
    paths: list[Tokens] = [()]
    for node in range(1, len(parents)):
        paths.append((*paths[parents[node]], tokens[node]))
    positions = torch.tensor([start + len(path) for path in paths])
    wanted = choose(torch.stack([after(path, start) for path in paths]), batch, positions)[None]
    predicts, accepted = torch.zeros(len(parents), dtype=torch.int32), torch.full((1, len(parents)), -1)
    verify_tree_greedy_cpu(
        predicts,
        accepted,
        torch.zeros(1, dtype=torch.int32),
        torch.tensor([tokens]),
        torch.arange(len(parents))[None],
        torch.tensor([[family[0] if family else -1 for family in families]]),
        torch.tensor([[siblings.get(node, -1) for node in range(len(parents))]]),
        wanted,
    )
    said: Tokens = tuple(int(predicts[node]) for node in accepted[0].tolist() if node >= 0)
    plain: Tokens = ()
    for _ in said:
        plain += (int(choose(after(plain, start)[None], batch, torch.tensor([start + len(plain)]))),)
    assert said == plain


def test_neighbours_and_batches_change_nothing() -> None:
    kinds = [{}, {"temperature": 0.3}, {"top_k": 1}, {"top_p": 0.7}, {"top_k": 4, "min_p": 0.1}]
    logits, positions = torch.randn(15, VOCAB, generator=torch.Generator().manual_seed(1)), torch.arange(15) + 90
    together = choose(logits, info([11, 12, 13, 14, 15], *kinds), positions)
    for request, kind in enumerate(kinds):
        rows = slice(3 * request, 3 * request + 3)
        alone = choose(logits[rows], info([11 + request], kind), positions[rows])
        assert together[rows].tolist() == alone.tolist(), kind


@pytest.mark.parametrize("asked", [{}, {"top_k": 3}, {"top_p": 0.75}, {"temperature": 2.0, "min_p": 0.3}])
def test_what_is_drawn_has_the_filtered_law(asked: dict[str, Any]) -> None:
    """Over 20,000 seeds; a share strays by 0.02 with a probability below 1e-6 (Hoeffding)."""
    draws = 20_000
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
    scaled = row / asked.get("temperature", 1.0)
    names = ("top_k", ALL), ("top_p", 1.0), ("min_p", 0.0)
    law = filter_probs(scaled.softmax(-1)[None], *(torch.tensor([asked.get(*name)]) for name in names))[0]
    found = choose(row.expand(draws, -1), info(list(range(draws)), *[asked] * draws), torch.full((draws,), 40))
    shares = torch.bincount(found, minlength=VOCAB) / draws
    assert float((shares - law).abs().max()) < 0.02
    assert not shares[law == 0].any()


def test_logits_are_left_as_they_are() -> None:
    logits = torch.randn(4, VOCAB)
    before = logits.clone()
    choose(logits, info([1, 2], {"top_p": 0.5}, {}), torch.arange(4))
    assert torch.equal(logits, before)


def test_the_noise_is_of_the_position_that_is_filled() -> None:
    flat = torch.zeros(1, VOCAB)
    assert choose(flat, info([5]), torch.tensor([8])) == gumbel(torch.tensor([5]), torch.tensor([9]), VOCAB).argmax()


@pytest.mark.parametrize("row", [[float("nan")] * VOCAB, [float("-inf")] * VOCAB])
def test_a_row_with_nothing_to_take_is_that_requests_alone(row: list[float]) -> None:
    """As on a GPU; the other request's token is what it would have been."""
    free, both = [[0.0] * VOCAB], [[0.0] * VOCAB, row]
    alone, (first, second) = (
        choose(torch.tensor(each), info([1, 2][: len(each)]), torch.arange(len(each))) for each in (free, both)
    )
    assert (first, second) == (alone, 0)


def test_what_is_not_a_number_is_not_taken() -> None:
    row = [float("nan")] * (VOCAB - 1) + [-5.0]
    assert choose(torch.tensor([row]), info([1]), torch.arange(1)) == VOCAB - 1
