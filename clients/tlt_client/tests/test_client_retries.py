"""What happens to a request that fails: how often it is sent, what is aborted, and that one rollout comes of it."""

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_stand_in import (
    ABORT,
    Act,
    drop_after_reading,
    drop_before_reading,
    drop_in_the_middle,
    rollout,
    says,
    serving,
    until_aborted,
    well,
)

from tlt_client import (
    Aborted,
    BadRequest,
    ConnectionLost,
    InvalidArgument,
    ProtocolError,
    Retry,
    ServerError,
    ServerUnavailable,
    Timeout,
    TltClientError,
    Unauthorized,
    VersionConflict,
)
from tlt_client.flow import Read, Reply
from tlt_client.session import Session

Connect = Callable[..., Any]

FULL = says(503, {"object": "error", "message": "The request queue is full."})
RAN_OUT = says(503, {"object": "error", "message": "Request running timeout reached."})


class Mended(NamedTuple):
    name: str
    acts: list[Act]
    resamples: int
    read: int
    """/generate requests that the server read."""
    aborted: int
    stream: bool = False


MENDED = [
    Mended("well", [], 0, 1, 0),
    Mended("dropped before reading", [drop_before_reading], 1, 1, 1),
    Mended("dropped after reading", [drop_after_reading], 1, 2, 1),
    Mended("dropped twice", [drop_after_reading, drop_after_reading], 2, 3, 2),
    Mended("queue full", [FULL, FULL], 0, 3, 0),
    Mended("queue full, then dropped", [FULL, drop_after_reading], 1, 3, 1),
    Mended("proxy lost its server", [says(502, "<html>Bad Gateway</html>")], 1, 2, 1),
    Mended("proxy lost patience", [says(504, "")], 1, 2, 1),
]
MENDED += [case._replace(name=f"{case.name}, streaming", stream=True) for case in MENDED]
# A stream that breaks off after a chunk is not mended but raised: test_client_streams.
MENDED += [Mended("dropped in the middle of the answer", [drop_in_the_middle], 1, 2, 1)]


@pytest.mark.parametrize("case", MENDED, ids=lambda case: case.name)
def test_a_failure_is_mended_and_one_rollout_comes_of_it(connect: Connect, case: Mended) -> None:
    with serving(*case.acts) as server:
        client = connect(server.url)
        given = client.stream("abc", rid="r")[-1].rollout if case.stream else client.generate("abc", rid="r")
        assert (given.text, given.resamples) == ("abc", case.resamples)
        assert len(server.rids) == case.read
        assert given.rid == server.rids[-1] == (f"~resample{case.resamples}-r" if case.resamples else "r")
        # The abort of a lost request reaches the server before the one that takes its place, and cannot hit it.
        assert server.aborted == ["r", "~resample1-r"][: case.aborted]
        assert not any(given.rid.startswith(rid) for rid in server.aborted)
        assert len(client.pauses) == len(case.acts)


DETAIL = {"detail": [{"loc": ["body", "sampling_params"], "msg": "is wrong", "type": "x"}]}


class Raised(NamedTuple):
    name: str
    act: Act
    error: type[TltClientError]
    message: str
    read: int = 1
    aborted: int = 0


