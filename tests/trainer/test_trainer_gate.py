"""The expected accept length against enumeration of every draft that a small vocabulary allows."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest
import torch
from torch import Tensor

from tests.trainer.models import config, embedded, from_nothing, frozen, one_chain, rollouts
from tlt_server.trainer.learn.chains import Frozen, drafter_law, target_law
from tlt_server.trainer.learn.network import Network, network
from tlt_server.trainer.learn.packing import Run, join, pack
from tlt_server.trainer.publish.gate import Drafts, Judged, Policy, Sum, accept_length, by_request, mean, sure_gain

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


def laws(drafter: Network, shared: Frozen, path: tuple[int, ...], drafts: Drafts) -> tuple[Tensor, Tensor]:
    """The target's and the drafter's laws [DEPTH, V] along `path`, each step's after the tokens before it."""
    run = run_of((*BEFORE, *path))
    reads = torch.stack(one_chain(drafter, shared, run, 0, DEPTH))
    q = drafter_law(drafter, shared, reads, 0.8)
    if drafts == "likeliest":
        q = torch.nn.functional.one_hot(q.argmax(-1), VOCAB).float()
    return target_law(shared, run.finals[1 : DEPTH + 1], 0.8), q


@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["likeliest", "sampled"])
def test_expectation_over_rollouts_is_that_over_drafts(drafter: Network, shared: Frozen, drafts: Drafts) -> None:
    expected, enumerated = 0.0, 1.0
    for path in product(range(VOCAB), repeat=DEPTH):
        p, q = laws(drafter, shared, path, drafts)
        both = torch.minimum(p, q).gather(1, torch.tensor(path)[:, None])[:, 0]
        # a path of k drafts is met VOCAB^(DEPTH - k) times, with each of its continuations
        enumerated += sum(both[:k].prod().item() / VOCAB ** (DEPTH - k) for k in range(1, DEPTH + 1))
        chance = p.gather(1, torch.tensor(path)[:, None])[:-1].prod().item() / VOCAB
        one = join([run_of((*BEFORE, *path[:-1]))])
        expected += chance * accept_length(drafter, shared, [one], DEPTH, temperature=0.8, drafts=drafts)
    assert expected == pytest.approx(enumerated, rel=1e-5)
    assert 1.05 < expected < DEPTH + 1


@pytest.mark.slow
def test_the_embedded_drafters_are_better_than_untrained_ones() -> None:
    """And near what was measured when they were made: 3.2 of 4, on rollouts without a limit of length."""
    for kind in ("eagle", "eagle3"):
        packs = pack(rollouts(kind), 1024, torch.device("cpu"))
        trained, untrained = (accept_length(each, frozen(), packs, 3) for each in (embedded(kind), from_nothing(kind)))
        assert trained > 2.8
        assert untrained < 1.3


def test_runs_too_short_to_judge_by_are_named() -> None:
    with pytest.raises(ValueError, match="no run of 4 tokens"):
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


def test_what_is_judged_is_told_by_request() -> None:
    several = [replace(run, request=str(number // 2)) for number, run in enumerate(rollouts("eagle")[:6])]
    sums = by_request(embedded("eagle"), frozen(), pack(several, 1024, torch.device("cpu")), 3)
    assert set(sums) == {"0", "1", "2"}
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
