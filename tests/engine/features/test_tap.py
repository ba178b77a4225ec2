"""Whose rows a step's states are, under random accept counts, ends, retractions, aborts and lags."""

import random
from array import array
from types import SimpleNamespace as Made
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stepping import MOST, Engine, Everybody, Receiver, token

from tlt_server.engine.features.tap import Tap, group_of, send_features
from tlt_server.engine.weights.state import Stamp


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0, 1]), st.sampled_from([1, 3, 6]), st.integers(5, 60))
def test_every_row_is_of_its_position_and_none_is_missing(seed: int, lag: int, nodes: int, turns: int) -> None:
    """nodes: as in off, in a small tree that is deeper than it is large, in a tree."""
    engine = Engine(random.Random(seed), lag, nodes)
    for _ in range(turns):
        engine.turn()
    engine.drain()
    found = engine.receiver.found
    for req in engine.all:
        rows = found.get(req.rid, {})
        if req.rid.endswith("odd"):
            assert not rows
            continue
        prompt, length = len(req.origin_input_ids), len(req.output_ids_through_stop)
        for position, sent in rows.items():
            assert {(known, value) for known, value, _ in sent} == {
                (token(req.number, position), float(token(req.number, position)))
            }
        end = prompt + length
        assert set(rows) <= set(range(end))
        assert set(range(prompt, end - 1)) <= set(rows)
        if length:  # else it was aborted before its prompt was settled
            missing = set(range(prompt)) - set(rows)
            assert missing == set(range(len(missing)))


@pytest.mark.parametrize("lag", [0, 1])
def test_the_second_to_last_position_of_a_response_has_its_row(lag: int) -> None:
    """The last step gives several tokens, and the end lies within, at, or behind them."""
    for limit in range(1, 20):
        engine = Engine(random.Random(limit), lag)
        engine.request()
        (req,) = engine.all
        req.rid, req.limit, req.cached = "0", limit, 0
        engine.drain()
        last = len(req.origin_input_ids) + limit - 1
        assert set(range(last)) <= set(engine.receiver.found["0"]) <= set(range(last + 1))


def test_a_step_keeps_the_target_that_it_was_launched_with() -> None:
    engine = Engine(random.Random(0), lag=1)
    engine.request()
    engine.all[0].rid, engine.all[0].limit = "0", 100
    while not engine.running:
        engine.prefill()
    engine.decode()
    before = engine.all[0].computed
    engine.publish()
    engine.decode()
    engine.settle()
    versions = {p: {v for *_, v in sent} for p, sent in engine.receiver.found["0"].items()}
    assert all(seen == ({0} if position < before else {1}) for position, seen in versions.items())
    assert {0} in versions.values()
    assert {1} in versions.values()


def test_the_rows_of_a_result_that_nobody_tapped() -> None:
    send_features(Made())


@pytest.mark.parametrize("req", [Made(rid="HEALTH_CHECK_1", input_embeds=None), Made(rid="1", input_embeds=[[0.5]])])
def test_what_teaches_nothing_is_not_followed(req: Any) -> None:
    receiver = Receiver()
    tap = Tap(Everybody(), receiver, receiver)  # type: ignore[arg-type]
    assert tap.chunks(Made(reqs=[req], prefix_lens=[0], extend_lens=[1])) == []


def test_without_memory_for_a_copy_decoding_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[tuple[int, str]] = []
    monkeypatch.setattr("tlt_server.engine.features.tap.count_features_dropped", lambda *drop: lost.append(drop))

    class Full:
        """States of which no copy can be made."""

        def __len__(self) -> int:
            return 6

        def view(self, *shape: int) -> Any:
            raise torch.OutOfMemoryError

    engine = Engine(random.Random(0), lag=0)
    engine.request()
    (req,) = engine.all
    req.rid, req.output_ids = "0", array("q", [1])
    result = Made(logits_output=Made(hidden_states=Full(), last_hidden_states=None))
    engine.tap.take_step([req], result, MOST)
    result.tapped.credit([(req, 2)], Stamp("", 0, False, 0))
    req.output_ids_through_stop = array("q", [1, 2, 3])
    send_features(result)
    assert lost == [(2, "no_room")]
    assert not engine.receiver.rows


def test_a_group_is_its_prompt() -> None:
    one, same, other = (Made(origin_input_ids=array("q", tokens)) for tokens in ([1, 2], [1, 2], [2, 1]))
    assert group_of(one) == group_of(same) != group_of(other)
    assert 0 <= group_of(one) < 2**64
