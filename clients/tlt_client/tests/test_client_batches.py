"""Batches and groups: in order, within their bound, and what becomes of them when a sample fails."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from sglang_stand_in import (
    drop_after_reading,
    serving,
    until_aborted,
    well,
)

from tlt_client import (
    AsyncClient,
    BadRequest,
    SamplingParams,
    Timeout,
    sample_seed,
)

Connect = Callable[..., Any]


def test_a_batch_comes_back_in_order_and_within_its_bound(connect: Connect) -> None:
    prompts = [[65 + i, 66] for i in range(20)]
    together = threading.Barrier(4)

    def in_fours(handler: Any, fields: Any) -> None:
        together.wait(timeout=10)  # ends only if four requests are there at once
        well(handler, fields)

    with serving(*[in_fours] * 20) as server:
        given = connect(server.url, max_concurrency=4).generate_batch(prompts)
        assert [list(r.tokens) for r in given] == prompts
        assert server.most_running == 4
        assert len(set(server.rids)) == 20


def test_a_batch_may_have_its_own_parameters_for_each_prompt(connect: Connect) -> None:
    with serving() as server:
        client = connect(server.url)
        client.generate_batch(["a", "b"], [SamplingParams(top_p=0.5), SamplingParams(top_p=0.6)])
        assert {b["text"]: b["sampling_params"]["top_p"] for b in server.bodies} == {"a": 0.5, "b": 0.6}
        assert client.generate_batch([]) == []


def test_a_group_draws_each_sample_with_its_own_seed(connect: Connect) -> None:
    with serving() as server:
        client = connect(server.url)
        assert [r.text for r in client.generate_group("abc", 3, SamplingParams(sampling_seed=7))] == ["abc"] * 3
        assert sorted(b["sampling_params"]["sampling_seed"] for b in server.bodies) == sorted(
            sample_seed(7, i) for i in range(3)
        )
        client.generate_group("abc", 2, logprobs=True)
        assert all("sampling_seed" not in b["sampling_params"] and b["return_logprob"] for b in server.bodies[3:])


def test_a_batch_of_one_seed_has_as_many(connect: Connect) -> None:
    with serving() as server:
        connect(server.url).generate_batch(["a", "b"], SamplingParams(sampling_seed=7))
        seeds = {b["text"]: b["sampling_params"]["sampling_seed"] for b in server.bodies}
    assert seeds == {"a": 7, "b": sample_seed(7, 1)}


def test_samples_without_a_seed_offer_one_each_and_keep_it_when_sampled_anew(connect: Connect) -> None:
    with serving(drop_after_reading) as server:
        connect(server.url).generate_group("abc", 3)
        assert len(server.seeds) == 4
        assert len(set(server.seeds)) == 3
        assert all(seed is not None and int(seed) < 2**53 for seed in server.seeds)


def test_a_lost_sample_of_a_group_costs_that_sample_alone(connect: Connect) -> None:
    with serving(drop_after_reading) as server:
        given = connect(server.url).generate_group("abc", 8)
        assert [r.text for r in given] == ["abc"] * 8
        assert sorted(r.resamples for r in given) == [0] * 7 + [1]
        assert (len(server.rids), len(server.aborted)) == (9, 1)


def test_a_batch_that_fails_hands_over_what_was_complete_and_aborts_the_rest(connect: Connect) -> None:
    def fails_last(handler: Any, fields: Any) -> None:
        """The sample `bad` fails once `ok` is answered, which is when its place is taken, and the long ones run."""
        server = handler.server
        if fields["text"] == "bad":
            server.wait_until(lambda: len(server.rids) == 5)
            handler.answer(400, {"detail": "bad prompt"})
        else:
            (well if fields["text"] == "ok" else until_aborted)(handler, fields)

    with serving(*[fails_last] * 12) as server:
        client = connect(server.url, max_concurrency=4)
        with pytest.raises(BadRequest, match="bad prompt") as raised:
            client.generate_batch(["ok", "bad", *["long"] * 10])
        assert {i: r.text for i, r in raised.value.finished.items()} == {0: "ok"}
        assert raised.value.index == 1
        server.wait_until(lambda: server.running == 0)
        assert set(server.aborted) == {b["rid"] for b in server.bodies if b["text"] == "long"}
        assert len(server.rids) < 12


def test_the_deadline_of_a_batch_is_of_the_whole_batch(connect: Connect) -> None:
    with serving(well, *[until_aborted] * 3) as server:
        client = connect(server.url, max_concurrency=2)
        with pytest.raises(Timeout):
            client.generate_batch(["abc"] * 6, deadline_s=0.3)
        server.wait_until(lambda: server.running == 0)
        assert set(server.aborted) == set(server.rids[1:])
        assert len(server.rids) <= 4


def test_a_cancelled_task_closes_its_connections() -> None:
    async def cancelled(url: str) -> None:
        async with AsyncClient(url) as client:
            task = asyncio.create_task(client.generate_group("abc", 2))
            while len(server.rids) < 2:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(asyncio.all_tasks()) == 1
        server.aborted.append("*")  # lets the stand-in's threads go

    with serving(until_aborted, until_aborted) as server:
        asyncio.run(cancelled(server.url))
