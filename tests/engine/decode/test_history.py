"""The history of one rank: what running requests say goes in, as it stays, and drafts come out."""

from array import array
from types import SimpleNamespace as Made
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tlt_client.schemas import HistoryLoad

from benchmarks.lib.history.host import Request
from tlt_server.config import Arm
from tlt_server.engine.decode.history import Histories
from tlt_server.errors import ConfigError
from tlt_server.history.index import PAGE, Drafts

PROMPT, STEPS = [3, 1, 4, 1, 5], 7
SAID = [9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]


def request(slot: int, prompt: list[int] = PROMPT, rid: str = "r", **custom: Any) -> Any:
    params = Made(custom_params={"tlt_history": [custom["mode"], custom.get("namespace", "")]} if custom else None)
    ids = array("q", prompt)
    return Request(
        req_pool_idx=slot,
        rid=rid,
        origin_input_ids=ids,
        output_ids=array("q"),
        sampling_params=params,
        input_embeds=None,
        grammar=None,
    )


def histories(capacity: int = 1 << 12, **more: Any) -> Histories:
    return Histories(capacity, slots=64, deepest=STEPS, **more)


def result(tokens: list[int], arm: Arm | None = None) -> Any:
    """Of one request."""
    accepted = torch.tensor([len(tokens)], dtype=torch.int32)
    copied = Made(synchronize=lambda: None)
    return Made(arm=arm, copy_done=copied, next_token_ids=torch.tensor(tokens), accept_lens=accepted)


def says(history: Histories, req: Any, *steps: list[int], arm: Arm | None = None) -> None:
    """Decode steps that give it these tokens, one after another."""
    for tokens in steps:
        launched = result(tokens, arm)
        history.launched([req], launched)
        history.credited([(req, len(tokens))], launched)
        req.output_ids.extend(tokens)


def begun(history: Histories, *reqs: Any, first: int = SAID[0]) -> None:
    """Prefilled, which gives a token; a chunk before it gives none."""
    history.begin(reqs)
    for count in (0, 1):
        launched = result([first] * len(reqs))
        launched.accept_lens = None
        history.launched(reqs, launched, prefill=True)
        history.credited([(req, count) for req in reqs], launched)
        for req in reqs:
            req.output_ids.extend([first] * count)


def drafts_of(history: Histories, *reqs: Any) -> list[list[int]]:
    drafts: Drafts = history.draft(reqs, STEPS)
    return [row[:length].tolist() for row, length in zip(drafts.tokens, drafts.lengths, strict=True)]


def test_siblings_are_drafted_from() -> None:
    history, first, second = histories(), request(0), request(1)
    history.begin([first, second])
    assert drafts_of(history, first, second) == [[], []]
    says(history, first, SAID[:1], SAID[1:9], SAID[9:])
    says(history, second, SAID[:1])
    assert drafts_of(history, second) == [SAID[1:8]]
    says(history, second, SAID[1:4], [0])
    assert drafts_of(history, second) == [[]], "it went on otherwise"
    assert history.describe().written == len(SAID) + 5


def test_a_prompt_of_its_own() -> None:
    history = histories()
    first, other = request(0), request(1, [*PROMPT, 0])
    elsewhere, here = request(2, mode="both", namespace="there"), request(3, mode="both")
    begun(history, first, other, elsewhere, here)
    says(history, first, SAID[1:])
    assert drafts_of(history, other, elsewhere, here) == [[], [], SAID[1:8]]


def test_what_was_sampled_before_is_no_part_of_the_prompt() -> None:
    history, first, rest = histories(), request(0), request(1, [*PROMPT, *SAID[:6]])
    rest.sampling_params.custom_params = {"generated_tokens": 6}
    history.begin([first, rest])
    says(history, first, SAID)
    assert drafts_of(history, rest) == [SAID[6:13]]


def test_who_reads_and_who_writes() -> None:
    history = histories()
    none, read, write, health = (
        *(request(slot, mode=mode) for slot, mode in enumerate(("none", "read", "write"))),
        request(3, rid="HEALTH_CHECK_1"),
    )
    history.begin([none, read, write, health])
    for req in (none, read, health):
        says(history, req, [0] * 9)
    assert history.describe().tokens == 0
    says(history, write, SAID)
    fresh = [request(4, mode="write"), request(5, mode="none"), request(6, mode="read")]
    begun(history, *fresh)
    assert drafts_of(history, *fresh) == [[], [], SAID[1:8]]
    says(history, fresh[2], SAID[1:4])
    assert drafts_of(history, fresh[2]) == [SAID[4:11]], "what it says itself leads on"
    assert history.describe().tokens == len(SAID) + 1


