"""Streams: the same rollout however it is cut, and what happens when one breaks off."""

import asyncio
import json
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_stand_in import (
    ABORT,
    drop_in_the_middle,
    events_of,
    rollout,
    sampled,
    serving,
    stream_of,
    stream_until_hung_up,
    streams,
    text_of,
)

from tlt_client import (
    Aborted,
    AsyncClient,
    BadRequest,
    Client,
    ConnectionLost,
    ProtocolError,
    ServerError,
    ServerUnavailable,
    Timeout,
    TltClientError,
)
from tlt_client.streams import ChunkReader

Connect = Callable[..., Any]


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_stream_gives_what_is_new_and_at_its_end_the_whole(
    connect: Connect, incremental: bool, logprobs: bool
) -> None:
    with serving(stream_of(incremental=incremental)) as server:
        client = connect(server.url)
        chunks = client.stream("abcde", logprobs=logprobs)
        whole = client.generate("abcde", logprobs=logprobs)
    assert [chunk.text for chunk in chunks] == ["ab", "cd", "e"]
    assert [chunk.tokens for chunk in chunks] == [(97, 98), (99, 100), (101,)]
    assert [chunk.logprobs for chunk in chunks] == (
        [(-0.097, -0.098), (-0.099, -0.1), (-0.101,)] if logprobs else [None] * 3
    )
    assert [chunk.rollout is None for chunk in chunks] == [True, True, False]
    last = chunks[-1].rollout
    assert (last.text, last.tokens, last.logprobs, last.finish_reason) == (
        whole.text, whole.tokens, whole.logprobs, whole.finish_reason
    )  # fmt: skip


# Line and paragraph separators, NEL: str.splitlines would cut JSON at each, and the JSON does not escape them.
TOKENS = st.lists(st.one_of(st.sampled_from([0x2028, 0x2029, 0x85, 10, 13, 34, 92, 0x1F600]), st.integers(32, 126)))


@given(tokens=TOKENS, incremental=st.booleans(), step=st.integers(1, 5), cut=st.integers(1, 50))
def test_a_stream_is_read_the_same_wherever_its_bytes_are_cut(
    tokens: list[int], incremental: bool, step: int, cut: int
) -> None:
    fields = {"rid": "r", "return_logprob": True}
    events = events_of(fields, tokens, incremental, step)
    raw = (
        "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events).encode() + b"data: [DONE]\n\n"
    )
    reader = ChunkReader(logprobs=True, resamples=0)
    chunks = [chunk for start in range(0, len(raw), cut) for chunk in reader.feed(raw[start : start + cut])]
    reader.end()
    assert [t for chunk in chunks for t in chunk.tokens] == tokens
    assert "".join(chunk.text for chunk in chunks) == text_of(tokens)
    whole = chunks[-1].rollout
    assert whole is not None
    assert (list(whole.tokens), whole.text) == (tokens, text_of(tokens))
    assert whole.logprobs == tuple(-t / 1000 for t in tokens)


def test_an_abort_of_a_waiting_request_repeats_the_text_and_the_last_token() -> None:
    """Its event is unlike the others (`TokenizerManager._handle_abort_req`): nothing must be counted twice."""
    fields = {"rid": "r"}
    for incremental in (False, True):
        last = {"id": "r", "finish_reason": ABORT, "completion_tokens": 3}
        first = rollout(fields, [65, 66, 67], None)
        events = [first, {"text": "ABC", "output_ids": [67], "meta_info": last}]
        if incremental:
            second = rollout(fields, [65, 66, 67], None) | {"text": "C", "output_ids": [67]}
            events[:1] = [rollout(fields, [65, 66], None), second]
        reader = ChunkReader(logprobs=False, resamples=0)
        chunks = [chunk for event in events for chunk in reader.feed(f"data: {json.dumps(event)}\n".encode())]
        assert "".join(chunk.text for chunk in chunks) == "ABC"
        whole = chunks[-1].rollout
        assert whole is not None
        assert (whole.tokens, whole.text, whole.aborted) == ((65, 66, 67), "ABC", True)


