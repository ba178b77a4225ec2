"""Arms switched from step to step: no output changes, no count lies, and all ranks switch at once."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from tlt_client import BadRequest, Client, Rollout, SamplingParams, StrategyUpdate
from tlt_client.schemas import Arm, Graphs, SelectionBucket

from tests.server.conftest import ARMS, PROMPTS, SWITCHING
from tlt_server.demo.lossless import Tokens

pytestmark = pytest.mark.server

EVERYWHERE = pytest.mark.parametrize("config", SWITCHING)
ANY_ARM = StrategyUpdate("paper", epsilon=1.0, buckets=(SelectionBucket(1, (*ARMS, None)),))
"""Each step draws its arm, whatever is known."""


@pytest.fixture
def switching(client: Client) -> Client:
    client.set_strategy(ANY_ARM)
    return client


def pulls(client: Client) -> dict[Arm | None, int]:
    selection = client.strategy().selection
    assert selection is not None
    return {each.arm: each.pulls for bucket in selection.buckets for each in bucket.arms}


def staggered(client: Client, lengths: list[int], seed: int) -> list[Rollout]:
    """Each prompt by a request of its own, that begins at a moment of its own."""
    draw = random.Random(seed)
    starts = [draw.random() for _ in PROMPTS]

    def one(place: int) -> Rollout:
        import time

        time.sleep(starts[place])
        sampling = SamplingParams(temperature=0, max_new_tokens=lengths[place])
        return client.generate(PROMPTS[place], sampling, logprobs=True)

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(one, range(len(PROMPTS))))


@EVERYWHERE
def test_no_switch_of_arms_changes_an_output(switching: Client, expected: list[Tokens]) -> None:
    draw = random.Random(5)
    for seed in range(2):
        lengths = [draw.randint(1, 96) for _ in PROMPTS]
        given = staggered(switching, lengths, seed)
        for rollout, whole, length in zip(given, expected, lengths, strict=True):
            assert rollout.tokens == whole[: len(rollout.tokens)]
            assert len(rollout.tokens) == min(length, len(whole))
            assert max(rollout.logprobs or [1]) <= 0
    assert all(pulls(switching).values()), pulls(switching)


@EVERYWHERE
def test_counts_are_those_of_the_arms(switching: Client) -> None:
    """Drafts that were proposed are as many as each pass verified, whatever its arm; others do not count."""
    before = switching.status().counters
    rollouts = switching.generate_batch(PROMPTS, SamplingParams(temperature=1, max_new_tokens=64))
    after = switching.status().counters
    assert after.drafts > before.drafts
    proposed = sum(rollout.spec.proposed_drafts for rollout in rollouts if rollout.spec)
    accepted = sum(rollout.spec.accepted_drafts for rollout in rollouts if rollout.spec)
    assert after.draft_tokens - before.draft_tokens == proposed
    assert after.accepted_tokens - before.accepted_tokens == accepted


ALONE = pytest.mark.parametrize(
    ("config", "arm"), [("eagle-chain", Arm(3, 1, 4)), ("eagle3-tree", Arm(5, 4, 16))], ids=["chain", "tree"]
)


@pytest.fixture(scope="session")
def counts() -> dict[Arm, tuple[int, int]]:
    """What an arm accepts of how many drafts, alone on a server."""
    return {}


@ALONE
def test_an_arm_alone(client: Client, counts: dict[Arm, tuple[int, int]], config: str, arm: Arm) -> None:
    counts[arm] = accepted_and_drafts(client)
    assert min(counts[arm]) > 0


@pytest.mark.parametrize(
    ("config", "arm"), [("eagle-arms", Arm(3, 1, 4)), ("eagle3-arms", Arm(5, 4, 16))], ids=["chain", "tree"]
)
def test_an_arm_accepts_among_others_what_it_does_alone(
    client: Client, counts: dict[Arm, tuple[int, int]], arm: Arm
) -> None:
    """Its candidates come of draft-extend at the width of the widest, after steps of other arms."""
    assert arm in counts, "run test_an_arm_alone with it"
    client.set_strategy(StrategyUpdate("pinned", pinned=arm))
    assert accepted_and_drafts(client) == counts[arm]


def accepted_and_drafts(client: Client) -> tuple[int, int]:
    """Of the same greedy requests wherever it is called."""
    before = client.status().counters
    client.generate_batch(PROMPTS, SamplingParams(temperature=0, max_new_tokens=96, ignore_eos=True))
    after = client.status().counters
    return after.accepted_tokens - before.accepted_tokens, after.drafts - before.drafts


@pytest.mark.server("eagle-arms")
def test_the_bandit_finds_its_way(client: Client) -> None:
    """It decodes, learns and reports; what is asked of it is taken whole or not at all."""
    asked = client.set_strategy(StrategyUpdate("bandit"))
    assert (asked.mode, asked.on, asked.arms) == ("bandit", True, ARMS)
    assert asked.graphs == client.status().graphs == Graphs("pool", 0.0, None, (), (), "no CUDA graphs here")
    client.generate_batch(PROMPTS, SamplingParams(temperature=1, max_new_tokens=96, ignore_eos=True))
    found = client.strategy().selection
    assert found is not None
    assert found.decoded_s > 0
    assert (found.lost, found.unmatched) == (0, 0)
    assert sum(arm.pulls for bucket in found.buckets for arm in bucket.arms) > 20
    assert found.selecting_us is not None
    assert 0 < found.selecting_us < 2000  # tens; the cores of a test are busy
    learned = client.learned()
    client.learn(learned)
    assert client.learned() == learned
    with pytest.raises(BadRequest, match=r"level"):
        client.learn({**learned, "level": []})
    with pytest.raises(BadRequest, match=r"(?s)epsilon 2.*window 0.*was not captured"):
        client.set_strategy(StrategyUpdate("pinned", pinned=Arm(9, 1, 10), epsilon=2, window=0))
    assert client.strategy().mode == "bandit"


@pytest.mark.server("two-ranks")
def test_ranks_switch_arms_together(client: Client) -> None:
    """Were they a step apart, they would wait for each other for ever, or draft differently and end."""
    client.set_strategy(StrategyUpdate("off"))
    sampling = SamplingParams(temperature=0, max_new_tokens=64, ignore_eos=True)
    plain = [rollout.tokens for rollout in client.generate_batch(PROMPTS, sampling)]
    client.set_strategy(ANY_ARM)
    with ThreadPoolExecutor(1) as pool:
        rounds = [pool.submit(client.generate_batch, PROMPTS, sampling) for _ in range(2)]
        while not rounds[-1].done():
            for update in (ANY_ARM, StrategyUpdate("bandit"), StrategyUpdate("off"), ANY_ARM):
                client.set_strategy(update)
    assert all([rollout.tokens for rollout in given.result()] == plain for given in rounds)
    client.set_strategy(ANY_ARM)
    assert [rollout.tokens for rollout in client.generate_batch(PROMPTS, sampling)] == plain
    assert sum(pulls(client).values()) > 10
