"""Losses against plain references: formulas in loops, and chains drafted one after another as a server drafts them."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer.models import config, embedded, frozen, one_chain, run_of
from tlt_server.drafter.hits import hit_probability
from tlt_server.trainer.learn import losses
from tlt_server.trainer.learn.chains import draft, drafter_logits, target_law
from tlt_server.trainer.learn.losses import (
    EAGLE,
    EAGLE3,
    HASS,
    LIKELIEST,
    Objective,
    TokenLoss,
    cross_entropy,
    hits,
    likeliest,
    lk,
    lk_hybrid,
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


def most(law: Tensor) -> tuple[Tensor, Tensor]:
    """Chances and tokens."""
    chances, tokens = law.topk(min(LIKELIEST, law.shape[-1]))
    return chances, tokens


def test_cross_entropy() -> None:
    logits, law = rows()
    for got, row, p in zip(cross_entropy(logits, law), logits.tolist(), law.tolist(), strict=True):
        total = sum(math.exp(each) for each in row)
        assert got.item() == pytest.approx(-sum(w * math.log(math.exp(x) / total) for w, x in zip(p, row, strict=True)))


def test_total_variation_is_half_the_sum_of_differences() -> None:
    logits, law = rows()
    for got, row, p in zip(total_variation(logits, law), logits.softmax(-1).tolist(), law.tolist(), strict=True):
        assert got.item() == pytest.approx(sum(abs(a - b) for a, b in zip(row, p, strict=True)) / 2, abs=1e-6)


def plain_token(name: TokenLoss, p: Tensor, q: Tensor, taken: int) -> float:
    """Of one row, by the formulas; p of the drafter's tokens alone."""
    accepted = sum(min(a, b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    entropy = -(p * q.log()).sum().item()
    if name == "hits":
        if taken < 0:
            return 0.0
        ratios = [max(y, p[taken].item() * w / q[taken].item()) for y, w in zip(p.tolist(), q.tolist(), strict=True)]
        return math.log(sum(ratios) + 1 - p.sum().item())
    weight = math.exp(-3 * accepted)
    return {
        "cross_entropy": entropy,
        "total_variation": 1 - accepted,
        "lk": -math.log(accepted),
        "lk_hybrid": weight * entropy + (1 - weight) * (1 - accepted),
    }[name]


def test_lk_is_the_logarithm_of_what_is_accepted_and_the_hybrid_lies_between() -> None:
    logits, law = rows()
    distance = total_variation(logits, law)
    torch.testing.assert_close(lk(logits, law), -(1 - distance).log())
    ends = torch.stack((cross_entropy(logits, law), distance))
    assert ((ends.amin(0) <= (mixed := lk_hybrid(logits, law))) & (mixed <= ends.amax(0))).all()


@given(seed=st.integers(0, 2**31), size=st.integers(2, 12), sharp=st.floats(0.1, 8))
def test_hits_is_what_the_gate_judges_by(seed: int, size: int, sharp: float) -> None:
    """And never negative; none where the laws are one."""
    generator = torch.Generator().manual_seed(seed)
    logits, others = (sharp * torch.randn(4, size, generator=generator) for _ in range(2))
    law, taken = others.softmax(-1), torch.randint(size, (4,), generator=generator)
    wanted = -hit_probability(law, logits.softmax(-1), taken)[:, 0].log()
    torch.testing.assert_close(hits(logits, law, taken), wanted, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(hits(others, law, taken), torch.zeros(4), rtol=0, atol=1e-5)
    assert hits(logits, law, torch.full((4,), -1)).tolist() == [0.0] * 4


def test_the_likeliest_tokens_are_the_targets() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, law = torch.randn(2, 30, generator=generator), torch.randn(2, 30, generator=generator).softmax(-1)
    for got, row, p in zip(likeliest(logits, *most(law)), logits.log_softmax(-1).tolist(), law.tolist(), strict=True):
        assert got.item() == pytest.approx(-sum(w * x for w, x in sorted(zip(p, row, strict=True))[-LIKELIEST:]))
    logits, law = rows()  # fewer tokens than that
    torch.testing.assert_close(likeliest(logits, *most(law)), cross_entropy(logits, law))


@pytest.mark.parametrize("name", get_args(TokenLoss))
def test_gradients_are_finite_however_far_the_drafter_is_off(name: TokenLoss) -> None:
    logits = torch.tensor([[80.0, -80.0, 0.0], [-80.0, 80.0, 0.0]], requires_grad=True)
    value = losses.token_loss(name, logits, torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]), torch.tensor([1, 1]))
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_smooth_l1() -> None:
    state, wanted = torch.tensor([[0.5, -3.0], [1.0, 0.0]]), torch.zeros(2, 2)
    assert smooth_l1(state, wanted).tolist() == [(0.125 + 2.5) / 2, (0.5 + 0.0) / 2]


def plain_loss(drafter: Network, run: Run, objective: Objective, vocabulary: Tensor) -> float:
    head = frozen().head[vocabulary] if drafter.own_head is None else drafter.own_head
    sums, counts = [0.0] * objective.steps, [0] * objective.steps
    for start in range(run.prompt - 1, run.entries):
        for step, read in enumerate(
            one_chain(drafter, frozen(), run, start, min(objective.steps, run.entries - start))
        ):
            final = run.finals[start + step + 1]
            p, q = (frozen().head @ final).softmax(-1)[vocabulary], (head @ read).softmax(-1)
            after = start + step + 2
            known = vocabulary.tolist()
            taken = known.index(said) if after < len(run.tokens) and (said := run.tokens[after].item()) in known else -1
            token = plain_token(objective.token_loss, p, q, taken)
            token += objective.likeliest / objective.token * likeliest(q.log()[None], *most(p[None])).item()
            distance = (read - final).abs()
            state = torch.where(distance < 1, distance**2 / 2, distance - 0.5).mean().item()
            sums[step] += objective.token * token + objective.state * state
            counts[step] += 1
    weights = [objective.decay**step for step in range(objective.steps)]
    return sum(w * s / n for w, s, n in zip(weights, sums, counts, strict=True)) / sum(weights)


@pytest.mark.parametrize(
    ("kind", "objective"),
    [("eagle", EAGLE), ("eagle", HASS), ("eagle3", EAGLE3)]
    + [(kind, replace(TV, token_loss=name)) for kind in ("eagle", "eagle3") for name in get_args(TokenLoss)],
)
@torch.no_grad()
def test_loss_is_that_of_chains_drafted_alone(kind: str, objective: Objective, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LOGITS", 5 * 295)  # several portions, the last not full
    run = run_of(torch.randint(2, 290, (13,), generator=torch.Generator().manual_seed(3)), prompt=3, kind=kind)
    drafter = embedded(kind)
    wanted = plain_loss(drafter, run, objective, torch.arange(295))
    assert loss(drafter, frozen(), join([run]), objective).item() == pytest.approx(wanted, rel=1e-4, abs=1e-6)


@pytest.fixture
def narrow() -> Network:
    """An EAGLE-3 drafter that knows 40 tokens."""
    torch.manual_seed(0)
    drafter = network(config("eagle3") | {"draft_vocab_size": 40})
    known = torch.arange(40) * 7 + 2
    drafter.d2t.copy_(known - torch.arange(40))
    drafter.t2d[known] = True
    return drafter


@pytest.mark.parametrize("name", get_args(TokenLoss))
@torch.no_grad()
def test_loss_over_a_part_of_the_vocabulary(name: TokenLoss, narrow: Network) -> None:
    run, objective = run_of(torch.arange(2, 12), prompt=0, kind="eagle3"), replace(EAGLE3, token_loss=name)
    wanted = plain_loss(narrow, Run(run.tokens, run.states, run.finals, prompt=1), objective, torch.arange(40) * 7 + 2)
    assert loss(narrow, frozen(), join([run]), objective).item() == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_all_of_a_drafter_learns_and_nothing_of_its_target(narrow: Network) -> None:
    loss(narrow, frozen(), join([run_of(torch.arange(2, 12), 0, "eagle3")]), EAGLE3).backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in narrow.parameters())
    assert frozen().head.grad is frozen().embedding.grad is None


@pytest.mark.parametrize("name", get_args(TokenLoss))
@torch.no_grad()
def test_of_a_large_vocabulary_sums_run_over_what_the_target_says_most(
    name: TokenLoss, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "SUMMED", 40)
    run, objective = run_of(torch.arange(2, 12), prompt=0, kind="eagle"), replace(EAGLE, token_loss=name)
    run = Run(run.tokens, run.states, run.finals, prompt=1)
    said = target_law(frozen(), join([run]).finals).sum(0).topk(40).indices
    wanted = plain_loss(embedded("eagle"), run, objective, said)
    assert loss(embedded("eagle"), frozen(), join([run]), objective).item() == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_sums_run_over_all_where_the_vocabulary_is_small_or_no_states_are_learnt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pack = join([run_of(torch.arange(2, 12), prompt=0, kind="eagle")])
    tokens = replace(EAGLE, state=0.0)
    wanted = [loss(embedded("eagle"), frozen(), pack, each) for each in (EAGLE, tokens)]
    for size, objective, value in ((74, EAGLE, wanted[0]), (40, tokens, wanted[1])):
        monkeypatch.setattr(losses, "SUMMED", size)
        torch.testing.assert_close(loss(embedded("eagle"), frozen(), pack, objective), value)


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
        logits, unknown = drafter_logits(drafter, frozen(), reads), torch.full((len(reads),), -1)
        token = losses.token_loss(objective.token_loss, logits, law, unknown)
        values = objective.token * token + objective.state * smooth_l1(reads, finals)
        values = values + objective.likeliest * likeliest(logits, *most(law))
        wanted = wanted + values.mean() / objective.steps
    weights = list(drafter.parameters())
    value = loss(drafter, frozen(), pack, objective)
    torch.testing.assert_close(value, wanted)
    for got, gradient in zip(*(torch.autograd.grad(x, weights) for x in (value, wanted)), strict=True):
        torch.testing.assert_close(got, gradient, rtol=1e-4, atol=1e-6)


def test_a_pack_in_which_nothing_counts_has_no_loss() -> None:
    drafter = embedded("eagle")
    value = loss(drafter, frozen(), join([run_of(torch.arange(2, 9), prompt=20, kind="eagle")]), HASS)
    value.backward()
    assert value.item() == 0
    assert not any(weight.grad is None or weight.grad.any() for weight in drafter.parameters())