def test_an_abort_of_a_running_request_ends_an_incremental_stream() -> None:
    fields = {"rid": "r"}
    events = [rollout(fields, [65, 66], None), rollout(fields, [65, 66, 67], ABORT) | {"text": "C", "output_ids": [67]}]
    reader = ChunkReader(logprobs=False, resamples=0)
    chunks = [chunk for event in events for chunk in reader.feed(f"data: {json.dumps(event)}\n".encode())]
    assert [chunk.text for chunk in chunks] == ["AB", "C"]
    assert chunks[-1].rollout is not None
    assert chunks[-1].rollout.aborted


def error(code: int) -> dict[str, Any]:
    return {"error": {"message": "no good", "type": "invalid_request_error", "code": code, "retryable": False}}


def ended(fields: dict[str, Any], status: int) -> dict[str, Any]:
    return rollout(fields, [], {**ABORT, "status_code": status, "message": "no good"})


BROKEN = [
    ("a refused request", streams(error(400)), BadRequest, "400: no good", 0),
    ("aborted before it ran", streams(error(499)), Aborted, "no good", 0),
    ("a failed request", streams(lambda f: ended(f, 500)), ServerError, "no good", 0),
    ("a wrong one", streams(lambda f: ended(f, 400)), BadRequest, "no good", 0),
    ("no JSON", streams("{"), ProtocolError, "cannot be read", 0),
    ("no event of ours", streams({"choices": []}), ProtocolError, "`meta_info`", 0),
    ("fewer tokens than before", streams(lambda f: rollout(f, [65, 66], None), lambda f: rollout(f, [65], None)),
     ProtocolError, "from 2 to 1", 1),
    ("tokens that never came", streams(lambda f: rollout(f, [65], None, completion_tokens=2)), ProtocolError,
     "from 0 to 2", 0),
    ("another text than before", streams(lambda f: rollout(f, [65], None), lambda f: rollout(f, [66, 67], None)),
     ProtocolError, "repeats the text otherwise", 1),
    ("an end before the end", streams(lambda f: rollout(f, [65], None)), ConnectionLost, "after 1 tokens", 1),
    ("a broken connection", drop_in_the_middle, ConnectionLost, "the connection broke", 1),
    ("thrown away in the middle", streams(lambda f: rollout(f, [65], None), lambda f: ended(f, 503)),
     ServerUnavailable, "no good", 0),
]  # fmt: skip


@pytest.mark.parametrize(("act", "kind", "message", "aborted"), [c[1:] for c in BROKEN], ids=[c[0] for c in BROKEN])
def test_a_stream_that_breaks_off_is_raised_and_never_begun_again(
    connect: Connect, act: Any, kind: type[TltClientError], message: str, aborted: int
) -> None:
    with serving(act) as server:
        with pytest.raises(kind, match=message):
            connect(server.url).stream("abc")
        assert (len(server.rids), len(server.aborted)) == (1, aborted)


def test_a_stream_refused_for_a_full_queue_is_begun_again(connect: Connect) -> None:
    """SGLang says 503 inside a stream that is a 200 to HTTP."""
    with serving(streams(lambda f: ended(f, 503)), streams()) as server:
        client = connect(server.url)
        assert client.stream("abc")[-1].rollout.resamples == 1
        assert (len(server.rids), len(server.aborted), len(client.pauses)) == (3, 1, 2)


def test_leaving_a_stream_hangs_up_at_once() -> None:
    async def leave(url: str) -> None:
        async with AsyncClient(url) as client, aclosing(client.stream("abc")) as chunks:
            async for _ in chunks:
                break

    with serving(stream_until_hung_up, stream_until_hung_up) as server:
        with Client(server.url) as client:
            for _ in client.stream("abc"):
                break
        server.wait_until(lambda: server.aborted == server.rids and len(server.rids) == 1)
        asyncio.run(leave(server.url))
        server.wait_until(lambda: server.aborted == server.rids and len(server.rids) == 2)


def test_the_deadline_of_a_stream_holds_while_tokens_come(connect: Connect) -> None:
    with serving(stream_until_hung_up) as server:
        with pytest.raises(Timeout, match="while the answer was coming in"):
            connect(server.url).stream("abc", rid="r", deadline_s=0.15)
        server.wait_until(lambda: server.running == 0)
        assert set(server.aborted) == {"r"}


def test_the_stand_in_samples_what_it_is_given() -> None:
    assert sampled({"text": "AB"}) == sampled({"input_ids": [65, 66]}) == [65, 66]
