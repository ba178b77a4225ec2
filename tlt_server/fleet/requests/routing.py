"""Which member gets a request: its session's, or its prompt's, unless that one has much more to do than the others."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

HEADERS = ("X-Session-ID", "X-SMG-Routing-Key")
PROMPT_IDS = 256
"""Of a prompt, that requests with a common prefix share a member's cache by."""
TEXT = 1024
"""Bytes of a prompt in text."""
SLACK = 4
"""Requests that a member may have beyond a quarter more than the mean, and still be given those that stick to it."""


class Asked(msgspec.Struct):
    """What the front reads of a request; the rest is the member's business. Prompts are read as they stand."""

    rid: str | list[str] | None = None
    n: Any = None
    sampling_params: msgspec.Raw = msgspec.Raw()
    request_id: str | None = None
    session_id: str | None = None
    input_ids: msgspec.Raw = msgspec.Raw()
    token_ids: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()

    @property
    def batch(self) -> bool:
        """Whether its prompts are a list of prompts."""
        return any(bytes(each)[1:].lstrip()[:1] in (b"[", b'"') for each in self._lists())

    @property
    def prompts(self) -> int:
        """How many."""
        return max((len(_list(each)) for each in self._lists()), default=1) if self.batch else 1

    @property
    def samples(self) -> int:
        """Of each prompt."""
        first = bytes(self.sampling_params)
        params = msgspec.json.decode(first) if first else {}
        given = (params[0] if isinstance(params, list) and params else params) or {}
        n = given.get("n") if isinstance(given, dict) else None
        return next((n for n in (self.n, n) if isinstance(n, int) and n > 0), 1)

    def _lists(self) -> list[msgspec.Raw]:
        return [each for each in (self.input_ids, self.prompt, self.text) if bytes(each).startswith(b"[")]

    @property
    def rids(self) -> list[str]:
        """By which it may be aborted."""
        if isinstance(self.rid, list):
            return self.rid
        return [rid for rid in (self.rid, self.request_id) if rid]


NOTHING = Asked()
_decode = msgspec.json.Decoder(Asked).decode
_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


def asked(body: bytes) -> Asked:
    """NOTHING of what is not as expected: the member says what is wrong with it."""
    try:
        return _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return NOTHING


def session_of(headers: Mapping[str, str], request: Asked) -> bytes | None:
    """What its client says that it belongs to; None: nothing."""
    for name in HEADERS:
        if given := headers.get(name):
            return given.encode(errors="surrogateescape")
    return request.session_id.encode() if request.session_id else None


def key_of(headers: Mapping[str, str], request: Asked) -> bytes | None:
    """What a request sticks by: its session, or its prompt; None: by nothing. The first prompt's of a batch."""
    prompts = (request.input_ids, request.token_ids, request.prompt, request.text, request.messages)
    return session_of(headers, request) or next(
        filter(None, (key_of_prompt(bytes(prompt)) for prompt in prompts)), None
    )


def key_of_prompt(prompt: bytes) -> bytes | None:
    """Of a prompt, or a list of them, in JSON: what those share that begin alike. None: of nothing."""
    raw = prompt[: 16 * PROMPT_IDS]
    if raw.startswith(b"["):
        return b",".join(raw.lstrip(b"[ ").partition(b"]")[0].split(b",", PROMPT_IDS)[:PROMPT_IDS])
    return raw[:TEXT] or None


def choose(key: bytes | None, running: Mapping[str, int], names: Sequence[str]) -> str:
    """One of the names. The order in which members stand by for a key stays when others come and go."""
    if len(names) == 1:
        return names[0]
    least = min(names, key=lambda name: (running.get(name, 0), name))
    if key is None:
        return least
    bound = 1.25 * sum(running.get(name, 0) for name in names) / len(names) + SLACK
    liked = sorted(names, key=lambda name: hashlib.blake2b(name.encode() + b"\0" + key, digest_size=8).digest())
    return next((name for name in liked if running.get(name, 0) <= bound), least)