RAISED = [
    Raised("400, OpenAI's shape", says(400, {"error": {"message": "too long"}}), BadRequest, "400: too long"),
    Raised("400, SGLang's shape", says(400, {"object": "error", "message": "bad"}), BadRequest, "400: bad"),
    Raised("422, FastAPI's shape", says(422, DETAIL), BadRequest, "body.sampling_params: is wrong"),
    Raised("404, FastAPI's shape", says(404, {"detail": "Not Found"}), BadRequest, "Not Found"),
    Raised("429 is a 4xx", says(429, "slow down", retry_after="0"), BadRequest, "slow down"),
    Raised("401", says(401, {"error": "Unauthorized"}), Unauthorized, "Unauthorized"),
    Raised("403", says(403, {"error": "Forbidden"}), Unauthorized, "Forbidden"),
    Raised("409", says(409, {"detail": "version 4 is live"}), VersionConflict, "version 4"),
    Raised("499", says(499, {"error": {"message": "Request r was aborted"}}), Aborted, "was aborted"),
    Raised("500", says(500, "Internal Server Error"), ServerError, "500: Internal"),
    Raised("503, sampled and thrown away", RAN_OUT, Timeout, "running timeout", 1, 1),
    Raised("301", says(301, "", location="/elsewhere"), ProtocolError, "301"),
    Raised("not JSON", says(200, "<html>"), ProtocolError, "cannot be read"),
    Raised("a list", says(200, []), ProtocolError, "Expected `object`"),
    Raised("no meta_info", says(200, {"text": "", "output_ids": []}), ProtocolError, "`meta_info`"),
    Raised("no output_ids", lambda h, f: h.answer(200, rollout(f, [1], ABORT) | {"output_ids": None}), ProtocolError,
           "`output_ids`"),
    Raised("no id", says(200, {"meta_info": {"completion_tokens": 1}}), ProtocolError, "`id`"),
    Raised("counts that disagree", lambda h, f: h.answer(200, rollout(f, [1, 2], ABORT, completion_tokens=3)),
           ProtocolError, "`completion_tokens` is 3"),
    Raised("503 for ever", FULL, ServerUnavailable, "queue is full", 3, 0),
    Raised("dropped for ever", drop_after_reading, ConnectionLost, "the connection broke", 2, 2),
]  # fmt: skip


@pytest.mark.parametrize("case", RAISED, ids=lambda case: case.name)
def test_an_error_is_raised_after_as_many_requests_as_make_sense(connect: Connect, case: Raised) -> None:
    with serving(*[case.act] * 9) as server:
        client = connect(server.url, retry=Retry(attempts=3, resamples=1))
        with pytest.raises(case.error, match=case.message) as raised:
            client.generate("abc")
        assert type(raised.value) is case.error
        assert (len(server.rids), len(server.aborted)) == (case.read, case.aborted)


def test_no_connection_is_retried_with_growing_pauses_and_then_raised(connect: Connect) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        client = connect(url, retry=Retry(attempts=5, first_pause_s=0.5, longest_pause_s=2))
        with pytest.raises(ServerUnavailable, match=f"{url}/generate.*is the server up"):
            client.generate("abc")
        assert client.pauses == [0.5, 1, 2, 2]
        assert client.health() is False
        with pytest.raises(ServerUnavailable):
            client.status()


@pytest.mark.parametrize(("header", "pause"), [("7", 7.5), ("900", 30.5), ("Wed, 21 Oct 2026 07:28:00 GMT", 0.5)])
def test_retry_after_is_waited_for(connect: Connect, header: str, pause: float) -> None:
    with serving(says(503, "", retry_after=header)) as server:
        client = connect(server.url)
        assert client.generate("abc").text == "abc"
        assert client.pauses == [pause]


