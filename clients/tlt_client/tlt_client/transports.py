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


def limits() -> httpx.Limits:
    """As many connections as there are requests, and each for one request only.

    A connection that is kept may be closed by the server (SGLang does after 5 s) just as a request goes out on it, and
    that request would be lost and sampled again. To a rollout of seconds the new connection costs nothing, and with
    hundreds of kept ones httpcore's pool spends 15 ms on each request (httpcore 1.0.9).
    """
    return httpx.Limits(max_connections=None, max_keepalive_connections=0)


def socket_options() -> list[tuple[int, int, int]]:
    """TCP keepalive. A rollout may say nothing for an hour, so silence does not tell that the server's host is gone."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # macOS before Python 3.10 and Windows lack some
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options
