"""What goes to the server and what comes back, where nothing fails; and what a batch does when something does."""

import asyncio
import pickle
import threading
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from sglang_stand_in import (
    DRAFTER,
    EVENT,
    LEARNED,
    STATUS,
    STRATEGY,
    drop_after_reading,
    rollout,
    says,
    serving,
    until_aborted,
    well,
)

from tlt_client import (
    Arm,
    AsyncClient,
    BadRequest,
    Client,
    Drafter,
    DrafterSpan,
    DrafterTrainer,
    DrafterUpdate,
    Event,
    InvalidArgument,
    Load,
    ProtocolError,
    Retry,
    SamplingParams,
    SelectionBucket,
    SharedTarget,
    SpecCounts,
    Speculation,
    Status,
    StrategyUpdate,
    TargetSpan,
    Timeout,
    VersionConflict,
)

Connect = Callable[..., Any]


def test_a_request_says_what_was_asked_and_nothing_else(connect: Connect) -> None:
    with serving() as server:
        client = connect(server.url + "/", api_key="key")
        client.generate("ab")
        client.generate(
            range(3, 6), SamplingParams(temperature=1.0, top_k=-1, logit_bias={5: 1.5}, stop=("x", "y")),
            logprobs=True, rid="mine", extra={"priority": 3},
        )  # fmt: skip
        first, second = server.bodies
        rid = first.pop("rid")
        assert len(rid) == 32
        assert first == {"text": "ab", "sampling_params": {}, "stream": False}
        assert second == {
            "input_ids": [3, 4, 5],
            "sampling_params": {"temperature": 1.0, "top_k": -1, "logit_bias": {"5": 1.5}, "stop": ["x", "y"]},
            "return_logprob": True,
            "rid": "mine",
            "priority": 3,
            "stream": False,
        }
        assert {key for *_, key in server.other} == {"Bearer key"}


def test_a_rollout_holds_all_that_the_server_says(connect: Connect) -> None:
    with serving() as server:
        given = connect(server.url).generate([65, 66, 2], logprobs=True)
    assert given.tokens == (65, 66, 2)
    assert given.logprobs == (-0.065, -0.066, -0.002)
    assert (given.finish_reason.type, given.finish_reason.matched) == ("stop", 2)
    assert (given.prompt_tokens, given.completion_tokens, given.cached_tokens) == (7, 3, 2)
    assert (given.weight_version, given.accept_length, given.spec, given.aborted) == ("default", None, None, False)


def test_a_rollout_may_need_a_version(connect: Connect) -> None:
    refusal = {"message": "weight_version 'step 7' is not in force: 'step 6' is, target_version 6"}
    with serving(well, well, well, well, says(409, refusal)) as server:
        client = connect(server.url)
        client.generate("ab")
        client.generate("ab", version="step 7")
        client.generate_group("ab", 1, version=0)
        client.stream("ab", version=7)
        assert server.versions == [
            {}, {"X-TLT-Weight-Version": "step 7"}, {"X-TLT-Target-Version": "0"}, {"X-TLT-Target-Version": "7"}
        ]  # fmt: skip
        with pytest.raises(VersionConflict, match="'step 6' is"):
            client.generate_batch(["ab"], version="step 7")
        for version in ("", "stępień", "a\nb"):
            with pytest.raises(InvalidArgument, match="printable ASCII"):
                client.generate("ab", version=version)
    assert len(server.bodies) == 5


NEW = {"spec_verify_ct": 2, "spec_num_correct_drafts": 1, "spec_num_proposed_drafts": 6}
OLD = {"spec_verify_ct": 2, "spec_accept_token_num": 1, "spec_draft_token_num": 6}


@pytest.mark.parametrize(
    ("meta", "accept_length", "spec"),
    [
        (NEW | {"spec_accept_length": 1.5}, 1.5, SpecCounts(2, 1, 6)),
        (OLD | {"spec_accept_length": 1.5}, 1.5, SpecCounts(2, 1, 6)),
        (NEW | OLD, 1.5, SpecCounts(2, 1, 6)),
        ({"spec_verify_ct": 2}, 1.5, None),
        ({"spec_verify_ct": 0}, None, None),
        ({}, None, None),
    ],
)
def test_speculation_is_read_under_its_old_and_new_names(
    connect: Connect, meta: dict[str, Any], accept_length: float, spec: SpecCounts | None
) -> None:
    with serving(lambda h, f: h.answer(200, rollout(f, [65, 66, 2], {"type": "stop"}, **meta))) as server:
        given = connect(server.url).generate("a")
    assert (given.accept_length, given.spec) == (accept_length, spec)