def test_a_pause_that_the_deadline_does_not_allow_is_not_begun(connect: Connect) -> None:
    with serving(says(503, "", retry_after="20")) as server:
        client = connect(server.url)
        with pytest.raises(ServerUnavailable) as raised:
            client.generate("abc", deadline_s=10)
        assert client.pauses == []
        assert raised.value.retry_after_s == 20


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["deadline_s", "read_timeout_s"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_out_of_time_is_aborted_and_not_sent_again(
    connect: Connect, limit: str, stream: bool
) -> None:
    with serving(until_aborted) as server:
        client = connect(server.url, **({limit: 0.2} if limit == "read_timeout_s" else {}))
        with pytest.raises(Timeout, match="no answer in the time"):
            getattr(client, "stream" if stream else "generate")(
                "abc", rid="slow", deadline_s=0.2 if limit == "deadline_s" else None
            )
        assert (server.rids, server.aborted) == (["slow"], ["slow"])


def test_an_answer_that_drips_past_the_deadline_is_out_of_time(connect: Connect) -> None:
    ticks = iter(range(100))
    with serving() as server:
        client = connect(server.url, clock=lambda: float(next(ticks)))
        with pytest.raises(Timeout, match="while the answer was coming in"):
            client.generate("abc", deadline_s=2.5)
        assert server.aborted == server.rids


def test_an_abort_that_fails_does_not_stop_the_resampling(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.path)
        if seen == ["/generate"]:
            raise httpx.ReadError("gone", request=request)
        if request.url.path == "/abort_request":
            return httpx.Response(401, json={"error": "Unauthorized"})
        fields = httpx.Response(200, content=request.content).json()
        return httpx.Response(200, json=rollout(fields, [65], {"type": "length", "length": 1}))

    seen: list[str] = []

    class Both(httpx.MockTransport, httpx.AsyncBaseTransport):
        pass

    given = connect("http://server", transport=Both(handler)).generate("A")
    assert (given.text, given.resamples, given.finish_reason.length) == ("A", 1, 1)
    assert seen == ["/generate", "/abort_request", "/generate"]
    assert "could not abort" in caplog.text


def test_a_rollout_that_somebody_aborts_is_returned_as_far_as_it_came(connect: Connect) -> None:
    in_queue = {"text": "", "output_ids": [], "meta_info": {"id": "q", "finish_reason": ABORT, "completion_tokens": 0}}
    with serving(lambda h, f: h.answer(200, rollout(f, [65, 66], ABORT)), says(200, in_queue)) as server:
        client = connect(server.url)
        partial, nothing = client.generate("abc"), client.generate("abc")
        assert (partial.aborted, partial.text, partial.prompt_tokens) == (True, "AB", 7)
        assert (nothing.aborted, nothing.tokens, nothing.prompt_tokens) == (True, (), 0)


def test_a_batch_is_given_up_without_a_time_out_for_each_sample() -> None:
    """A flow needs no server: what it wants is what it yields."""
    session = Session()
    samples = session.samples(["a", "b", "c"], None, logprobs=False, deadline_s=None, extra=None, version=None)
    samples[1].in_flight = samples[2].in_flight = True
    for outcome, calls in (("told", 2), ("unreachable", 1)):
        flow, asked = session.abandon(samples), []
        with suppress(StopIteration):
            step = next(flow)
            while True:
                asked.append(step)
                if outcome == "unreachable":
                    flow.throw(httpx.ConnectTimeout("", request=httpx.Request("POST", "http://server")))
                reply = Reply(httpx.Response(200), iter(()))
                read = flow.send(reply)
                assert read == Read(reply)
                step = flow.send(b"")
        assert len(asked) == calls
        assert all(sample.dropped for sample in samples)


@given(st.integers(1, 60), st.floats(0, 1e6), st.floats(0, 1, exclude_max=True))
def test_pauses_stay_between_what_was_asked_and_twice_the_longest(attempt: int, asked: float, draw: float) -> None:
    retry = Retry(longest_pause_s=20)
    assert min(asked, 20) <= retry.pause_s(attempt, asked, draw) <= 40


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"resamples": -1}, {"first_pause_s": 31}, {"first_pause_s": -1}])
def test_a_retry_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=str(next(iter(wrong.values())))):
        Retry(**wrong)


def test_the_stand_in_misbehaves_as_it_says() -> None:
    """Were a drop no drop, the table above would prove nothing."""
    with serving(drop_before_reading, drop_after_reading, drop_in_the_middle, well) as server, httpx.Client() as http:
        for _ in range(3):
            with pytest.raises(httpx.TransportError):
                http.post(server.url + "/generate", json={"rid": "a", "text": "abc", "stream": False})
        assert len(server.rids) == 2
        assert http.post(server.url + "/generate", json={"rid": "a", "text": "abc", "stream": False}).is_success
