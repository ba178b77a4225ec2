"""What a server sends to learn from: the state of every position, equal to transformers' of the same tokens."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest
import torch
from tlt_client import Client, Rollout, SamplingParams, StrategyUpdate
from tlt_client.schemas import Arm

from benchmarks.lib.training.learner import Learner, Row, states
from tests.link.processes import until
from tests.server.conftest import PROMPTS, Servers
from tests.server.drafter_trainer import DrafterTrainer
from tests.server.trainer import Trainer, noisy, tensors_of, while_running
from tlt_server.config import beside
from tlt_server.demo import default_paths
from tlt_server.demo.reference import Reference
from tlt_server.engine.features.sender import MESSAGE_AGE
from tlt_server.trainer.data.replay import replay

pytestmark = pytest.mark.server

SAMPLED = SamplingParams(temperature=1, max_new_tokens=96)


@pytest.fixture
def learner(servers: Servers, client: Client) -> Iterator[Learner]:
    """Met by the test's server, which has sent to nobody so far, and forgotten what it decoded."""
    with Learner(beside(servers.trainer)) as learner:
        while not learner.tokens:
            client.generate(PROMPTS[0], SAMPLED)
        time.sleep(4 * MESSAGE_AGE)  # until what is still gathered has come
        httpx.post(f"{servers.url}/flush_cache").raise_for_status()
        yield learner


def counted(client: Client, name: str) -> float:
    """A counter of the server's, summed over its labels."""
    lines = [line for line in client.metrics().splitlines() if line.startswith(name)]
    return sum(float(line.split()[-1]) for line in lines)


def check(reference: Reference, prompt: tuple[int, ...], rollout: Rollout, found: dict[int, list[Row]]) -> set[int]:
    """Every row is its position's; returns the positions that have one."""
    tokens = [*prompt, *rollout.tokens]
    final, lower = states(reference.model, tokens)
    for position, rows in found.items():
        for row in rows:
            assert row.token == tokens[position]
            wanted = final if row.finals is None else lower
            torch.testing.assert_close(row.hidden, wanted[position], atol=2e-4, rtol=1e-3)
            if row.finals is not None:
                torch.testing.assert_close(row.finals, final[position], atol=2e-4, rtol=1e-3)
    return set(found)


@pytest.mark.parametrize(("config", "arm"), [("eagle-arms", Arm(5, 4, 16)), ("eagle3-arms", Arm(3, 1, 4))])
def test_every_position_has_its_state(client: Client, learner: Learner, reference: Reference, arm: Arm) -> None:
    """Prompts in chunks and out of the radix cache, responses that end in the middle of a step, off in between."""
    client.set_strategy(StrategyUpdate("pinned", pinned=arm))
    rounds = [client.generate_batch(PROMPTS, SAMPLED)]

    def switch() -> None:
        for mode in ("off", "pinned", "off"):
            time.sleep(0.2)
            client.set_strategy(StrategyUpdate(mode))

    rounds.append(while_running(lambda: client.generate_batch(PROMPTS, SAMPLED), switch))
    rounds.append(client.generate_batch(PROMPTS, SAMPLED))
    for answers in rounds:
        for text, rollout in zip(PROMPTS, answers, strict=True):
            prompt = reference.tokens(text)
            end = len(prompt) + len(rollout.tokens)
            wanted = set(range(rollout.cached_tokens, end - 1))
            found = check(reference, prompt, rollout, learner.of(rollout.rid, wanted))
            assert wanted <= found <= wanted | {end - 1}
            sent = learner.rows[rollout.rid].values()
            assert {(len(rows), rows[0].target_version, rows[0].partial) for rows in sent} == {(1, 0, False)}
    assert max(rollout.cached_tokens for rollout in rounds[1]) > 0
    assert len({learner.groups[rollout.rid] for answers in rounds for rollout in answers}) == len(set(PROMPTS))


@pytest.mark.server("eagle3-arms")
def test_replayed_prompts_are_sent(servers: Servers, client: Client, learner: Learner) -> None:
    """Each response that was asked for, and nobody else's."""
    known = set(learner.rows)
    with DrafterTrainer(servers.trainer):
        until(lambda: (trainer := client.status().trainer) is not None and trainer.connected, 60)
        said = list(replay(servers.url, PROMPTS[:3], 2, SAMPLED, at_once=1))
    assert [each.responses for each in said] == [6]
    deadline, new = time.monotonic() + 10, set[str]()
    while sum(len(learner.rows[rid]) for rid in new) < said[-1].tokens and time.monotonic() < deadline:
        time.sleep(0.02)
        new = set(learner.rows) - known
    assert len(new) == 6
    assert sum(len(learner.rows[rid]) for rid in new) >= said[-1].tokens
    assert len({learner.groups[rid] for rid in new}) == 3


@pytest.mark.server("two-ranks")
def test_one_of_two_ranks_sends(client: Client, learner: Learner, reference: Reference) -> None:
    client.set_strategy(StrategyUpdate("pinned", pinned=Arm(4, 3, 5)))
    rollout = client.generate(PROMPTS[0], SAMPLED)
    prompt = reference.tokens(PROMPTS[0])
    wanted = set(range(len(prompt) + len(rollout.tokens) - 1))
    found = learner.of(rollout.rid, wanted)
    assert wanted <= check(reference, prompt, rollout, found)
    assert {len(rows) for rows in found.values()} == {1}


