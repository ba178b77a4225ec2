"""Tokens are credited to the weights of their step's launch, also where the weights change before it is settled."""

from collections import deque
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace as Made
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tlt_server.api.rollouts.versions import add_versions_to_meta_info
from tlt_server.config import Arm
from tlt_server.engine.decode.crediting import KEY, credit_tokens, stamping_launched
from tlt_server.engine.decode.speculation import Speculation
from tlt_server.engine.decode.steplog import StepLog, read_steps
from tlt_server.engine.events import EventLog
from tlt_server.engine.weights.publications import Publications
from tlt_server.engine.weights.state import EngineState, Stamp

ARM = Arm(3, 1, 4)


def request(**fields: Any) -> Any:
    """As much of upstream's `Req` as is read."""
    state = {
        "customized_info": None,
        "output_ids": [],
        "inflight_middle_chunks": 0,
        "is_retracted": False,
        "spec_num_cap_tokens": 0,
    }
    return Made(**state | {"finished": lambda: False} | fields)


def batch(*reqs: Any, extend: bool = False) -> Any:
    return Made(reqs=reqs, forward_mode=Made(is_extend=lambda: extend, is_decode=lambda: not extend))


def result(*accepted: int) -> Any:
    lens = torch.tensor(accepted) if accepted else None
    return Made(copy_done=None, accept_lens=lens, arm=ARM, speculative_num_draft_tokens=ARM.num_draft_tokens)


@pytest.fixture
def scheduler() -> Any:
    """As much of upstream's `Scheduler` as is read, with a step under way where `result_queue` holds one."""
    publications = Publications("a", 2.0, lambda: 0.0, lambda published: None)
    events = EventLog()
    state = EngineState(
        publications, events, drafter=None, speculation=Speculation(None, 32, events), sharing=None, devices=[]
    )
    ps = Made(attn_tp_rank=0)
    return Made(weight_updater=Made(state=state), is_generation=True, ps=ps, result_queue=deque())


def credited(req: Any) -> list[tuple[str, int]]:
    return [(stamp.weight_version, stamp.target_version) for stamp in req.customized_info[KEY]]


def settle(scheduler: Any, req: Any, made: Any) -> None:
    """As upstream does: credited, then appended."""
    credit_tokens(scheduler, batch(req), made)
    req.output_ids += [7] * (int(made.accept_lens[0]) if made.accept_lens is not None else 1)


def test_a_step_under_way_keeps_its_weights(scheduler: Any) -> None:
    req, launched = request(), result(3)
    scheduler.result_queue.append((batch(req), launched))
    with stamping_launched(scheduler):
        scheduler.weight_updater.state.publications.wrote("b")
        scheduler.weight_updater.state.publications.flushed()
    later = result(2)
    settle(scheduler, req, scheduler.result_queue.popleft()[1])
    settle(scheduler, req, later)
    assert credited(req) == [("a", 0)] * 3 + [("b", 1)] * 2


def test_a_step_under_way_over_two_changes_keeps_the_first(scheduler: Any) -> None:
    launched = result(1)
    scheduler.result_queue.append((None, launched))
    for name in ("b", "c"):
        with stamping_launched(scheduler):
            scheduler.weight_updater.state.publications.named(name)
    assert launched.stamp.weight_version == "a"


def test_what_a_grammar_takes_back_is_not_credited_twice(scheduler: Any) -> None:
    req = request()
    credit_tokens(scheduler, batch(req), result(4))
    req.output_ids += [7, 7]  # two of four are kept
    scheduler.weight_updater.state.publications.named("b")
    credit_tokens(scheduler, batch(req), result(1))
    assert [name for name, _ in credited(req)] == ["a", "a", "b"]


