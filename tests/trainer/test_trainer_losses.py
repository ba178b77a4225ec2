"""Losses against plain references: formulas in loops, and chains drafted one after another as a server drafts them."""

import math

import pytest
import torch
from torch import Tensor

from tests.trainer.models import config, embedded, frozen, one_chain, run_of
from tlt_server.trainer.learn import losses
from tlt_server.trainer.learn.chains import draft, drafter_logits, target_law
from tlt_server.trainer.learn.losses import (
    EAGLE,
    EAGLE3,
    HASS,
    Objective,
    cross_entropy,
    loss,
    smooth_l1,
    total_variation,
)
from tlt_server.trainer.learn.network import Network, network
from tlt_server.trainer.learn.packing import Run, join

TV = Objective(steps=2, token_loss="total_variation")


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 5, generator=generator), torch.randn(3, 5, generator=generator).softmax(-1)


def test_cross_entropy() -> None:
    logits, law = rows()
    for got, row, p in zip(cross_entropy(logits, law), logits.tolist(), law.tolist(), strict=True):
        total = sum(math.exp(each) for each in row)
        assert got.item() == pytest.approx(-sum(w * math.log(math.exp(x) / total) for w, x in zip(p, row, strict=True)))


def test_total_variation_is_half_the_sum_of_differences() -> None:
    logits, law = rows()
    for got, row, p in zip(total_variation(logits, law), logits.softmax(-1).tolist(), law.tolist(), strict=True):
        assert got.item() == pytest.approx(sum(abs(a - b) for a, b in zip(row, p, strict=True)) / 2, abs=1e-6)


def test_smooth_l1() -> None:
    state, wanted = torch.tensor([[0.5, -3.0], [1.0, 0.0]]), torch.zeros(2, 2)
    assert smooth_l1(state, wanted).tolist() == [(0.125 + 2.5) / 2, (0.5 + 0.0) / 2]


def plain_loss(drafter: Network, run: Run, objective: Objective, vocabulary: Tensor) -> float:
    head = frozen().head if drafter.own_head is None else drafter.own_head
    sums, counts = [0.0] * objective.steps, [0] * objective.steps
    for start in range(run.prompt - 1, run.entries):
        for step, read in enumerate(
            one_chain(drafter, frozen(), run, start, min(objective.steps, run.entries - start))
        ):
            final = run.finals[start + step + 1]
            p, q = (frozen().head @ final).softmax(-1)[vocabulary], (head @ read).softmax(-1)
            if objective.token_loss == "total_variation":
                token = 1 - sum(min(a, b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
            else:
                token = -(p * q.log()).sum().item()
            distance = (read - final).abs()
            state = torch.where(distance < 1, distance**2 / 2, distance - 0.5).mean().item()
            sums[step] += objective.token * token + objective.state * state
            counts[step] += 1
    weights = [objective.decay**step for step in range(objective.steps)]
    return sum(w * s / n for w, s, n in zip(weights, sums, counts, strict=True)) / sum(weights)


@pytest.mark.parametrize(
    ("kind", "objective"), [("eagle", EAGLE), ("eagle", HASS), ("eagle", TV), ("eagle3", EAGLE3), ("eagle3", TV)]
)
@torch.no_grad()
def test_loss_is_that_of_chains_drafted_alone(kind: str, objective: Objective, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LOGITS", 5 * 295)  # several portions, the last not full
    run = run_of(torch.randint(2, 290, (13,), generator=torch.Generator().manual_seed(3)), prompt=3, kind=kind)
    drafter = embedded(kind)
    wanted = plain_loss(drafter, run, objective, torch.arange(295))
    assert loss(drafter, frozen(), join([run]), objective).item() == pytest.approx(wanted, rel=1e-4)


@pytest.fixture
def narrow() -> Network:
    """An EAGLE-3 drafter that knows 40 tokens."""
    torch.manual_seed(0)
    drafter = network(config("eagle3") | {"draft_vocab_size": 40})
    known = torch.arange(40) * 7 + 2
    drafter.d2t.copy_(known - torch.arange(40))
    drafter.t2d[known] = True
    return drafter


@torch.no_grad()
def test_loss_over_a_part_of_the_vocabulary(narrow: Network) -> None:
    run = run_of(torch.arange(2, 12), prompt=0, kind="eagle3")
    wanted = plain_loss(narrow, Run(run.tokens, run.states, run.finals, prompt=1), EAGLE3, torch.arange(40) * 7 + 2)
    assert loss(narrow, frozen(), join([run]), EAGLE3).item() == pytest.approx(wanted, rel=1e-4)


def test_all_of_a_drafter_learns_and_nothing_of_its_target(narrow: Network) -> None:
    loss(narrow, frozen(), join([run_of(torch.arange(2, 12), 0, "eagle3")]), EAGLE3).backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in narrow.parameters())
    assert frozen().head.grad is frozen().embedding.grad is None


@pytest.mark.parametrize("name", ["whole", "narrow"])
def test_gradients_are_those_of_all_rows_at_once(name: str, narrow: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LOGITS", 4 * 295)  # several portions, the last not full
    drafter, kind, objective = (narrow, "eagle3", TV) if name == "narrow" else (embedded("eagle"), "eagle", HASS)
    pack = join([run_of(torch.arange(2, length), prompt=2, kind=kind) for length in (12, 20)])
    wanted = torch.zeros(())
    for step in draft(drafter, frozen(), pack, objective.steps):
        reads, finals = step.reads[step.counts], pack.finals[step.at[step.counts]]
        law = target_law(frozen(), finals)
        law = law if drafter.draft_tokens is None else law[:, drafter.draft_tokens]
        token = losses.TOKEN_LOSSES[objective.token_loss](drafter_logits(drafter, frozen(), reads), law)
        values = objective.token * token + objective.state * smooth_l1(reads, finals)
        wanted = wanted + values.mean() / objective.steps
    weights = list(drafter.parameters())
    value = loss(drafter, frozen(), pack, objective)
    torch.testing.assert_close(value, wanted)
    for got, gradient in zip(*(torch.autograd.grad(x, weights) for x in (value, wanted)), strict=True):
        torch.testing.assert_close(got, gradient, rtol=1e-4, atol=1e-7)


def test_a_pack_in_which_nothing_counts_has_no_loss() -> None:
    drafter = embedded("eagle")
    value = loss(drafter, frozen(), join([run_of(torch.arange(2, 9), prompt=20, kind="eagle")]), HASS)
    value.backward()
    assert value.item() == 0
    assert not any(weight.grad is None or weight.grad.any() for weight in drafter.parameters())
