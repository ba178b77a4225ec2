"""The expected accept length against enumeration of every draft that a small vocabulary allows."""

from copy import deepcopy
from dataclasses import replace
from itertools import pairwise, product
from random import Random

import pytest
import torch
from torch import Tensor

from tests.trainer.models import config, embedded, from_nothing, frozen, one_chain, rollouts
from tlt_server.drafter.hits import SHARPNESS
from tlt_server.engine.sampling.noise import gumbel
from tlt_server.trainer.learn.chains import Frozen, drafter_law, target_law
from tlt_server.trainer.learn.network import Network, network
from tlt_server.trainer.learn.packing import Run, join, pack
from tlt_server.trainer.publish.gate import (
    Judged,
    Policy,
    Sum,
    accept_length,
    by_position,
    by_request,
    chain_reach,
    mean,
    sure_gain,
)

VOCAB, HIDDEN, DEPTH = 4, 8, 3
SIZES = {"hidden_size": HIDDEN, "intermediate_size": 8, "vocab_size": VOCAB, "head_dim": 4}
BEFORE = (3, 1)


@pytest.fixture(params=[None, 3], ids=["all", "part"])
def drafter(request: pytest.FixtureRequest) -> Network:
    """Over all of the vocabulary, or over its last three tokens."""
    torch.manual_seed(1)
    made = network(config("eagle3") | SIZES | {"draft_vocab_size": request.param})
    if request.param:
        made.d2t.fill_(1)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.7)
    return made.requires_grad_(False)


@pytest.fixture
def shared() -> Frozen:
    torch.manual_seed(2)
    return Frozen(torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN))


STATES = torch.randn(VOCAB, 4 * HIDDEN, generator=torch.Generator().manual_seed(3))


def run_of(tokens: tuple[int, ...]) -> Run:
    """Of a target whose law depends on the last token alone."""
    states = STATES[list(tokens)]
    return Run(torch.tensor(tokens), states[:, HIDDEN:], states[:, :HIDDEN])


PATHS = tuple(product(range(VOCAB), repeat=DEPTH))
TEMPERATURE = 0.8


