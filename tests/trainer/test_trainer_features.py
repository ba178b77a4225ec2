"""Sequences from pieces in any order, against a table of every position; a buffer that stays within its bounds."""

import time
from collections import Counter
from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tlt_server.errors import WireError
from tlt_server.trainer.data.buffer import Buffer
from tlt_server.trainer.data.features import Feature
from tlt_server.trainer.learn.packing import Run, pack

PROMPT, LENGTH, MAX_AGE = 5, 14, 2
ROW_BYTES = 8 + 3 * 4
PLENTY = 1 << 20


def state(group: int, member: int, position: int, version: int) -> list[float]:
    """Tells what a row is of; a prompt's rows are alike in the whole group."""
    return [group * 10 + (member if position >= PROMPT else 9), position, version]


def feature(group: int, member: int, first: int, stop: int, version: int) -> Feature:
    at = range(first, stop)
    tokens = torch.tensor([100 * group + (10 * member if p >= PROMPT else 0) + p for p in at])
    states = torch.tensor([state(group, member, p, version) for p in at], dtype=torch.float32).reshape(-1, 3)
    return Feature(f"{group}-{member}", group, PROMPT, first, tokens, states, version)


features = st.builds(
    lambda group, member, ends, version: feature(group, member, min(ends), max(ends) + 1, version),
    st.integers(0, 1),
    st.integers(0, 2),
    st.tuples(st.integers(0, LENGTH - 1), st.integers(0, LENGTH - 1)),
    st.integers(0, 4),
)


