"""Drafts of history: no token is another one, whoever drafts beside it, and what is kept is whose it is said to be."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tlt_client import BadRequest, Client, Rollout, SamplingParams, StrategyUpdate
from tlt_client.schemas import Arm, HistoryLoad, SelectionBucket

from benchmarks.lib.reload.trainer import Trainer
from tests.link.processes import until
from tests.server.conftest import PROMPTS
from tests.server.test_one_sample import KINDS, check
from tests.server.trainer import noisy
from tlt_server.demo import default_paths
from tlt_server.demo.lossless import Tokens
from tlt_server.demo.reference import Reference

pytestmark = pytest.mark.server("history")

SEVEN, THREE, CHAIN = Arm(7, 1, 8, "history"), Arm(3, 1, 4, "history"), Arm(3, 1, 4)
OFF = StrategyUpdate("off")
PINNED = StrategyUpdate("pinned", pinned=SEVEN)


def drawn(*arms: Arm | None) -> StrategyUpdate:
    """One of them for each step."""
    return StrategyUpdate("paper", epsilon=1.0, buckets=(SelectionBucket(1, arms),))


MIXED = {"history": drawn(SEVEN, THREE, None), "eagle-history": drawn(CHAIN, Arm(5, 4, 16), SEVEN, None)}
MIXED["history-ranks"] = drawn(CHAIN, SEVEN, None)


def siblings(groups: int, each: int, first: int = 0) -> tuple[list[str], list[SamplingParams]]:
    places = range(first, first + groups * each)
    params = [SamplingParams(max_new_tokens=200, sampling_seed=31 * i + 5, **KINDS[i % len(KINDS)]) for i in places]
    return [PROMPTS[i // each % len(PROMPTS)] for i in places], params


@pytest.mark.parametrize("config", MIXED)
def test_siblings_that_draft_from_each_other_change_no_token(client: Client, reference: Reference, config: str) -> None:
    """Or another arm, or none, at every step; with chunked prefills and retractions, or on two ranks while their index
    forgets."""
    client.forget_history()
    client.set_strategy(MIXED[config])
    before = client.history()
    asked = siblings(4, 7)
    check(reference, *asked, client.generate_batch(*asked))
    after = client.history()
    assert after.accepted - before.accepted > 100
    assert after.tokens <= after.capacity
    if config == "history-ranks":
        check(reference, *asked, client.generate_batch(*asked))
        assert client.history().written > 2 * after.capacity


def test_greedy_responses_are_those_of_plain_decoding(client: Client, expected: list[Tokens]) -> None:
    client.set_strategy(PINNED)
    for _ in range(2):
        rollouts = client.generate_batch(PROMPTS, SamplingParams(temperature=0, max_new_tokens=96), logprobs=True)
        assert [rollout.tokens for rollout in rollouts] == expected
    assert all(len(rollout.logprobs or ()) == len(rollout.tokens) for rollout in rollouts)


def test_a_second_epoch_is_drafted_from_the_first(client: Client) -> None:
    client.forget_history()
    client.set_strategy(PINNED)
    lengths = []
    for first in (0, 8 * len(PROMPTS)):  # the same prompts, other seeds
        rollouts = client.generate_batch(*siblings(4, 8, first))
        passes = [rollout.spec.verify_calls for rollout in rollouts if rollout.spec]
        lengths.append(sum(len(rollout.tokens) for rollout in rollouts) / sum(passes))
    assert lengths[0] > 1.3
    assert lengths[1] > lengths[0] + 0.5


def test_what_is_counted_is_what_was_found(client: Client) -> None:
    """Not the width of the arm, which is verified in any case."""
    client.forget_history()
    client.set_strategy(PINNED)
    before = client.history(), client.status().counters
    rollouts = client.generate_batch(*siblings(2, 4))
    after = client.history(), client.status().counters
    counts = [rollout.spec for rollout in rollouts if rollout.spec]
    proposed, accepted = (
        sum(getattr(each, name) for each in counts) for name in ("proposed_drafts", "accepted_drafts")
    )
    assert proposed == after[0].drafted - before[0].drafted == after[1].draft_tokens - before[1].draft_tokens
    assert accepted == after[0].accepted - before[0].accepted == after[1].accepted_tokens - before[1].accepted_tokens
    assert 0 < proposed < 7 * sum(each.verify_calls for each in counts)
    alone = client.generate("3", SamplingParams(max_new_tokens=3, sampling_seed=1), extra={"history": "none"})
    assert alone.spec is not None
    assert (alone.spec.proposed_drafts, alone.accept_length) == (0, 1.0)


def test_the_bandit_drafts_where_something_was_said(client: Client) -> None:
    client.set_strategy(StrategyUpdate("bandit"))
    asked = siblings(2, 8)
    for _ in range(3):
        client.generate_batch(*asked)
    before = client.history()
    for prompt, sampling in zip(*asked, strict=True):
        client.generate(prompt, sampling)
    after = client.history()
    assert after.accepted - before.accepted > 0.5 * (after.drafted - before.drafted) > 100


def test_what_a_request_asks(client: Client) -> None:
    client.forget_history()
    client.set_strategy(PINNED)
    asked = siblings(2, 1)

    def accepted(**fields: str) -> int:
        before = client.history().accepted
        client.generate_batch(*asked, extra=fields)
        return client.history().accepted - before

    assert accepted(history="none") == 0
    assert client.history().tokens == 0
    assert accepted(history="write") == 0
    kept = client.history().tokens
    known = accepted(history="read")
    assert known > 0.5 * kept > 0
    assert client.history().tokens == kept
    assert accepted(history_namespace="another") < known, "a response's own text is all that is found"
    assert accepted(history="read", history_namespace="another") == known
    kept = client.history().tokens
    client.forget_history("another")
    assert accepted(history="read", history_namespace="another") == 0
    assert accepted(history="read") == known
    assert client.history().tokens == kept, "what is found no more is overwritten in time"
    with pytest.raises(BadRequest, match="history: invalid"):
        client.generate("3", extra={"history": "sometimes"})
    with pytest.raises(BadRequest, match="tlt_history goes beside"):
        client.generate("3", SamplingParams(custom_params={"tlt_history": ["both", 5]}))


def test_responses_of_others_are_drafted_from(client: Client, reference: Reference) -> None:
    client.set_strategy(OFF)
    prompt, sampling = PROMPTS[3], SamplingParams(max_new_tokens=150, sampling_seed=11)
    said = client.generate(prompt, sampling, extra={"history": "none"}).tokens
    client.forget_history()
    client.set_strategy(PINNED)
    loaded = client.load_history(HistoryLoad(list(reference.tokens(prompt)), [list(said)], version=3, namespace="old"))
    assert loaded.tokens == len(said)
    rollout = client.generate(prompt, sampling, extra={"history": "read", "history_namespace": "old"})
    assert rollout.tokens == said
    assert rollout.accept_length is not None
    assert rollout.accept_length > min(4, 0.6 * len(said))


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"prompt": [], "responses": [[1]]}, 400, "prompt"),
        ({"prompt": [1], "responses": []}, 400, "responses"),
        ({"prompt": [1], "responses": [[]]}, 400, "responses"),
        ({"prompt": [1], "responses": [[5, 10**5]]}, 422, "token 100000: the model has 295"),
        ({"prompt": [-1], "responses": [[5]]}, 400, "prompt"),
        ({"prompt": [1], "responses": [[2**31]]}, 400, "responses"),
        ({"prompt": [1], "responses": [[5.5]]}, 400, "responses"),
        ({"prompt": [1], "responses": [[5]], "version": -1}, 400, "version"),
        ({"prompt": [1], "responses": [[5]], "namespace": "n" * 1025}, 400, "namespace"),
        ({"prompt": [1], "responses": [[5]], "prompts": []}, 400, "prompts"),
    ],
)
def test_what_cannot_be_loaded(client: Client, url: str, body: dict[str, Any], status: int, said: str) -> None:
    before = client.history()
    answer = httpx.post(f"{url}/tlt/v1/history", json=body)
    assert answer.status_code == status
    assert said in answer.text
    assert client.history() == before


def test_more_than_there_is_room_for(client: Client) -> None:
    """And a response of one token; decoding goes on."""
    before = client.history()
    client.load_history(HistoryLoad([1], [[7]]))
    client.load_history(HistoryLoad([1, 2], [[5, 6, 7] * 40_000]))
    after = client.history()
    assert after.written == before.written + 120_001
    assert after.tokens <= after.capacity
    assert client.generate(PROMPTS[0], SamplingParams(max_new_tokens=4)).tokens


@pytest.mark.server("eagle-chain")
def test_a_server_that_keeps_none(client: Client) -> None:
    for call in (client.history, client.forget_history, lambda: client.load_history(HistoryLoad([1], [[1]]))):
        with pytest.raises(BadRequest, match="--arm history"):
            call()
    assert client.status().history is None
    assert client.generate("3", SamplingParams(max_new_tokens=4), extra={"history": "both"}).tokens


def aborted_and_continued(client: Client, reference: Reference, prompt: str, sampling: SamplingParams) -> Rollout:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.generate, prompt, sampling, rid=f"broken-off-{random.random()}")
        until(lambda: client.load().running == 1)
        time.sleep(0.1)
        client.abort_all()
        part = running.result()
    return client.continue_rollout(part, list(reference.tokens(prompt)), sampling)


def test_broken_off_in_mid_step_and_continued(client: Client, reference: Reference) -> None:
    client.set_strategy(PINNED)
    prompts = PROMPTS[2:4]
    params = [SamplingParams(max_new_tokens=250, sampling_seed=i, ignore_eos=True) for i, _ in enumerate(prompts)]
    whole = client.generate_batch(prompts, params, extra={"history": "none"})
    for prompt, sampling, rollout in zip(prompts, params, whole, strict=True):
        assert aborted_and_continued(client, reference, prompt, sampling).tokens == rollout.tokens


def test_a_grammar_and_stops(client: Client) -> None:
    client.set_strategy(OFF)
    params = [
        SamplingParams(regex=r"[0-9]{1,3}(\+[0-9]{1,3}){2,9}", max_new_tokens=40, sampling_seed=5),
        SamplingParams(stop=["1", "+"], max_new_tokens=60, sampling_seed=6, min_new_tokens=3),
        SamplingParams(stop_token_ids=[20, 21, 22], max_new_tokens=60, sampling_seed=7, repetition_penalty=1.2),
        SamplingParams(max_new_tokens=1, sampling_seed=8),
    ] * 2
    prompts = PROMPTS[:4] * 2
    plain = [rollout.tokens for rollout in client.generate_batch(prompts, params)]
    client.set_strategy(PINNED)
    for _ in range(2):
        assert [rollout.tokens for rollout in client.generate_batch(prompts, params)] == plain


def test_other_weights_do_not_clear_it(client: Client, trainer: Trainer, tmp_path: Path) -> None:
    """What they sample is theirs, whatever the last ones said."""
    target = default_paths()[0]
    moved = noisy(target, tmp_path / "moved", seed=6)
    client.set_strategy(PINNED)
    asked = siblings(3, 4)
    client.generate_batch(*asked)
    kept = client.history().tokens
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.generate_batch, *siblings(3, 4, first=500))
        trainer.disk(moved, flush_cache=True).raise_for_status()
        running.result()
    try:
        assert client.history().tokens >= kept
        drafted = client.generate_batch(*asked)
        client.set_strategy(OFF)
        assert [rollout.tokens for rollout in client.generate_batch(*asked)] == [each.tokens for each in drafted]
    finally:
        trainer.disk(target, flush_cache=True).raise_for_status()


@pytest.mark.server("eagle-history")
def test_the_drafter_is_none_the_wiser(client: Client) -> None:
    """Its watchdog, and what the bandit expects of its arms, stand still in steps of history."""
    client.set_strategy(PINNED)
    client.generate(PROMPTS[0], SamplingParams(max_new_tokens=32))

    def told() -> tuple[Any, ...]:
        drafter, selection = client.drafter(), client.strategy().selection
        assert drafter.watch
        assert selection
        expected = {each.arm: each.accept_length for each in selection.buckets[0].arms}
        return drafter.watch.steps, drafter.watch.accept_length, expected[CHAIN], expected[Arm(5, 4, 16)]

    before = told()
    client.generate_batch(*siblings(4, 4))
    assert told() == before


@pytest.mark.server("eagle-history")
def test_the_drafter_is_whole_when_its_turn_comes(client: Client) -> None:
    """Steps of history in which nothing is found are as plain ones: half of all, and the rest accepts as before."""

    def accepted(strategy: StrategyUpdate) -> float:
        client.set_strategy(strategy)
        sampling = SamplingParams(temperature=0, max_new_tokens=150, ignore_eos=True)
        rollouts = client.generate_batch(PROMPTS[:8], sampling, extra={"history": "none"})
        counts = [rollout.spec for rollout in rollouts if rollout.spec]
        return sum(each.accepted_drafts for each in counts) / sum(each.verify_calls for each in counts)

    alone = accepted(StrategyUpdate("pinned", pinned=CHAIN))
    assert accepted(drawn(CHAIN, SEVEN)) > 0.4 * alone