def laws(drafter: Network, shared: Frozen, path: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The target's and the drafter's laws [DEPTH, V] along `path`, each step's after the tokens before it."""
    run = run_of((*BEFORE, *path))
    reads = torch.stack(one_chain(drafter, shared, run, 0, DEPTH))
    return target_law(shared, run.finals[1 : DEPTH + 1], TEMPERATURE), drafter_law(drafter, shared, reads, TEMPERATURE)


def simulated(p: Tensor, q: Tensor, beta: float, rounds: int) -> float:
    """Mean accept length of chains that are drafted and verified, by the servers' noise, where p and q
    [V^DEPTH, DEPTH, V] are the laws along each of PATHS."""
    seeds, path = torch.arange(rounds), torch.zeros(rounds, dtype=torch.long)
    accepted, length = torch.ones(rounds, dtype=torch.bool), torch.ones(rounds)
    for depth in range(DEPTH):
        noise = gumbel(seeds, torch.full((rounds,), depth), VOCAB)
        taken, proposed = (
            (noise * scale + law[path, depth].log()).argmax(-1) for law, scale in ((p, 1), (q, 1 / beta))
        )
        accepted &= taken == proposed
        length += accepted
        path += taken * VOCAB ** (DEPTH - 1 - depth)
    return length.mean().item()


@pytest.mark.slow
def test_it_expects_what_is_accepted_on_average(drafter: Network, shared: Frozen) -> None:
    """Its mean over all that the target may take, against chains that are verified with noise."""
    p, q = (torch.stack(each) for each in zip(*(laws(drafter, shared, path) for path in PATHS), strict=True))
    expected = torch.zeros(len(SHARPNESS), dtype=torch.float64)
    for path, law in zip(PATHS, p, strict=True):
        at, reached = chain_reach(drafter, shared, join([run_of((*BEFORE, *path))]), DEPTH, TEMPERATURE)
        assert at.tolist() == [0]
        expected += law.gather(1, torch.tensor(path)[:, None]).prod() * (1 + reached[0].sum(0))
    rounds = 100_000
    for beta, each in zip(SHARPNESS, expected.tolist(), strict=True):
        assert each == pytest.approx(simulated(p, q, beta, rounds), abs=4.5 * DEPTH / 2 / rounds**0.5)
    assert 1.05 < expected.min() < expected.max() < DEPTH + 1


@pytest.mark.slow
def test_the_embedded_drafters_are_better_than_untrained_ones() -> None:
    """On rollouts that are cut at 128 tokens: 3.94 and 3.92 of 4."""
    for kind in ("eagle", "eagle3"):
        packs = pack(rollouts(kind), 1024, torch.device("cpu"))
        trained, untrained = (accept_length(each, frozen(), packs, 3) for each in (embedded(kind), from_nothing(kind)))
        assert trained > 3.7
        assert untrained < 1.3


@pytest.mark.slow
def test_runs_too_short_to_judge_by_are_named() -> None:
    with pytest.raises(ValueError, match="no run of 5 tokens"):
        accept_length(embedded("eagle"), frozen(), pack(rollouts("eagle")[:0], 64, torch.device("cpu")), 3)


@pytest.mark.parametrize(
    ("candidate", "live", "surely", "requests", "moved", "steps", "published"),
    [
        (3.0, 3.0, 0.0, 9, True, 9999, False),
        (2.9, 3.0, -0.1, 9, True, 9999, False),
        (float("nan"), 3.0, float("nan"), 9, True, 9999, False),
        (3.001, 3.0, 1e-4, 9, False, 10, False),
        (3.001, 3.0, 1e-4, 9, True, 10, True),
        (3.001, 3.0, 1e-4, 9, False, 100, True),
        (3.001, 3.0, -1e-4, 9, True, 9999, False),
        (3.031, 3.0, 1e-4, 9, False, 10, True),
        (3.5, 3.0, -1e-4, 9, True, 9999, False),
        (3.5, 3.0, 0.1, 3, True, 99, False),
        (3.5, 3.0, 0.1, 3, True, 100, True),
        (1.5, 1.0, 0.3, 9, False, 0, True),
        (1.19, 1.0, 0.1, 9, True, 9999, False),
    ],
)
def test_policy(
    candidate: float, live: float, surely: float, requests: int, moved: bool, steps: int, published: bool
) -> None:
    judged = Judged(candidate, live, surely, requests)
    reason = Policy(margin=0.01, every=100).reason(judged, target_moved=moved, steps=steps)
    assert (reason is not None) == published
    assert reason is None or f"{live:.3f} -> {candidate:.3f}" in reason


@pytest.mark.slow
def test_what_is_judged_is_told_by_request() -> None:
    several = [replace(run, request=str(number // 2)) for number, run in enumerate(rollouts("eagle")[:6])]
    sums = by_request(embedded("eagle"), frozen(), pack(several, 1024, torch.device("cpu")), 3)
    assert set(sums) == {"0", "1", "2"}
    shares = by_position(sums)
    assert mean(sums) == pytest.approx(1 + sum(shares))
    assert len(shares) == 3
    assert 1 > shares[0] > shares[1] > shares[2] > 0
    for number in range(3):
        alone = pack(several[2 * number : 2 * number + 2], 1024, torch.device("cpu"))
        assert mean({"": sums[str(number)]}) == pytest.approx(accept_length(embedded("eagle"), frozen(), alone, 3))
    assert mean(sums) == pytest.approx(
        accept_length(embedded("eagle"), frozen(), pack(several, 1024, torch.device("cpu")), 3)
    )


def test_a_gain_that_is_sure_is_seldom_none() -> None:
    """Of two drafters that are equally good, on requests that they find more or less hard than the other does."""
    draw, sure = Random(5), 0
    for _ in range(400):
        other = {str(n): Sum(50, 50 * draw.uniform(1.5, 3.5)) for n in range(24)}
        candidate = {n: Sum(50, each.total + 50 * draw.gauss(0, 0.3)) for n, each in other.items()}
        sure += sure_gain(candidate, other) > 0
    assert sure / 400 < 0.1  # 0.05, were there many requests
    better = {n: Sum(50, each.total * 1.1) for n, each in other.items()}
    assert sure_gain(better, other) == pytest.approx(0.1)
    assert sure_gain(other, other) == 0


def spoilt(drafter: Network, strength: float, seed: int) -> Network:
    made, draw = deepcopy(drafter), torch.Generator().manual_seed(seed)
    for weight in made.parameters():
        weight.add_(strength * torch.randn(weight.shape, generator=draw))
    return made


@pytest.mark.slow
def test_a_drafter_that_is_worse_seldom_looks_surely_better(drafter: Network, shared: Frozen) -> None:
    """Of two that are nearly as good, the worse one is the candidate; each judgement draws some of all requests."""
    draw = torch.Generator().manual_seed(6)
    law = target_law(shared, STATES[:, :HIDDEN])
    said = torch.randint(VOCAB, (200, 1), generator=draw)
    for _ in range(20):
        said = torch.cat((said, torch.multinomial(law[said[:, -1]], 1, generator=draw)), 1)
    runs = [replace(run_of(tuple(each)), request=str(n)) for n, each in enumerate(said.tolist())]
    packs = pack(runs, 256, torch.device("cpu"))
    several = sorted((by_request(spoilt(drafter, 0.1, seed), shared, packs, DEPTH) for seed in range(10)), key=mean)
    worse, better = min(pairwise(several), key=lambda two: mean(two[1]) - mean(two[0]))
    assert mean(worse) < mean(better) < 1.01 * mean(worse)
    published = 0
    for _ in range(200):
        some = {str(n): str(which) for n, which in enumerate(torch.randint(200, (16,), generator=draw).tolist())}
        mine, others = ({n: of[which] for n, which in some.items()} for of in (worse, better))
        published += sure_gain(mine, others) > 0
    assert published / 200 < 0.1  # 0.05, were they equally good and the requests many
