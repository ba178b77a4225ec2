"""Every error of this client, grouped by what the caller does next.

TltClientError              anything of ours
├── InvalidArgument         refused here, nothing was sent: correct the argument that the message names (a ValueError)
├── TorchNeeded             tensors are to be sent: pip install 'tlt-client[weights]' (an ImportError)
├── RequestRefused          the server refused, and would again: change what is asked
│   ├── BadRequest          400, 422 and other 4xx: correct the request; the message is the server's
│   ├── Unauthorized        401, 403: give the client `api_key`, or `admin_key` for control routes
│   └── VersionConflict     409: the server is in another state than this needs: read its status, decide anew
├── RequestUnserved         no rollout came, and none is counted: the same call may be made again
│   ├── ServerUnavailable   nothing was processed (no connection, or 503): wait for the server, or start it
│   ├── ConnectionLost      the answer was lost on the way, more often than `Retry.resamples` allows
│   ├── Timeout             the deadline passed, or the server's own time limit: allow more time, or fewer tokens
│   └── Aborted             somebody aborted the request before it ran (499)
└── ServerFault             the server answered, and wrongly: read its log
    ├── ServerError         500 and other 5xx
    └── ProtocolError       not what this client knows to read; the message names what: is it a server of this kind?

What a trainer usually writes: `except RequestUnserved` around a step, and lets the others end the run.
"""

from collections.abc import Mapping

from tlt_client.rollouts import Rollout


class TltClientError(Exception):
    """Base of all; never raised itself."""

    finished: Mapping[int, Rollout] = {}
    """Of a batch that this error ended: the rollouts that were complete, by their index. Empty otherwise."""
    index: int | None = None
    """Of a batch that this error ended: the index of the sample that failed."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status, where there was an answer."""


class InvalidArgument(TltClientError, ValueError):
    """An argument that no server could serve."""


class TorchNeeded(TltClientError, ImportError):
    """Sending tensors needs torch, which is not installed."""


class RequestRefused(TltClientError):
    """The server understood and refused. Never retried."""


class BadRequest(RequestRefused):
    """A 4xx: the request is wrong."""


class Unauthorized(RequestRefused):
    """A 401 or 403: the key is missing or wrong."""


class VersionConflict(RequestRefused):
    """A 409: the request was made on an older state than the server's."""


class RequestUnserved(TltClientError):
    """No rollout came back."""


class ServerUnavailable(RequestUnserved):
    """The request was not processed: no connection, or a 503 after all retries."""

    retry_after_s: float | None = None
    """What the server asked for in its Retry-After header, in seconds."""


class ConnectionLost(RequestUnserved):
    """The request went out and its answer did not come back whole."""


class Timeout(RequestUnserved):
    """The answer took longer than it was given; the request was aborted."""


class Aborted(RequestUnserved):
    """Aborted before it ran: there is not even a partial rollout."""


class ServerFault(TltClientError):
    """The server answered, and wrongly. Never retried."""


class ServerError(ServerFault):
    """A 5xx that is not about availability."""


class ProtocolError(ServerFault):
    """An answer that cannot be read."""
