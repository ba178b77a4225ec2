"""Routes around sampling: status, weights, drafter, strategy."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from sglang_stand_in import (
    DRAFTER,
    EVENT,
    HISTORY,
    LEARNED,
    STATUS,
    STRATEGY,
    rollout,
    serving,
)

from tlt_client import (
    Arm,
    AsyncClient,
    BadRequest,
    ConnectionLost,
    Drafter,
    DrafterTrainer,
    DrafterUpdate,
    Event,
    History,
    HistoryLoad,
    Load,
    ProtocolError,
    SelectionBucket,
    SharedTarget,
    Speculation,
    Status,
    StrategyUpdate,
    TrainedSteps,
    VersionConflict,
)

Connect = Callable[..., Any]


def test_control_routes(connect: Connect) -> None:
    with serving() as server:
        client = connect(server.url, api_key="user", admin_key="admin")
        assert client.health() is True
        assert client.status() == msgspec.convert(STATUS, Status)
        assert client.status().arm == Arm(3, 1, 4)
        assert client.server_info() == {"version": "0.5.17", "tp_size": 2, "max_running_requests": 32}
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
        assert client.train_drafter(5, within_s=9.0) == TrainedSteps(5, 0.5, 2, 2)
        assert server.other[-1] == (
            "POST",
            "/tlt/v1/train/steps",
            {"steps": 5, "within_s": 9.0, "until": "active"},
            "Bearer admin",
        )
        assert client.share_target("/s/1") == SharedTarget(3, "/s/1")
        assert server.other[-1] == ("POST", "/tlt/v1/target/share", {"path": "/s/1"}, "Bearer admin")


def test_the_calls_of_a_step(connect: Connect) -> None:
    with serving() as server:
        client = connect(server.url, api_key="user", admin_key="admin")
        client.pause_generation()
        client.pause_generation("in_place")
        client.continue_generation()
        with pytest.raises(VersionConflict, match="requests are running"):
            client.release_memory_occupation(["kv_cache"])
        client.resume_memory_occupation()
        assert client.weight_version() == "7"
        client.update_weight_version("8")
        client.begin_weight_update()
        client.begin_weight_update("target", allow_partial=True)
        with pytest.raises(BadRequest, match="no weight update is open"):
            client.end_weight_update()
        client.update_weights_from_disk("/targets/1")
        client.update_weights_from_disk("/targets/2", "2", flush_cache=False)
        assert [(path, fields) for _, path, fields, _ in server.other] == [
            ("/pause_generation", {"mode": "abort"}),
            ("/pause_generation", {"mode": "in_place"}),
            ("/continue_generation", {}),
            ("/release_memory_occupation", {"tags": ["kv_cache"]}),
            ("/resume_memory_occupation", {}),
            ("/get_weight_version", {}),
            ("/update_weight_version", {"new_version": "8", "abort_all_requests": False}),
            ("/begin_weight_update", {}),
            ("/begin_weight_update", {"selector": "target", "allow_partial": True}),
            ("/end_weight_update", {}),
            ("/update_weights_from_disk", {"model_path": "/targets/1", "flush_cache": True}),
            (
                "/update_weights_from_disk",
                {"model_path": "/targets/2", "flush_cache": False, "weight_version": "2"},
            ),
        ]
        assert {(method, key) for method, *_, key in server.other} == {("POST", "Bearer admin"), ("GET", "Bearer user")}


@pytest.mark.parametrize("call", ["continue_generation", "begin_weight_update", "end_weight_update"])
def test_what_ends_or_begins_something_is_sent_once(connect: Connect, call: str) -> None:
    """The answer to a second one would not be the first one's."""
    transport = Scripted(httpx.ReadError("gone"), httpx.Response(200))
    with pytest.raises(ConnectionLost):
        getattr(connect("http://server", transport=transport), call)()
    assert len(transport.left) == 1


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


def test_the_history(connect: Connect) -> None:
    with serving() as server:
        client = connect(server.url, api_key="user", admin_key="admin")
        load = HistoryLoad([1, 2], [[3]], namespace="a/b")
        told = {client.history(), client.load_history(load), client.forget_history(), client.forget_history("a/b")}
        assert told == {msgspec.convert(HISTORY, History)}
        assert [(method, path, fields, key) for method, path, fields, key in server.other] == [
            ("GET", "/tlt/v1/history", {}, "Bearer user"),
            ("POST", "/tlt/v1/history", {"prompt": [1, 2], "responses": [[3]], "namespace": "a/b"}, "Bearer admin"),
            ("DELETE", "/tlt/v1/history", {}, "Bearer admin"),
            ("DELETE", "/tlt/v1/history?namespace=a%2Fb", {}, "Bearer admin"),
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