def test_only_what_stays_is_taken_in() -> None:
    """Neither what comes behind an end, nor what a grammar takes back."""
    history, ended, cut = histories(), request(0), request(1, [7])
    cut.grammar = Made()
    history.begin([ended, cut])
    says(history, ended, [1, 2, 3, 4])
    ended.finished_len, ended.finished_reason = 2, "stop"
    says(history, cut, SAID[:6])
    history.settle()
    del cut.output_ids[3:]
    says(history, cut, SAID[3:5])
    assert history.describe().written == 2 + 6
    after = [request(2), request(3, [7])]
    begun(history, after[0], first=1)
    begun(history, after[1])
    assert drafts_of(history, *after) == [[2], SAID[1:6]]


def test_a_retracted_request_goes_on_where_it_was() -> None:
    history, first, second = histories(), request(0), request(1)
    history.begin([first, second])
    says(history, first, SAID)
    says(history, second, SAID[:5])
    history.settle()
    second.req_pool_idx = None
    other = request(1, [8, 8])
    history.begin([other])
    second.req_pool_idx = 2
    history.begin([second])
    assert drafts_of(history, second, other) == [SAID[5:12], []]


def test_under_overlap_the_step_before_is_waited_for() -> None:
    """Its result is not processed when the next one is launched, nor is it taken in twice."""
    history, first, second = histories(), request(0), request(1)
    history.begin([first, second])
    says(history, first, SAID)
    waited: list[int] = []
    width = STEPS + 1
    rows = torch.zeros(2, width, dtype=torch.int32)
    rows[1, :3] = torch.tensor(SAID[:3])
    rows[0, 0] = 1
    launched = Made(
        arm=Arm.history(STEPS),
        next_token_ids=rows.flatten(),
        accept_lens=torch.tensor([1, 3], dtype=torch.int32),
        copy_done=Made(synchronize=lambda: waited.append(1)),
    )
    history.launched([first, second], launched)
    assert drafts_of(history, second) == [SAID[3:10]]
    assert waited == [1]
    history.credited([(first, 1), (second, 3)], launched)
    first.output_ids.append(1)
    second.output_ids.extend(SAID[:3])
    assert drafts_of(history, second) == [SAID[3:10]]
    assert history.describe().written == len(SAID) + 4
    assert history.describe().accepted == 2


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(1, STEPS + 1), min_size=4, max_size=4), max_size=12),
    st.sampled_from(["overlap", "one by one"]),
    st.sets(st.integers(0, 11)),
)
def test_all_that_stays_is_taken_in_once(counts: list[list[int]], way: str, heard: set[int]) -> None:
    """Of requests that are written as they come, of one with a grammar, one that only reads and one that takes no part;
    heard before they are credited, or not."""
    history, texts = histories(), np.arange(4 * 200).reshape(4, 200)
    plain, bound, reads, none = reqs = [request(0), request(1), request(2, mode="read"), request(3, mode="none")]
    bound.grammar = Made()
    history.begin(reqs)
    under_way: list[Any] = []

    def credit() -> None:
        launched, lengths = under_way.pop(0)
        history.credited(list(zip(reqs, lengths, strict=True)), launched)
        for req, text, length in zip(reqs, texts, lengths, strict=True):
            req.output_ids.extend(text[len(req.output_ids) :][:length].tolist())

    for number, lengths in enumerate(counts):
        if number in heard:
            history.draft(reqs, STEPS)
        said = [len(req.output_ids) + sum(each[1][row] for each in under_way) for row, req in enumerate(reqs)]
        rows = np.stack([text[at : at + STEPS + 1] for text, at in zip(texts, said, strict=True)])
        made = result([0])
        made.next_token_ids, made.accept_lens = torch.from_numpy(rows.ravel()), torch.tensor(lengths, dtype=torch.int32)
        history.launched(reqs, made)
        under_way.append((made, lengths))
        if way == "one by one" or number:
            credit()
    while under_way:
        credit()
    assert history.describe().written == len(plain.output_ids) + len(bound.output_ids)
    for req, text in zip((plain, bound) if counts else (), texts, strict=False):
        sibling = request(9)
        history.begin([sibling])
        says(history, sibling, text[:2].tolist())
        assert drafts_of(history, sibling) == [text[2 : min(len(req.output_ids), 2 + STEPS)].tolist()]
    for req, text in zip((plain, bound, reads), texts, strict=False):
        assert history._told[req.tlt_response.slot] == len(req.output_ids), text
    assert none.tlt_response.asked.mode == "none"