@pytest.fixture(scope="module")
def crowded(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A server whose pool is too small for what it is asked, and the address where it looks for a trainer."""
    address = f"ipc://{tmp_path_factory.mktemp('crowded')}/control"
    tight = ["--max-total-tokens", "1600", "--schedule-conservativeness", "0.1", "--chunked-prefill-size", "16"]
    return servers.get(["--arm", "5,4,16", "--trainer", address, *tight]), address


def test_nobody_listens_then_somebody_does(crowded: tuple[str, str], reference: Reference) -> None:
    """Requests notice neither; one is aborted, some are retracted, some end by a stop token or a grammar."""
    url, address = crowded
    with Client(url) as client:
        unheard = client.generate_batch(PROMPTS, SAMPLED)
        until_steady(lambda: counted(client, "tlt_features_dropped_total"))
        assert counted(client, "tlt_features_sent_total") == 0
        with Learner(beside(address)) as learner:
            while not learner.tokens:  # the two have met
                client.generate(PROMPTS[0], SAMPLED)
            given = crowd(client)
            for text, rollout in given:
                prompt = reference.tokens(text)
                end = len(prompt) + len(rollout.tokens)
                wanted = set(range(len(prompt), end - 1))
                found = check(reference, prompt, rollout, learner.of(rollout.rid, wanted))
                missing = set(range(len(prompt))) - found
                assert wanted <= found <= set(range(end))
                assert missing == set(range(len(missing)))
        assert counted(client, "sglang:num_retracted_requests_total") > 0
    assert all(rollout.rid not in learner.rows for rollout in unheard)


def until_steady(count: Callable[[], float]) -> float:
    """A count, once it has begun to grow, and then not grown for longer than a message is gathered."""
    before = 0.0
    for _ in range(30):
        time.sleep(4 * MESSAGE_AGE)
        if (now := count()) and now == before:
            return now
        before = now
    raise TimeoutError(f"still {before}")


def crowd(client: Client) -> list[tuple[str, Rollout]]:
    """Many at once: what they asked, and what they were given."""
    long = SamplingParams(temperature=1, max_new_tokens=200, ignore_eos=True)
    short = SamplingParams(temperature=1, max_new_tokens=64, stop_token_ids=[17, 23])
    digits = SamplingParams(temperature=1, max_new_tokens=64, regex="[0-9]{5,9}")
    jobs = [(text, kind) for text in PROMPTS for kind in (long, short, digits)]

    def abort() -> None:
        time.sleep(1)
        client.abort("the aborted")

    with ThreadPoolExecutor(len(jobs) + 1) as pool:
        rollouts = [pool.submit(client.generate, *job) for job in jobs]
        doomed = pool.submit(
            client.generate, PROMPTS[0], msgspec.structs.replace(long, max_new_tokens=900), rid="the aborted"
        )
        abort()
        answers = [(text, rollout.result()) for (text, _), rollout in zip(jobs, rollouts, strict=True)]
        answers.append((PROMPTS[0], doomed.result()))
    assert answers[-1][1].aborted
    return answers


def test_a_state_is_of_the_target_that_it_says(crowded: tuple[str, str], tmp_path: Path) -> None:
    """Weights change in mid-flight; requests are retracted, so that a position's prefix is of its own weights."""
    url, address = crowded
    targets = [default_paths()[0], noisy(default_paths()[0], tmp_path / "other", 1, scale=0.1)]
    references = [Reference(target) for target in targets]
    trainer = Trainer(url)
    with Client(url) as client, Learner(beside(address)) as learner:
        while not learner.tokens:
            client.generate(PROMPTS[0], SAMPLED)

        drafts = client.status().counters.drafts

        def update() -> None:
            while client.status().counters.drafts < drafts + 40:  # of some 170
                time.sleep(0.01)
            trainer.post("/pause_generation", mode="retract").raise_for_status()
            trainer.tensor(tensors_of(targets[1]), weight_version="other").raise_for_status()
            trainer.post("/continue_generation").raise_for_status()

        first = client.status().versions.target.version
        sampling = SamplingParams(temperature=1, max_new_tokens=150, ignore_eos=True)
        given = while_running(lambda: client.generate_batch(PROMPTS[:4], sampling), update)
        trainer.disk(targets[0]).raise_for_status()
        seen = set()
        for text, rollout in zip(PROMPTS, given, strict=False):
            tokens = [*references[0].tokens(text), *rollout.tokens]
            exact = [states(reference.model, tokens)[0] for reference in references]
            for position, rows in learner.of(rollout.rid, set(range(len(tokens) - 151, len(tokens) - 1))).items():
                for row in rows:
                    seen.add(row.target_version - first)
                    wanted = exact[row.target_version - first][position]
                    torch.testing.assert_close(row.hidden, wanted, atol=2e-4, rtol=1e-3)
                    assert not row.partial
    trainer.close()
    assert seen == {0, 1}
