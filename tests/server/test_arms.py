"""Arms switched from step to step: no output changes, no count lies, and all ranks switch at once."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tlt_client import BadRequest, Client, Rollout, SamplingParams, StrategyUpdate
from tlt_client.schemas import Arm, SelectionBucket

from tests.server.conftest import EAGLE3, PROMPTS, Servers
from tlt_server.demo.lossless import Tokens

pytestmark = pytest.mark.server

ARMS = (Arm(3, 1, 4), Arm(3, 4, 8), Arm(5, 2, 8), Arm(1, 1, 2), Arm(4, 3, 5))
FLAGS = [word for a in ARMS for word in ("--arm", f"{a.num_steps},{a.topk},{a.num_draft_tokens}")]
# prompts of 20 to 60 tokens come in chunks, and a pool that is too small for 16 of them has requests retracted
SERVERS = {
    "eagle": FLAGS,
    "eagle3": [*EAGLE3, *FLAGS],
    "tight": [*FLAGS, "--chunked-prefill-size", "16", "--max-total-tokens", "1000"],
}
ANY_ARM = StrategyUpdate("paper", epsilon=1.0, buckets=(SelectionBucket(1, (*ARMS, None)),))
"""Each step draws its arm, whatever is known."""


@pytest.fixture(params=SERVERS)
def switching(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Client]:
    with Client(servers.get(SERVERS[request.param])) as client:
        client.set_strategy(ANY_ARM)
        yield client


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


def test_no_switch_of_arms_changes_an_output(switching: Client, expected: list[Tokens]) -> None:
    draw = random.Random(5)
    for seed in range(3):
        lengths = [draw.randint(1, 96) for _ in PROMPTS]
        given = staggered(switching, lengths, seed)
        for rollout, whole, length in zip(given, expected, lengths, strict=True):
            assert rollout.tokens == whole[: len(rollout.tokens)]
            assert len(rollout.tokens) == min(length, len(whole))
            assert max(rollout.logprobs or [1]) <= 0
    assert all(pulls(switching).values()), pulls(switching)


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


def test_an_arm_accepts_among_others_what_it_does_alone(servers: Servers) -> None:
    """Its candidates come of draft-extend at the width of the widest, after steps of other arms."""
    sampling = SamplingParams(temperature=0, max_new_tokens=96, ignore_eos=True)
    arms = (Arm(3, 1, 4), Arm(5, 4, 16))
    alone = {}
    for arm in arms:
        with Client(servers.get(["--arm", f"{arm.num_steps},{arm.topk},{arm.num_draft_tokens}"])) as client:
            client.generate_batch(PROMPTS, sampling)
            alone[arm] = client.status().counters
    with Client(servers.get([*FLAGS, "--arm", "5,4,16"])) as client:
        for arm in arms:
            client.set_strategy(StrategyUpdate("pinned", pinned=arm))
            before = client.status().counters
            client.generate_batch(PROMPTS, sampling)
            after = client.status().counters
            accepted, drafts = after.accepted_tokens - before.accepted_tokens, after.drafts - before.drafts
            assert (accepted, drafts) == (alone[arm].accepted_tokens, alone[arm].drafts)


def test_the_bandit_finds_its_way(servers: Servers) -> None:
    """It decodes, learns and reports; what is asked of it is taken whole or not at all."""
    with Client(servers.get(FLAGS)) as client:
        asked = client.set_strategy(StrategyUpdate("bandit"))
        assert (asked.mode, asked.on, asked.arms) == ("bandit", True, ARMS)
        client.generate_batch(PROMPTS, SamplingParams(temperature=1, max_new_tokens=96, ignore_eos=True))
        found = client.strategy().selection
        assert found is not None
        assert found.decoded_s > 0
        assert (found.lost, found.unmatched) == (0, 0)
        assert sum(arm.pulls for bucket in found.buckets for arm in bucket.arms) > 20
        learned = client.learned()
        client.learn(learned)
        assert client.learned() == learned
        with pytest.raises(BadRequest, match=r"hits"):
            client.learn({**learned, "acceptance": {**learned["acceptance"], "hits": []}})
        with pytest.raises(BadRequest, match=r"(?s)epsilon 2.*window 0.*was not captured"):
            client.set_strategy(StrategyUpdate("pinned", pinned=Arm(9, 1, 10), epsilon=2, window=0))
        assert client.strategy().mode == "bandit"


def test_ranks_switch_arms_together(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were they a step apart, they would wait for each other for ever, or draft differently and end."""
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    with Client(servers.get([*FLAGS, "--tp-size", "2"])) as client:
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
    servers.close()
