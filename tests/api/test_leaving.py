"""Who hangs up ends what it has asked for, and nothing else: the middleware around applications that take time."""

import asyncio
from typing import Any

import pytest

from tlt_server.api.rollouts.leaving import Leaving

BODY = [{"type": "http.request", "body": b"a", "more_body": True}, {"type": "http.request", "body": b"b"}]
GONE = {"type": "http.disconnect"}


class Application:
    """Reads the body, then takes its time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.body, self.over = b"", ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            self.body += message["body"]
            more = message.get("more_body", False)
        try:
            await asyncio.sleep(self.seconds)
            await send({"type": "http.response.start"})
            self.over = "answered"
        except asyncio.CancelledError:
            self.over = "cut"
            raise


def call(application: Any, path: str, leaves_after: float) -> None:
    messages = list(BODY)

    async def receive() -> Any:
        if messages:
            return messages.pop(0)
        await asyncio.sleep(leaves_after)
        return GONE

    async def send(message: Any) -> None:
        pass

    scope = {"type": "http", "path": path, "root_path": ""}
    asyncio.run(asyncio.wait_for(Leaving(application)(scope, receive, send), timeout=5))


def test_who_leaves_ends_a_request() -> None:
    application = Application(60)
    call(application, "/generate", leaves_after=0.01)
    assert (application.body, application.over) == (b"ab", "cut")


@pytest.mark.parametrize(("path", "leaves_after"), [("/generate", 60), ("/update_weights_from_disk", 0)])
def test_who_stays_has_an_answer_and_what_changes_the_server_ends(path: str, leaves_after: float) -> None:
    application = Application(0.05)
    call(application, path, leaves_after)
    assert (application.body, application.over) == (b"ab", "answered")


def test_an_application_learns_that_its_client_left() -> None:
    """Streams listen for it themselves."""
    heard = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        heard.extend([(await receive())["type"] for _ in range(2)])
        try:
            heard.append((await receive())["type"])
        except asyncio.CancelledError:
            heard.append("cut")

    call(application, "/v1/completions", leaves_after=0.01)
    assert heard[:2] == ["http.request", "http.request"]
    assert heard[2] in ("http.disconnect", "cut")


def test_an_applications_error_is_its_callers() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError("of the application")

    with pytest.raises(KeyError):
        call(application, "/generate", leaves_after=60)
