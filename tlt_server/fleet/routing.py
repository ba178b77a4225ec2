"""Which member gets a request: its session's, or its prompt's, unless that one has much more to do than the others."""

import hashlib
from collections.abc import Mapping, Sequence

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
    request_id: str | None = None
    session_id: str | None = None
    input_ids: msgspec.Raw = msgspec.Raw()
    token_ids: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()

    @property
    def rids(self) -> list[str]:
        """By which it may be aborted."""
        if isinstance(self.rid, list):
            return self.rid
        return [rid for rid in (self.rid, self.request_id) if rid]


NOTHING = Asked()
_decode = msgspec.json.Decoder(Asked).decode


def asked(body: bytes) -> Asked:
    """NOTHING of what is not as expected: the member says what is wrong with it."""
    try:
        return _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return NOTHING


def key_of(headers: Mapping[str, str], request: Asked) -> bytes | None:
    """What a request sticks by; None: by nothing. The first prompt's of a batch, which stays together."""
    for name in HEADERS:
        if given := headers.get(name):
            return given.encode(errors="surrogateescape")
    if request.session_id:
        return request.session_id.encode()
    for prompt in (request.input_ids, request.token_ids, request.prompt, request.text, request.messages):
        if raw := bytes(prompt)[: 16 * PROMPT_IDS]:
            if raw.startswith(b"["):
                return b",".join(raw.lstrip(b"[ ").partition(b"]")[0].split(b",", PROMPT_IDS)[:PROMPT_IDS])
            return raw[:TEXT]
    return None


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
