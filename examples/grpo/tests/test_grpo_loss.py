"""The loss against a plain loop over tokens, and its gradient where it is known."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tlt_grpo.learning.loss import clipped_terms, divergence

LOW, HIGH, MOST = 0.2, 0.28, 1.2


def random_case(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 30, (), generator=generator))
    old = -3 * torch.rand(count, generator=generator, dtype=torch.float64)
    new, sampled = (old + 0.5 * torch.randn(count, generator=generator, dtype=torch.float64) for _ in range(2))
    return new, old, sampled, torch.randn(count, generator=generator, dtype=torch.float64)


@given(st.integers(0, 10_000))
def test_the_terms_are_those_of_a_loop_over_tokens(seed: int) -> None:
    new, old, sampled, advantages = random_case(seed)
    objective = clipped = truncated = drift = 0.0
    for token in range(len(new)):
        ratio, gain = math.exp(new[token] - old[token]), advantages[token].item()
        weight, moved = math.exp(old[token] - sampled[token]), (new[token] - sampled[token]).item()
        bounded = min(max(ratio, 1 - LOW), 1 + HIGH)
        objective -= min(weight, MOST) * min(ratio * gain, bounded * gain)
        clipped += bounded * gain < ratio * gain
        truncated += weight > MOST
        drift += math.exp(moved) - 1 - moved
    terms = clipped_terms(new, old, sampled, advantages, LOW, HIGH, MOST)
    assert (terms.objective.item(), terms.clipped.item()) == (pytest.approx(objective), clipped)
    assert (terms.drift.item(), terms.truncated.item()) == (pytest.approx(drift), truncated)


@given(st.integers(0, 10_000))
def test_where_nothing_has_moved_the_gradient_is_that_of_reinforce(seed: int) -> None:
    _, old, _, advantages = random_case(seed)
    new = old.clone().requires_grad_()
    clipped_terms(new, old, old, advantages, LOW, HIGH, MOST).objective.backward()
    assert torch.equal(new.grad, -advantages)


def test_the_correction_makes_another_samplers_tokens_count_as_the_policys_own() -> None:
    """Over all tokens of a small vocabulary, each as often as the server sampled it."""
    old, server = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.4, 0.35, 0.25]).log()
    gains = torch.tensor([1.0, -0.5, 2.0])
    gradients = []
    for law, sampled in ((old, old), (server, server)):
        new = old.clone().requires_grad_()
        for token in range(3):
            one = slice(token, token + 1)
            terms = clipped_terms(new[one], old[one], sampled[one], gains[one], LOW, HIGH, 2.0)
            (law[token].exp() * terms.objective).backward()
        gradients.append(new.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("ratio", "advantage", "learns"),
    [(1.3, 1, False), (1.25, 1, True), (0.7, 1, True), (1.3, -1, True), (0.75, -1, False), (0.85, -1, True)],
)
def test_a_token_that_has_moved_far_enough_is_left_alone(ratio: float, advantage: float, learns: bool) -> None:
    new, old = torch.tensor([math.log(ratio)], requires_grad=True), torch.zeros(1)
    terms = clipped_terms(new, old, old, torch.tensor([float(advantage)]), LOW, HIGH, MOST)
    terms.objective.backward()
    assert (bool(new.grad.any()), bool(terms.clipped)) == (learns, not learns)


def test_the_divergence_is_expected_to_be_the_kl() -> None:
    """Over all tokens of a small vocabulary, each as often as the policy samples it."""
    new, start = torch.tensor([0.6, 0.3, 0.1]).log(), torch.tensor([0.2, 0.3, 0.5]).log()
    expected = sum(p.exp() * divergence(p[None], q[None]) for p, q in zip(new, start, strict=True))
    assert expected.item() == pytest.approx((new.exp() * (new - start)).sum().item(), abs=1e-6)