def test_results_that_never_come_are_forgotten() -> None:
    history, first, second = histories(), request(0), request(1)
    begun(history, first, second)
    says(history, first, SAID[1:])
    lost = Made(
        arm=None,
        next_token_ids=torch.tensor([0]),
        accept_lens=None,
        copy_done=Made(synchronize=lambda: None),
    )
    history.launched([second], lost)
    for token in SAID[1:6]:
        says(history, second, [token])
    assert drafts_of(history, second) == [SAID[6:13]]


def test_what_is_foreseen_is_of_the_present_requests() -> None:
    history, first = histories(), request(0)
    assert history.foreseen() is None
    history.begin([first])
    assert history.foreseen() == [1.0] * STEPS
    says(history, first, SAID)
    first.finished_reason = "stop"
    second = request(1)
    begun(history, second)
    lengths = history.foreseen()
    assert lengths is not None
    assert 1 < lengths[0] < lengths[-1] < 1 + STEPS
    assert history.foreseen() is None, "nothing has come since"
    told = []
    for token in SAID[1:9]:
        says(history, second, [token])
        told.append(history.foreseen())
    assert sum(each is not None for each in told) == 2, "once in four steps is soon enough"
    again = next(each for each in reversed(told) if each is not None)
    assert again[-1] > lengths[-1], "they came as they were drafted"
    history.begin([request(2, mode="none")])
    diluted = history.foreseen()
    assert diluted is not None
    assert diluted[-1] < again[-1]


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 2), min_size=1, max_size=9)), max_size=60),
    st.sets(st.integers(0, 60)),
    st.sets(st.integers(0, 60)),
)
def test_ranks_draft_alike(steps: list[tuple[int, list[int]]], looks: set[int], publications: set[int]) -> None:
    """Though but one of them looks ahead, both forget, and weights change behind a look."""
    version = [0]
    ranks = [histories(4 * PAGE, version=lambda: version[0]) for _ in range(2)]
    running = [[request(slot) for slot in range(6)] for _ in range(2)]
    for history, reqs in zip(ranks, running, strict=True):
        history.begin(reqs)
    for number, (place, tokens) in enumerate(steps):
        for history, reqs in zip(ranks, running, strict=True):
            says(history, reqs[place], tokens)
        if number in looks:
            ranks[0].foreseen()
        version[0] += number in publications
        assert drafts_of(ranks[0], *running[0]) == drafts_of(ranks[1], *running[1])
    assert ranks[0].describe() == ranks[1].describe()
    assert ranks[0].describe().tokens <= 4 * PAGE


def test_a_long_response() -> None:
    history, req = histories(), request(0)
    history.begin([req])
    says(history, req, *([list(range(start, start + 1024)) for start in range(0, 1 << 17, 1024)]))
    assert drafts_of(history, req) == [[]]
    assert history.describe().written == 1 << 17
    assert history.describe().tokens <= 1 << 12


def test_what_others_said_and_what_is_forgotten() -> None:
    version = [4]
    history = histories(version=lambda: version[0])
    history.load(HistoryLoad(PROMPT, [SAID, [5]], version=2), 10)
    history.load(HistoryLoad(PROMPT, [SAID], namespace="a"), 10)
    reqs = [request(0), request(1, mode="read", namespace="a"), request(2, mode="read", namespace="b")]
    begun(history, *reqs)
    assert drafts_of(history, *reqs) == [SAID[1:8], SAID[1:8], []]
    with pytest.raises(ConfigError, match="token 10: the model has 10"):
        history.load(HistoryLoad(PROMPT, [[1], [10]]), 10)
    says(history, reqs[1], SAID[1:3])
    history.forget("a")
    assert drafts_of(history, *reqs) == [SAID[1:8], [], []]
    history.forget(None)
    assert drafts_of(history, *reqs) == [[], [], []]
    assert history.describe().tokens == 0
    says(history, reqs[0], SAID[1:9])
    late = request(9)
    begun(history, late, first=SAID[1])
    assert drafts_of(history, late) == [[]], "a context of one token is none"
    says(history, late, SAID[2:4])
    assert drafts_of(history, late) == [SAID[4:9]]


def test_versions_are_those_that_said_it() -> None:
    version = [0]
    history, req = histories(version=lambda: version[0]), request(0)
    history.begin([req])
    says(history, req, SAID[:8])
    history.settle()
    version[0] = 3
    says(history, req, SAID[8:])
    reader = request(9, mode="read")
    begun(history, reader)
    assert history.draft([reader], STEPS).versions.tolist() == [0]
    says(history, reader, SAID[1:10])
    assert history.draft([reader], STEPS).versions.tolist() == [3]
