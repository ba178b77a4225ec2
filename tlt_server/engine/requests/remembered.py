"""What a request asks of the history: whether it reads or writes it, and in which namespace; and a batch of them.

It travels in its `custom_params`, which upstream hands to the scheduler as they are.
"""

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from operator import is_
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

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


class Response:
    """Of one request, from its prefill on; a retracted one begins anew. slot: its number in the index."""

    def __init__(self, asked: Asked, slot: int) -> None:
        self.asked, self.slot = asked, slot


class Batch:
    """Requests that are decoded together. slots: theirs, [n]. reads: which of them do, [n]; reading: how many. plain:
    whose tokens may be written as they come, [n]; alone: ids of others, who are followed one by one, for they do not
    write, or a grammar may take something back."""

    def __init__(self, reqs: Sequence[Any]) -> None:
        self.reqs = tuple(reqs)
        responses = [req.tlt_response for req in reqs]
        self.slots = np.array([each.slot for each in responses], np.uint32)
        self.reads = np.array([each.asked.reads for each in responses], bool)
        self.reading = int(self.reads.sum())
        self.plain = np.array(
            [each.asked.writes and req.grammar is None for each, req in zip(responses, reqs, strict=True)]
        )
        alone = zip(self.plain, responses, reqs, strict=True)
        self.alone = {id(req) for plain, each, req in alone if each.asked.takes_part and not plain}
        self.all_plain = bool(self.plain.all())

    def is_of(self, reqs: Sequence[Any]) -> bool:
        return len(reqs) == len(self.reqs) and all(map(is_, reqs, self.reqs))

    def among(self, reqs: Iterable[Any]) -> NDArray[np.bool_]:
        """Which of its requests are among these."""
        ids = set(map(id, reqs))
        return np.array([id(req) in ids for req in self.reqs], bool)