def test_versions_are_read_from_tlt_server_and_from_sglang(connect: Connect) -> None:
    theirs = {"version": "7", "start": 0, "end": 1}
    ours = {"version": "8", "target_version": 3, "partial": True, "start": 1, "end": 3}
    meta = {"weight_versions": [theirs, ours], "drafter_versions": [{"version": 2, "start": 0, "end": 3}]}
    with serving(lambda h, f: h.answer(200, rollout(f, [65, 66, 2], {"type": "stop"}, **meta))) as server:
        given = connect(server.url).generate("a")
    assert given.weight_versions == (TargetSpan(0, 1, "7"), TargetSpan(1, 3, "8", 3, partial=True))
    assert given.drafter_versions == (DrafterSpan(0, 3, 2),)


LOGPROBS = [
    (None, "no `output_token_logprobs`"),
    ([[-1.0, 65, None]], "1 `output_token_logprobs` are not of the 2 tokens"),
    ([[-1.0, 66, None], [-1.0, 65, None]], "not of the 2 tokens"),
    ([[-1.0, 65, None], [-1.0, 65, None], [-1.0, 65, None]], "3 `output_token_logprobs`"),
    ([[-1.0, 65, None], [None, 65, None]], "NaN or infinity"),
    ([[-1.0, 65]], "length 3"),
]


@pytest.mark.parametrize(("entries", "message"), LOGPROBS)
def test_logprobs_that_are_not_those_of_the_tokens_are_refused(connect: Connect, entries: Any, message: str) -> None:
    act = lambda h, f: h.answer(200, rollout(f, [65, 65], {"type": "stop"}, output_token_logprobs=entries))  # noqa: E731
    with serving(act) as server, pytest.raises(ProtocolError, match=message):
        connect(server.url).generate("a", logprobs=True)


def test_nothing_sampled_has_no_logprobs(connect: Connect) -> None:
    """SGLang sends an entry all the same, for the token that max_new_tokens=0 did not keep."""
    act = lambda h, f: h.answer(200, rollout(f, [], {"type": "length"}, output_token_logprobs=[[-1.0, 9, None]]))  # noqa: E731
    with serving(act) as server:
        assert connect(server.url).generate("a", logprobs=True).logprobs == ()


# -- batches --------------------------------------------------------------------------------------------------------


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
        assert sorted(b["sampling_params"]["sampling_seed"] for b in server.bodies) == [7, 8, 9]
        client.generate_group("abc", 2, logprobs=True)
        assert all("sampling_seed" not in b["sampling_params"] and b["return_logprob"] for b in server.bodies[3:])


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


# -- control --------------------------------------------------------------------------------------------------------


def test_control_routes(connect: Connect) -> None:
    with serving() as server:
        client = connect(server.url, api_key="user", admin_key="admin")
        assert client.health() is True
        assert client.status() == msgspec.convert(STATUS, Status)
        assert client.status().arm == Arm(3, 1, 4)
        assert client.server_info() == {"version": "0.5.17", "max_running_requests": 32}
        assert client.metrics() == "sglang:num_running_reqs 0.0\n"
        assert client.load() == Load(running=5, waiting=1)
        client.abort("r")
        client.abort_all()
        client.flush_cache()
        with pytest.raises(BadRequest, match="Flush cache failed"):
            client.flush_cache(1.5)
        assert [(method, path, fields, key) for method, path, fields, key in server.other][-4:] == [
            ("POST", "/abort_request", {"rid": "r"}, "Bearer admin"),
            ("POST", "/abort_request", {"abort_all": True}, "Bearer admin"),
            ("POST", "/flush_cache?timeout=0.0", {}, "Bearer admin"),
            ("POST", "/flush_cache?timeout=1.5", {}, "Bearer admin"),
        ]
        assert {key for method, *_, key in server.other if method == "GET"} == {"Bearer user"}