def test_only_what_is_sampled_for_a_live_request_counts(scheduler: Any) -> None:
    live, chunked = request(), request(inflight_middle_chunks=1)
    gone = [request(is_retracted=True), request(finished=lambda: True)]
    credit_tokens(scheduler, batch(live, chunked, *gone, extend=True), result())
    assert credited(live) == [("a", 0)]
    assert credited(chunked) == []
    assert [req.customized_info for req in gone] == [None, None]
    live.output_ids.append(7)
    credit_tokens(scheduler, batch(live), result())  # plain decoding
    assert len(credited(live)) == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_tells_the_drafter_what_was_accepted(scheduler: Any, rank: int) -> None:
    """Of live requests, in decode steps, by the drafter of the launch; though but one of them credits tokens. What
    history drafted is none of its doing."""
    told: list[Any] = []
    scheduler.weight_updater.state.speculation = Made(
        there=True, weights_changed=lambda: None, settled=lambda *step: None
    )
    live = Made(version=3, trained_on=None)
    scheduler.weight_updater.state.drafter = Made(live=live, settled=lambda *step: told.append(step))
    scheduler.ps.attn_tp_rank = rank
    reqs = [request(rid="a"), request(rid="b", is_retracted=True), request(rid="c")]
    launched = result(3, 4, 1)
    scheduler.result_queue.append((None, launched))
    with stamping_launched(scheduler):
        live.version = 4
    credit_tokens(scheduler, batch(*reqs), launched)
    credit_tokens(scheduler, batch(*reqs), result(2, 2, 2))
    credit_tokens(scheduler, batch(*reqs, extend=True), result())
    credit_tokens(scheduler, batch(reqs[1]), result(4))
    of_history = result(8)
    of_history.arm, of_history.drafted = Arm.history(7), [5]
    credit_tokens(scheduler, batch(reqs[0]), of_history)
    assert told == [(3, ARM, [("a", 2), ("c", 0)]), (4, ARM, [("a", 1), ("c", 1)])]
    assert reqs[0].spec_num_cap_tokens == (11 if rank == 0 else 0), "drafts that three passes verified"
    assert (reqs[0].customized_info is None) == (rank == 1)


STAMPS = st.builds(Stamp, st.sampled_from("ab"), st.integers(0, 1), st.booleans(), st.sampled_from([None, 0, 1]))


@given(st.lists(STAMPS, max_size=30), st.lists(st.integers(1, 5), min_size=30, max_size=30))
def test_spans_are_the_stamps(stamps: list[Stamp], cuts: list[int]) -> None:
    """However they arrive: in one piece, or as a stream whose events each say all that came before."""
    asked = Made(sampling_params={"sampling_seed": 5})
    state, start, last = Made(customized_info_accumulated={}, obj=asked), 0, {}
    for cut in cuts:
        state.customized_info_accumulated[KEY] = stamps[start : start + cut]
        last = {KEY: "as upstream filled it"}
        add_versions_to_meta_info(last, state)
        start += cut
    told: list[Any] = [None] * len(stamps)
    ends = [0]
    for span in last.get("weight_versions", []):
        assert span["start"] == ends[-1] < span["end"]
        ends.append(span["end"])
        values = (span["version"], span["target_version"], span["partial"])
        told[span["start"] : span["end"]] = [values] * (span["end"] - span["start"])
    assert told == [stamp[:3] for stamp in stamps]
    drafted = [stamp.drafter_version for stamp in stamps if stamp.drafter_version is not None]
    spans = last.get("drafter_versions", [])
    assert [span["version"] for span in spans for _ in range(span["end"] - span["start"])] == drafted
    assert all(one["version"] != other["version"] for one, other in pairwise(spans))


def test_a_settled_step_is_noted_for_what_is_live(scheduler: Any, tmp_path: Path) -> None:
    state = scheduler.weight_updater.state
    live, over, gone = request(rid="a"), request(rid="b", finished=lambda: True), request(rid="c", is_retracted=True)
    with closing(StepLog(tmp_path / "steps.jsonl")) as state.step_log:
        credit_tokens(scheduler, batch(live, extend=True), result())
        credit_tokens(scheduler, batch(live, over, gone), result(4, 2, 3))
    noted = [(step.decode, step.drafter_version, step.tokens) for step in read_steps(tmp_path / "steps.jsonl")]
    assert noted == [(False, None, {"a": 1}), (True, None, {"a": 4})]
