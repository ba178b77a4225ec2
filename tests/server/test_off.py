"""Speculation turned off and on again while requests run: they notice nothing, and no count lies about it."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from msgspec.structs import replace
from tlt_client import Client, SamplingParams, StrategyUpdate, VersionConflict
from tlt_client.schemas import Arm, SelectionBucket

from tests.server.conftest import DRAFTING, PROMPTS
from tests.server.test_one_sample import asked, check
from tlt_server.demo.lossless import Tokens
from tlt_server.demo.reference import Reference

pytestmark = pytest.mark.server

OFF, ON = StrategyUpdate("off"), StrategyUpdate("pinned")
EVERY_DRAFTER = pytest.mark.parametrize("config", DRAFTING)
STRETCH, LONG = 100, 180
PAST_ENDS = SamplingParams(temperature=0, max_new_tokens=LONG, ignore_eos=True)


@pytest.fixture
def speculating(client: Client) -> Iterator[Client]:
    yield client
    client.set_strategy(ON)


@EVERY_DRAFTER
def test_off_and_on_under_load(speculating: Client, expected: list[Tokens]) -> None:
    """At random moments of greedy streams; logprobs are those of the tokens."""
    client, draw = speculating, random.Random(3)
    sampling = SamplingParams(temperature=0, max_new_tokens=96)
    with ThreadPoolExecutor(1) as pool:
        rounds = [pool.submit(client.generate_batch, PROMPTS, sampling, logprobs=True) for _ in range(3)]
        switches = 0
        while not rounds[-1].done():
            client.set_strategy(draw.choice([OFF, ON]))
            switches += 1
    assert switches > 20
    for answers in rounds:
        assert [rollout.tokens for rollout in answers.result()] == expected
        assert all(max(rollout.logprobs or [1]) <= 0 for rollout in answers.result())
    assert {event.kind for event in client.events()} >= {"speculation_on", "speculation_off"}


@EVERY_DRAFTER
def test_off_is_off(speculating: Client, expected: list[Tokens]) -> None:
    client, sampling = speculating, SamplingParams(temperature=0, max_new_tokens=96)
    before = client.status().counters
    assert not client.set_strategy(OFF).on
    answers = client.generate_batch(PROMPTS, sampling)
    assert [rollout.tokens for rollout in answers] == expected
    assert {rollout.accept_length for rollout in answers} == {None}
    status = client.status()
    assert (status.counters, status.arm) == (before, None)
    assert status.help == "speculation is off: it was asked for"
    assert client.set_strategy(ON) == client.strategy()
    assert client.strategy().on
    (again,) = client.generate_batch(PROMPTS[:1], sampling)
    assert again.tokens == expected[0]
    assert (again.accept_length or 0) > 1.5


@contextmanager
def counted(client: Client) -> Iterator[list[float]]:
    """Afterwards it holds the accept length of what was decoded within, by steps that speculated."""
    found: list[float] = []
    before = client.status().counters
    yield found
    after = client.status().counters
    found.append(1 + (after.accepted_tokens - before.accepted_tokens) / (after.drafts - before.drafts))


@pytest.mark.parametrize(
    ("config", "arm"),
    [*((config, None) for config in DRAFTING), ("eagle-arms", Arm(1, 1, 2)), ("eagle3-arms", Arm(1, 1, 2))],
)
def test_the_drafter_catches_up(speculating: Client, arm: Arm | None) -> None:
    """Steps accept among others that do not speculate what they do alone: half of all are off, at random.

    Chain 1,1,2 reads two tokens at a time, and so has often several times to read.
    """
    arm = arm or speculating.strategy().arms[0]
    alone_by, mixed = StrategyUpdate("pinned", pinned=arm), SelectionBucket(1, (arm, None))
    lengths = []
    for strategy in (alone_by, StrategyUpdate("paper", epsilon=1.0, buckets=(mixed,))):
        speculating.set_strategy(strategy)
        with counted(speculating) as found:
            speculating.generate_batch(PROMPTS, PAST_ENDS)
        lengths += found
    alone, among_others = lengths
    assert among_others > 1 + 0.95 * (alone - 1)


@EVERY_DRAFTER
def test_the_drafter_catches_up_after_a_long_stretch(speculating: Client, reference: Reference) -> None:
    """What follows a hundred plain steps is drafted as if all before had been the prompt."""
    client = speculating
    with ThreadPoolExecutor(1) as pool:
        client.set_strategy(OFF)
        with counted(client) as found:
            others = pool.submit(client.generate_batch, PROMPTS[1:], PAST_ENDS)
            tokens: list[int] = []
            for chunk in client.stream(PROMPTS[0], PAST_ENDS):
                was, tokens = len(tokens), [*tokens, *chunk.tokens]
                if was < STRETCH <= len(tokens):
                    client.set_strategy(ON)
            responses = [tuple(tokens), *(rollout.tokens for rollout in others.result())]
        client.flush_cache(wait_s=5)  # it holds what the drafter never read
        heads = [
            [*reference.tokens(prompt), *response[:STRETCH]]
            for prompt, response in zip(PROMPTS, responses, strict=True)
        ]
        rest = SamplingParams(temperature=0, max_new_tokens=LONG - STRETCH, ignore_eos=True)
        with counted(client) as as_prompts:
            client.generate_batch(heads, rest)
        assert found[0] > 1 + 0.95 * (as_prompts[0] - 1)


@EVERY_DRAFTER
def test_the_drafter_reads_while_a_batch_is_too_large_for_it(speculating: Client, reference: Reference) -> None:
    """The request that outlives the others is drafted as if what it had by then had been its prompt."""
    client, longer = speculating, replace(PAST_ENDS, max_new_tokens=LONG + 120)
    arm = client.strategy().arms[0]
    client.set_strategy(StrategyUpdate("bandit", buckets=(SelectionBucket(1, (arm,)), SelectionBucket(2, (None,)))))
    with counted(client) as found:
        last, *_ = client.generate_batch(PROMPTS[:4], [longer, PAST_ENDS, PAST_ENDS, PAST_ENDS])
    client.flush_cache(wait_s=5)
    head = [*reference.tokens(PROMPTS[0]), *last.tokens[:LONG]]
    with counted(client) as as_prompt:
        client.generate_batch([head], SamplingParams(temperature=0, max_new_tokens=120, ignore_eos=True))
    assert found[0] > 1 + 0.9 * (as_prompt[0] - 1)


@pytest.mark.server("eagle-chain")
def test_off_samples_what_speculation_does(speculating: Client, reference: Reference) -> None:
    """Requests of one kind, which need no filters, and of all kinds in one batch."""
    speculating.set_strategy(OFF)
    prompts, of_all_kinds = asked(24)
    of_one = [SamplingParams(max_new_tokens=60, temperature=1.7, sampling_seed=place) for place in range(24)]
    for params in (of_one, of_all_kinds):
        check(reference, prompts, params, speculating.generate_batch(prompts, params))


@pytest.mark.server("plain")
def test_a_server_without_a_drafter(client: Client) -> None:
    assert not client.strategy().on
    with pytest.raises(VersionConflict, match="without a drafter"):
        client.set_strategy(ON)
