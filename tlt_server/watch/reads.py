"""What is asked of a server, or of a fleet's front, by who only looks."""

from typing import NamedTuple, TypeVar
from urllib.parse import quote

import httpx
import msgspec
from tlt_client.schemas import Event, Fleet, Speculation, Status

from tlt_server.errors import ConfigError, ServerFailed

T = TypeVar("T")
WAIT_S = 5.0


class Seen(NamedTuple):
    """A server at one time. recent: its newest events, oldest first."""

    status: Status
    speculation: Speculation
    recent: list[Event]


class Reads:
    """url: of a server or a front. key: that clients show. Each read raises ServerFailed: there was no answer, or not
    this one; ConfigError: the key is missing or another."""

    def __init__(self, url: str, key: str | None) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            self._http = httpx.Client(base_url=url, headers=headers, timeout=WAIT_S)
        except httpx.InvalidURL as error:
            raise ConfigError(f"{url}: {error}: write it as http://127.0.0.1:30000") from error
        if self._http.base_url.scheme not in ("http", "https") or not self._http.base_url.host:
            raise ConfigError(f"{url} is no HTTP address: write it as http://127.0.0.1:30000")
        self.url = url

    def fleet(self) -> Fleet | None:
        """None: it is a single server."""
        return self._get("/tlt/v1/fleet", Fleet, absent=404)

    def status(self, replica: str) -> Status | None:
        """Of a fleet's replica; None: it does not answer, of which the fleet says why."""
        try:
            return self._asked(f"{_path_of(replica)}/tlt/v1/status", Status)
        except ServerFailed:
            return None

    def server(self, count: int = 20) -> Seen:
        """count: of events."""
        status = self._asked("/tlt/v1/status", Status)
        events = self._asked("/tlt/v1/events", list[Event])
        return Seen(status, self._asked("/tlt/v1/strategy", Speculation), events[-count:])

    def close(self) -> None:
        self._http.close()

    def _asked(self, path: str, kind: type[T]) -> T:
        found = self._get(path, kind)
        assert found is not None
        return found

    def _get(self, path: str, kind: type[T], absent: int | None = None) -> T | None:
        try:
            answer = self._http.get(path)
        except httpx.HTTPError as error:
            raise ServerFailed(f"{self.url} does not answer: {error or type(error).__name__}") from error
        if answer.status_code == absent:
            return None
        if answer.status_code == 401:
            raise ConfigError(f"{self.url} wants its key: set TLT_API_KEY, or give --api-key-file")
        if answer.status_code != 200:
            raise ServerFailed(f"{self.url}{path} answers {answer.status_code}: is it a tlt-server?")
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ServerFailed(f"{self.url}{path} answers what cannot be read: {error}") from error


def _path_of(replica: str) -> str:
    return f"/tlt/v1/replicas/{quote(replica, safe=':')}"