@dataclass(frozen=True)
class Span:
    """A run, by what its rows tell."""

    first: int
    rows: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, run: Run) -> "Span":
        for token, (label, position, _) in zip(run.tokens.tolist(), run.states.tolist(), strict=True):
            assert token == 100 * (label // 10) + (10 * (label % 10) if label % 10 < 9 else 0) + position
        return cls(run.first, tuple(tuple(row) for row in run.states.tolist()))


def table(given_: list[Feature], oldest: int) -> set[Span]:
    """The runs of all requests, position by position."""
    spans = set()
    for group, member in {(f.group, int(f.request[-1])) for f in given_}:
        newest: dict[int, int] = {}
        for f in given_:
            for position in range(f.first, f.first + len(f.tokens)):
                mine = f.group == group and (f.request[-1] == str(member) or position < PROMPT)
                if mine and f.target_version >= oldest:
                    newest[position] = max(newest.get(position, 0), f.target_version)
        run: list[int] = []
        for position in range(LENGTH + 1):
            if position in newest:
                run.append(position)
                continue
            if len(run) > 1 and run[-1] >= PROMPT:
                spans.add(Span(run[0], tuple(tuple(map(float, state(group, member, p, newest[p]))) for p in run)))
            run = []
    return spans


@given(st.lists(features, max_size=12), st.randoms(use_true_random=False))
def test_runs_are_what_the_pieces_cover_in_any_order(pieces: list[Feature], random: Random) -> None:
    newest = max((piece.target_version for piece in pieces), default=0)
    expected = table([p for p in pieces if p.target_version >= newest - MAX_AGE], newest - MAX_AGE)
    # requests known by a prompt alone are forgotten at a publication, and nothing is asserted of their group's
    for shuffled in (pieces, random.sample(pieces, len(pieces))):
        buffer = Buffer(3, 3, PLENTY, PLENTY, MAX_AGE, held_out=0)
        buffer.advance(newest)
        for piece in shuffled:
            buffer.add(piece)
        assert {Span.of(run) for run in buffer.draw(PLENTY, random)} == expected
        assert not buffer.dropped["contradiction"]


def long_response(length: int, prompt: int = PROMPT, step: int = 4) -> Buffer:
    """Of one response that came in pieces of `step`; windows of 64 entries, 16 of them context. A state is its
    position."""
    buffer = Buffer(1, 1, PLENTY, 64, held_out=0)
    for first in range(0, length, step):
        at = torch.arange(first, min(first + step, length))
        buffer.add(Feature("r", 1, prompt, first, at, at[:, None].float(), 0))
    return buffer


@given(st.integers(2, 600), st.integers(1, 200), st.integers(1, 9), st.randoms(use_true_random=False))
def test_a_long_response_is_learnt_from_its_first_token_to_its_last(
    length: int, prompt: int, step: int, random: Random
) -> None:
    """Each once, in windows that read a little of what lies before them."""
    buffer = long_response(length, prompt, step)
    assert buffer.nbytes == length * (8 + 4)
    runs = buffer.draw(PLENTY, random)
    learnt = []
    for run in runs:
        assert run.entries <= 64
        assert run.tokens.tolist() == run.states[:, 0].tolist() == list(range(run.first, run.first + run.entries + 1))
        (one,) = pack([run], 64, torch.device("cpu"))
        learnt += one.tokens[one.counted].tolist()
        before = run.entries - run.learnt
        assert before == min(16, run.prompt - 1)
    assert sorted(learnt) == list(range(max(prompt, 1), length))


@given(st.lists(st.integers(1, 300), min_size=2, max_size=5), st.integers(0, 1000))
def test_where_windows_end_changes_and_each_token_counts_alike(lengths: list[int], seed: int) -> None:
    buffer = Buffer(1, 1, PLENTY, 64, held_out=0)
    for number, length in enumerate(lengths):
        at = torch.arange(length + 1)
        buffer.add(Feature(str(number), number, 1, 0, at, torch.full((length + 1, 1), float(number)), 0))
    times = Counter[float]()
    for run in buffer.draw(PLENTY, Random(seed)):
        times[run.states[0, 0].item()] += run.learnt
    assert times == dict(enumerate(lengths))


@pytest.mark.slow
def test_a_response_of_any_length_is_taken_in_linear_time() -> None:
    def seconds(length: int) -> float:
        began = time.process_time()
        long_response(length)
        return time.process_time() - began

    seconds(4_000)
    shorter, longer = min(seconds(8_000) for _ in range(3)), min(seconds(64_000) for _ in range(3))
    assert longer < 16 * shorter  # 64 times, were it quadratic


def test_what_is_judged_by_is_of_many_requests_and_of_all_of_a_response() -> None:
    buffer = Buffer(1, 1, PLENTY, 64, held_out=1 - 1e-9)
    for number in range(20):
        at = torch.arange(1000)
        buffer.add(Feature(str(number), number, 5, 0, at, at[:, None].float(), 0))
    runs = buffer.held_out(1000)
    assert len({run.request for run in runs}) > 8
    assert max(run.first for run in runs) > 800
    assert 1000 <= sum(run.entries for run in runs) < 1064


@given(st.lists(features, max_size=30), st.integers(1, 40), st.randoms(use_true_random=False))
def test_bounds_hold_after_every_feature(pieces: list[Feature], rows: int, random: Random) -> None:
    buffer = Buffer(3, 3, rows * ROW_BYTES, PLENTY, MAX_AGE, held_out=0.5)
    for piece in pieces:
        buffer.add(piece)
        runs = buffer.draw(PLENTY, random) + buffer.held_out()
        held = {tuple(row) for run in runs for row in run.states.tolist()}
        assert len(held) * ROW_BYTES <= buffer.nbytes <= rows * ROW_BYTES
        assert all(version >= buffer.newest - MAX_AGE for _, _, version in held)
    for piece in pieces:  # nothing is counted that is not there
        buffer.advance(piece.target_version + 10)
    assert not pieces or buffer.nbytes == 0


@given(st.lists(features, min_size=1, max_size=30), st.floats(0, 1), st.randoms(use_true_random=False))
def test_what_judges_is_never_learnt(pieces: list[Feature], share: float, random: Random) -> None:
    buffer = Buffer(3, 3, PLENTY, PLENTY, MAX_AGE, held_out=share)
    for piece in pieces:
        buffer.add(piece)
    learnt, judged = buffer.draw(PLENTY, random), buffer.held_out()
    groups = [{row[0] // 10 for run in runs for row in run.states.tolist()} for runs in (learnt, judged)]
    assert not groups[0] & groups[1]
    assert all(row[2] == buffer.newest for run in judged for row in run.states.tolist())


@pytest.mark.slow
@given(st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=8, unique=True), min_size=1, max_size=6))
def test_every_target_that_sees_two_prompts_is_learnt_and_judged_by(targets: list[list[int]]) -> None:
    """However small the share is, and though prompts come again."""
    buffer = Buffer(3, 3, PLENTY, PLENTY, max_age=1, held_out=1e-9)
    for version, groups in enumerate(targets):
        for first, stop in ((0, PROMPT), (PROMPT, LENGTH)):  # all prompts come before any response
            for group in groups:
                buffer.add(replace(feature(group, 0, first, stop, version), request=f"{group} {version}"))
        assert buffer.held_out()
        assert buffer.draw(PLENTY, Random(0))


def test_where_each_target_sees_one_prompt_it_is_learnt_or_judged_by_in_turn() -> None:
    buffer = Buffer(3, 3, PLENTY, PLENTY, max_age=1, held_out=1e-9)
    judged = []
    for version in range(6):
        buffer.add(feature(version, 0, 0, LENGTH, version))
        judged.append(len(buffer.held_out()))
        assert buffer.draw(PLENTY, Random(0))
    assert judged == [0, 1, 0, 1, 0, 1]


def test_a_prompt_of_the_target_before_is_none_to_judge_by() -> None:
    buffer = Buffer(3, 3, PLENTY, PLENTY, max_age=1, held_out=1e-9)
    for group, version in ((1, 1), (2, 0), (3, 0)):
        buffer.add(feature(group, 0, 0, LENGTH, version))
    assert not buffer.held_out()
    assert len(buffer.draw(PLENTY, Random(0))) == 3
    buffer.add(feature(4, 0, 0, LENGTH, 1))
    assert len(buffer.held_out()) == 1


def test_a_prompt_that_came_with_one_request_serves_its_group() -> None:
    buffer = Buffer(3, 3, PLENTY, PLENTY, held_out=0)
    buffer.add(feature(1, 0, 0, 9, version=0))
    buffer.add(feature(1, 1, 5, 11, version=0))
    assert sorted((run.first, len(run.tokens)) for run in buffer.draw(PLENTY, Random(0))) == [(0, 9), (0, 11)]
    assert buffer.nbytes == (5 + 4 + 6) * ROW_BYTES


def test_duplicates_take_no_room() -> None:
    buffer = Buffer(3, 3, PLENTY, PLENTY)
    for _ in range(3):
        buffer.add(feature(1, 0, 2, 9, version=0))
    assert buffer.nbytes == 7 * ROW_BYTES
    assert buffer.dropped["known"] == 4  # prompt's part and response's, twice


def test_a_piece_that_contradicts_its_request_is_dropped() -> None:
    buffer = Buffer(3, 3, PLENTY, PLENTY)
    good = feature(1, 0, 6, 10, version=0)
    buffer.add(good)
    buffer.add(replace(good, tokens=good.tokens + 1, target_version=1))
    assert buffer.dropped == {"contradiction": 1}


def test_features_of_another_model_are_refused() -> None:
    buffer = Buffer(9, 3, PLENTY, PLENTY)
    with pytest.raises(WireError, match=r"states \(4, 3\) .*this trainer's has 9 and 3"):
        buffer.add(feature(1, 0, 0, 4, version=0))


def test_of_the_step_before_the_long_sequences_stay() -> None:
    buffer = Buffer(3, 3, 40 * ROW_BYTES, PLENTY, held_out=0)
    for member, stop in enumerate((8, 14, 7, 13, 9)):
        buffer.add(feature(member, 0, 5, stop, version=0))
    for member in range(5, 10):
        buffer.add(feature(member, 0, 5, 9, version=1))
    lengths = [len(run.tokens) for run in buffer.draw(PLENTY, Random(0)) if run.states[0, 2] == 0]
    assert sorted(lengths) == [8, 9]


def test_a_draw_mixes_two_steps_by_share() -> None:
    buffer = Buffer(3, 3, PLENTY, PLENTY, held_out=0)
    for group in range(40):
        buffer.add(feature(group, 0, 4, 14, version=0))
    for group in range(40, 80):
        buffer.add(feature(group, 0, 4, 9, version=1))

    def before(runs: list[Run]) -> int:
        return sum(run.entries for run in runs if run.states[0, 2] == 0)

    drawn = [buffer.draw(100, Random(seed), earlier=0.25) for seed in range(300)]
    assert sum(map(before, drawn)) / 300 == pytest.approx(25, abs=1)
    runs = drawn[0]
    assert sum(run.entries for run in runs) == 100
    assert len(pack(runs, 100, torch.device("cpu"))) == 1
    assert before(buffer.draw(300, Random(0), earlier=0.25)) >= 140  # this step has 160 in all


def test_long_responses_of_two_steps_are_mixed_by_share_too() -> None:
    """A window of either is all that is drawn."""
    buffer = Buffer(3, 3, PLENTY, 64, held_out=0)
    at = torch.arange(500)
    for version in range(2):
        states = torch.full((500, 3), float(version))
        buffer.add(Feature(f"{version}", version, 1, 0, at, states, version))
    drawn = [buffer.draw(64, Random(seed), earlier=0.25) for seed in range(400)]
    shares = [sum(run.entries for run in runs if run.states[0, 0] == 0) / 64 for runs in drawn]
    assert sum(shares) / 400 == pytest.approx(0.25, abs=0.07)


def test_as_many_requests_are_held_out_as_a_judgement_takes_of_many_prompts() -> None:
    buffer = Buffer(3, 3, PLENTY, PLENTY, held_out=1e-9, judged=4)
    for group in range(40):
        buffer.add(feature(group, 0, 0, LENGTH, version=0))
    assert len({run.request for run in buffer.held_out()}) == 4
    few = Buffer(3, 3, PLENTY, PLENTY, held_out=1e-9, judged=4)
    for group in range(4):
        few.add(feature(group, 0, 0, LENGTH, version=0))
    assert len(few.held_out()) == 1
    assert len(few.draw(PLENTY, Random(0))) == 3


def test_what_is_judged_by_is_of_many_long_responses() -> None:
    buffer = Buffer(1, 1, PLENTY, 4096, held_out=1 - 1e-9)
    at = torch.arange(10_000)
    for number in range(12):
        buffer.add(Feature(str(number), number, 5, 0, at, at[:, None].float(), 0))
    assert len({run.request for run in buffer.held_out(8192)}) > 5


def test_long_sequences_of_the_step_before_come_more_often() -> None:
    buffer = Buffer(3, 3, PLENTY, PLENTY, held_out=0)
    buffer.add(feature(0, 0, 5, 14, version=0))
    buffer.add(feature(1, 0, 5, 8, version=0))
    buffer.advance(1)
    first = [buffer.draw(1, Random(seed), earlier=1)[0].states[0, 0] < 10 for seed in range(2000)]
    assert sum(first) / 2000 == pytest.approx(9 / 12, abs=0.04)