def test_the_routes_around_weights(connect: Connect) -> None:
    with serving() as server:
        client = connect(server.url, api_key="user", admin_key="admin")
        assert client.events(2) == [msgspec.convert(EVENT, Event)]
        for given in (
            client.drafter(),
            client.update_drafter(DrafterUpdate("/d/4", version=4, trained_on=2)),
            client.freeze_drafter(),
            client.set_watchdog("observe"),
        ):
            assert given == msgspec.convert(DRAFTER, Drafter)
        with pytest.raises(VersionConflict, match="no drafter to go back to"):
            client.roll_back_drafter()
        assert server.other[-4:] == [
            ("POST", "/tlt/v1/drafter/update", {"path": "/d/4", "version": 4, "trained_on": 2}, "Bearer admin"),
            ("POST", "/tlt/v1/drafter/freeze", {"frozen": True}, "Bearer admin"),
            ("PUT", "/tlt/v1/drafter/watchdog", {"mode": "observe"}, "Bearer admin"),
            ("POST", "/tlt/v1/drafter/rollback", {}, "Bearer admin"),
        ]
        client.report_trainer(DrafterTrainer(address="ipc://t", connected=True, received=3))
        _, path, fields, key = server.other[-1]
        assert (path, fields["connected"], fields["received"], key) == ("/tlt/v1/trainer", True, 3, "Bearer admin")
        assert client.share_target("/s/1") == SharedTarget(3, "/s/1")
        assert server.other[-1] == ("POST", "/tlt/v1/target/share", {"path": "/s/1"}, "Bearer admin")
        client.begin_weight_update()
        client.begin_weight_update("target")
        with pytest.raises(BadRequest, match="no weight update is open"):
            client.end_weight_update()
        assert server.other[-3:] == [
            ("POST", "/begin_weight_update", {}, "Bearer admin"),
            ("POST", "/begin_weight_update", {"selector": "target"}, "Bearer admin"),
            ("POST", "/end_weight_update", {}, "Bearer admin"),
        ]
        client.update_weights_from_disk("/targets/1")
        client.update_weights_from_disk("/targets/2", "2")
        assert server.other[-2:] == [
            ("POST", "/update_weights_from_disk", {"model_path": "/targets/1"}, "Bearer admin"),
            ("POST", "/update_weights_from_disk", {"model_path": "/targets/2", "weight_version": "2"}, "Bearer admin"),
        ]


def test_the_strategy(connect: Connect) -> None:
    with serving() as server:
        client = connect(server.url, api_key="user", admin_key="admin")
        assert client.strategy() == client.set_strategy(StrategyUpdate("off")) == msgspec.convert(STRATEGY, Speculation)
        assert [(method, fields, key) for method, _, fields, key in server.other] == [
            ("GET", {}, "Bearer user"),
            ("PUT", {"mode": "off"}, "Bearer admin"),
        ]


def test_what_was_learned_goes_from_server_to_server(connect: Connect) -> None:
    with serving() as server:
        client = connect(server.url, api_key="user", admin_key="admin")
        client.learn(client.learned())
        assert [(method, fields, key) for method, _, fields, key in server.other] == [
            ("GET", {}, "Bearer user"),
            ("PUT", LEARNED, "Bearer admin"),
        ]


def test_a_strategy_says_all_that_differs(connect: Connect) -> None:
    update = StrategyUpdate("paper", buckets=(SelectionBucket(1, (Arm(3, 1, 4), None)),), epsilon=0.5)
    arm = {"num_steps": 3, "topk": 1, "num_draft_tokens": 4}
    with serving() as server:
        connect(server.url).set_strategy(update)
        assert server.other[0][2] == {
            "mode": "paper",
            "buckets": [{"first": 1, "arms": [arm, None]}],
            "epsilon": 0.5,
        }


class Scripted(httpx.MockTransport, httpx.AsyncBaseTransport):
    """Replies in order, for either client; an exception is raised."""

    def __init__(self, *replies: httpx.Response | Exception) -> None:
        self.left = list(replies)
        super().__init__(self.reply)

    def reply(self, request: httpx.Request) -> httpx.Response:
        reply = self.left.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply


def test_control_routes_are_asked_again_without_ado(connect: Connect) -> None:
    lost = httpx.ReadError("gone")
    transport = Scripted(lost, httpx.Response(503), httpx.ReadError("gone"), httpx.Response(200, text="m 1\n"))
    client = connect("http://server", transport=transport)
    assert client.metrics() == "m 1\n"
    assert (len(client.pauses), transport.left) == (3, [])


@pytest.mark.parametrize("number", range(3))
def test_health_is_a_question_and_not_an_error(connect: Connect, number: int) -> None:
    replies: list[httpx.Response | Exception] = [
        httpx.Response(503),
        httpx.ReadTimeout("slow"),
        httpx.ConnectError("no"),
    ]
    assert connect("http://server", transport=Scripted(replies[number])).health() is False


