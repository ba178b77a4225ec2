"""How often a drafter hits: the formula against the noise that servers draw, and what must hold of any two laws."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tlt_server.drafter.hits import SHARPNESS, hit_probability
from tlt_server.engine.sampling.noise import add_noise, gumbel

ROUNDS = 40_000


@st.composite
def logits(draw: st.DrawFn, laws: int, spread: float = 8.0) -> list[Tensor]:
    """Of so many laws over one vocabulary, [V] each."""
    size = draw(st.integers(2, 40))
    seed = draw(st.integers(0, 2**32))
    scale = draw(st.floats(0, spread))
    return list(scale * torch.randn(laws, size, generator=torch.Generator().manual_seed(seed)))


def of_each(p: Tensor, q: Tensor) -> Tensor:
    """h of every token, whichever is taken: [V, len(SHARPNESS)]."""
    rows = len(p)
    return hit_probability(p.expand(rows, -1), q.expand(rows, -1), torch.arange(rows))


@pytest.mark.parametrize("beta", SHARPNESS)
@pytest.mark.parametrize("near", [0.3, 3.0])
def test_servers_hit_as_often_as_it_says(beta: float, near: float) -> None:
    """By the servers' own noise: whatever the target takes, and whether that was proposed."""
    made = torch.Generator().manual_seed(7)
    target = 1.5 * torch.randn(9, generator=made)
    drafter = target + near * torch.randn(9, generator=made)
    seeds, positions = torch.arange(ROUNDS), torch.full((ROUNDS,), 5)
    taken = gumbel(seeds, positions, 9).add_(target).argmax(-1)
    proposals, scales = drafter.repeat(ROUNDS, 1), torch.full((ROUNDS,), 1 / beta)
    proposals = add_noise(proposals, seeds, positions, torch.ones(ROUNDS), scales, rows_each=1)
    hits = proposals.argmax(-1) == taken
    said = of_each(target.softmax(-1), drafter.softmax(-1))[:, SHARPNESS.index(beta)]
    for token, expected in enumerate(said.tolist()):
        mine = hits[taken == token]
        error = (expected * (1 - expected) / len(mine)) ** 0.5
        assert mine.float().mean().item() == pytest.approx(expected, abs=4.5 * error + 1e-5), token


@given(logits(1))
def test_a_drafter_of_the_targets_law_always_hits(found: list[Tensor]) -> None:
    p = found[0].softmax(-1)
    assert of_each(p, p)[:, 0].numpy() == pytest.approx(1, abs=1e-5)


@given(logits(2))
def test_without_noise_it_hits_where_its_best_is_taken(found: list[Tensor]) -> None:
    p, q = (each.double().softmax(-1) for each in found)
    assume((q == q.max()).sum() == 1)
    said = of_each(p, q)[:, SHARPNESS.index(float("inf"))]
    assert said.numpy() == pytest.approx((q == q.max()).double().numpy(), abs=1e-9)
    assert (p * said).sum().item() == pytest.approx(p[q.argmax()].item(), abs=1e-9)


@given(logits(2))
def test_the_more_alike_two_laws_the_more_it_hits(found: list[Tensor]) -> None:
    """arXiv 2408.07978: with the total variation d, between (1 - d) / (1 + d) and 1 - d; and it is symmetric."""
    p, q = (each.double().softmax(-1) for each in found)
    distance = 1 - torch.minimum(p, q).sum()
    both = p * of_each(p, q)[:, 0]
    assert (1 - distance) / (1 + distance) - 1e-9 <= both.sum() <= 1 - distance + 1e-9
    assert both.numpy() == pytest.approx((q * of_each(q, p)[:, 0]).numpy(), abs=1e-9)


@given(logits(2, spread=300.0))
def test_it_is_a_probability_of_any_laws(found: list[Tensor]) -> None:
    said = of_each(*(each.softmax(-1) for each in found))
    assert ((said >= 0) & (said <= 1 + 1e-5)).all()


@given(logits(2), st.integers(0, 1))
def test_a_token_that_the_drafter_does_not_know_is_never_hit(found: list[Tensor], unknown: int) -> None:
    p, q = (each.softmax(-1) for each in found)
    q[unknown] = 0
    assert (of_each(p, q)[unknown] == 0).all()


def test_one_that_is_sure_of_what_is_sure_always_hits() -> None:
    sure = torch.tensor([0.0, 1.0, 0.0])
    assert (of_each(sure, sure)[1] == 1).all()


def test_a_drafter_that_diverged_is_seen() -> None:
    assert of_each(torch.full((3,), 1 / 3), torch.full((3,), float("nan"))).isnan().all()
