"""The loss against a plain loop over tokens, and its gradient where it is known."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tlt_grpo.loss import clipped_terms, divergence

LOW, HIGH = 0.2, 0.28


def random_case(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows, width = (int(torch.randint(1, 6, (), generator=generator)) for _ in range(2))
    old = -3 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    new = old + 0.5 * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    advantages = torch.randn(rows, generator=generator, dtype=torch.float64)
    return new, old, advantages, torch.rand(rows, width, generator=generator) < 0.7


@given(st.integers(0, 10_000))
def test_the_terms_are_those_of_a_loop_over_tokens(seed: int) -> None:
    new, old, advantages, counts = random_case(seed)
    objective = clipped = drift = 0.0
    for row in range(len(new)):
        for column in range(new.shape[1]):
            if not counts[row, column]:
                continue
            log_ratio = (new[row, column] - old[row, column]).item()
            ratio, gain = math.exp(log_ratio), advantages[row].item()
            bounded = min(max(ratio, 1 - LOW), 1 + HIGH)
            objective -= min(ratio * gain, bounded * gain)
            clipped += bounded * gain < ratio * gain
            drift += ratio - 1 - log_ratio
    terms = clipped_terms(new, old, advantages, counts, LOW, HIGH)
    assert (terms.objective.item(), terms.clipped.item()) == (pytest.approx(objective), clipped)
    assert terms.drift.item() == pytest.approx(drift)


@given(st.integers(0, 10_000))
def test_at_ratio_one_the_gradient_is_that_of_reinforce(seed: int) -> None:
    _, old, advantages, counts = random_case(seed)
    new = old.clone().requires_grad_()
    clipped_terms(new, old, advantages, counts, LOW, HIGH).objective.backward()
    assert torch.equal(new.grad, -advantages[:, None] * counts)


@pytest.mark.parametrize(
    ("ratio", "advantage", "learns"),
    [(1.3, 1, False), (1.25, 1, True), (0.7, 1, True), (1.3, -1, True), (0.75, -1, False), (0.85, -1, True)],
)
def test_a_token_that_has_moved_far_enough_is_left_alone(ratio: float, advantage: float, learns: bool) -> None:
    new = torch.tensor([[math.log(ratio)]], requires_grad=True)
    old, counts = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    terms = clipped_terms(new, old, torch.tensor([float(advantage)]), counts, LOW, HIGH)
    terms.objective.backward()
    assert (bool(new.grad.any()), bool(terms.clipped)) == (learns, not learns)


def test_the_divergence_is_expected_to_be_the_kl() -> None:
    """Over all tokens of a small vocabulary, each as often as the policy samples it."""
    new, start = torch.tensor([0.6, 0.3, 0.1]).log(), torch.tensor([0.2, 0.3, 0.5]).log()
    everywhere = torch.ones(1, 1, dtype=torch.bool)
    expected = sum(
        p.exp() * divergence(p[None, None], q[None, None], everywhere) for p, q in zip(new, start, strict=True)
    )
    assert expected.item() == pytest.approx((new.exp() * (new - start)).sum().item(), abs=1e-6)