def test_a_status_that_lacks_a_field_is_named(connect: Connect) -> None:
    body = {name: value for name, value in STATUS.items() if name != "counters"}
    client = connect("http://server", transport=Scripted(httpx.Response(200, json=body), httpx.Response(404)))
    with pytest.raises(ProtocolError, match=r"/tlt/v1/status.*counters"):
        client.status()
    with pytest.raises(BadRequest, match="404"):
        client.status()


def test_an_asgi_app_is_a_transport_too() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        fields = msgspec.json.decode((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        body = msgspec.json.encode(rollout(fields, [65], {"type": "length", "length": 1}))
        await send({"type": "http.response.body", "body": body})

    async def ask() -> None:
        async with AsyncClient("http://server", transport=httpx.ASGITransport(app)) as client:
            assert (await client.generate("x")).text == "A"

    asyncio.run(ask())


def test_a_broken_content_encoding_is_named(connect: Connect) -> None:
    act = lambda h, f: h.answer(200, "not gzip", content_encoding="gzip")  # noqa: E731
    with serving(act) as server, pytest.raises(ProtocolError, match="content encoding"):
        connect(server.url).generate("a")


# -- arguments ------------------------------------------------------------------------------------------------------

WRONG: list[tuple[Callable[[Client], Any], str]] = [
    (lambda c: c.generate([]), "at least one"),
    (lambda c: c.generate([1, -1]), "none negative"),
    (lambda c: c.generate([1.0]), "generate_batch"),  # type: ignore[list-item]
    (lambda c: c.generate(["a", "b"]), "generate_batch"),  # type: ignore[list-item]
    (lambda c: c.generate(None), "not NoneType"),  # type: ignore[arg-type]
    (lambda c: c.generate_batch("abc"), "one string"),
    (lambda c: c.generate_batch(["a"], [SamplingParams()] * 2), "2 sampling parameters for 1 prompts"),
    (lambda c: c.generate_group("a", 0), "n=0"),
    (lambda c: c.generate("a", extra={"stream": True}), "stream"),
    (lambda c: c.generate("a", extra={"x": object()}), "JSON"),
    (lambda c: c.generate("a", deadline_s=0), "deadline_s=0"),
    (lambda c: c.generate("a", deadline_s=float("nan")), "deadline_s=nan"),
    (lambda c: c.generate("a", rid=""), "rid=''"),
    (lambda c: c.generate("a", rid="~a"), "rid='~a'"),
    (lambda c: c.stream("a", rid="~a"), "rid='~a'"),
    (lambda c: c.abort(""), "abort_all"),
    (lambda c: c.flush_cache(-1), "wait_s=-1"),
]


@pytest.mark.parametrize("index", range(len(WRONG)))
def test_a_wrong_argument_is_refused_before_anything_is_sent(connect: Connect, index: int) -> None:
    call, message = WRONG[index]
    with pytest.raises(InvalidArgument, match=message) as raised:
        call(connect("http://server", transport=Scripted()))
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize("url", ["localhost:30000", "", "ftp://host", "http://", "/generate"])
def test_an_address_that_is_none_is_refused(connect: Connect, url: str) -> None:
    with pytest.raises(InvalidArgument, match="base_url"):
        connect(url)


@pytest.mark.parametrize("name", ["connect_timeout_s", "read_timeout_s", "control_timeout_s", "max_concurrency"])
def test_a_limit_of_nothing_is_refused(connect: Connect, name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name}=0"):
        connect("http://server", **{name: 0})


def test_a_key_that_no_header_can_hold_is_the_callers_mistake(connect: Connect) -> None:
    with serving() as server, pytest.raises(InvalidArgument, match="cannot be sent"):
        connect(server.url, api_key="a\nb").generate("a")


def test_results_and_errors_cross_process_borders() -> None:
    with serving(says(400, "bad")) as server, Client(server.url, retry=Retry(attempts=1)) as client:
        with pytest.raises(BadRequest) as raised:
            client.generate_batch(["a"])
        given = client.generate("abc", logprobs=True)
    assert pickle.loads(pickle.dumps(given)) == given
    error = pickle.loads(pickle.dumps(raised.value))
    assert (str(error), error.status, error.index) == (str(raised.value), 400, 0)
