"""How the clients connect where the caller gives no transport of their own."""

import socket

import httpx

from tlt_client.errors import InvalidArgument


def base_url_of(url: str) -> httpx.URL:
    """Checked at the door: httpx would complain only when a request is sent."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InvalidArgument(f"base_url {url!r}: {error}") from error
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise InvalidArgument(f"base_url {url!r} is no HTTP address: write it as http://127.0.0.1:30000")
    return parsed


def certificates_for(url: httpx.URL) -> bool:
    """httpx's `verify`. Loading the certificates takes 40 ms, and plain HTTP never meets one: redirects are errors."""
    return url.scheme == "https"


def limits(max_concurrency: int) -> httpx.Limits:
    """As many connections as there are requests: a batch's own bound is the only queue.

    Idle ones are dropped before SGLang drops them, which it does after 5 s: a request sent just as the server closes
    its connection is lost, and would be sampled again.
    """
    return httpx.Limits(max_connections=None, max_keepalive_connections=max_concurrency, keepalive_expiry=3.0)


def socket_options() -> list[tuple[int, int, int]]:
    """TCP keepalive. A rollout may say nothing for an hour, so silence does not tell that the server's host is gone."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # macOS before Python 3.10 and Windows lack some
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options
