"""What a request asks of the history: whether it reads or writes it, and in which namespace.

It travels in its `custom_params`, which upstream hands to the scheduler as they are.
"""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from tlt_server.engine.requests.continued import prompt_length

HISTORY, NAMESPACE = "history", "history_namespace"
"""Fields of a request: a mode, and a name."""
KEY = "tlt_history"
"""Of `custom_params`: both of them."""
Mode = Literal["none", "read", "write", "both"]
HEALTH_CHECK = "HEALTH_CHECK"
"""How upstream's own requests are named (srt/constants.py)."""


class Asked(msgspec.Struct, frozen=True):
    """namespace: prompts of another one are other prompts."""

    mode: Mode = "both"
    namespace: str = ""

    @property
    def reads(self) -> bool:
        return self.mode in ("read", "both")

    @property
    def writes(self) -> bool:
        return self.mode in ("write", "both")

    @property
    def takes_part(self) -> bool:
        return self.mode != "none"

    def key(self, prompt: bytes, cleared: Mapping[str, int]) -> int:
        """Of a prompt's digest, 64 bits. cleared: how often each namespace was."""
        place = msgspec.msgpack.encode((self.namespace, cleared.get(self.namespace, 0), prompt))
        return int.from_bytes(hashlib.blake2b(place, digest_size=8).digest())


def digest(prompt: Sequence[int]) -> bytes:
    """Of its tokens."""
    return hashlib.blake2b(array("q", prompt), digest_size=16).digest()


def asked_of(req: Any) -> Asked:
    """By a scheduler's request. One given as embeddings has no tokens, and the server's own says nothing."""
    if req.input_embeds is not None or req.rid.startswith(HEALTH_CHECK):
        return Asked("none")
    return Asked(*(req.sampling_params.custom_params or {}).get(KEY, ()))


def prompt_of(req: Any) -> bytes:
    """The digest of its prompt, without what was sampled before and is given with it; taken once."""
    found: bytes = vars(req).get("tlt_prompt") or digest(req.origin_input_ids[: prompt_length(req)])
    req.tlt_prompt = found
    return found
