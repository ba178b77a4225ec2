"""A request on its way, and what the front counts of all."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from tlt_server.fleet.links import Reply
from tlt_server.fleet.requests.routing import Asked


class Refused(Exception):
    """A member did not take the request, or will not answer it. It may be sent again. kind: `refused`, with the
    member's reply; `dead`, or `quarantined`."""

    def __init__(self, why: str, kind: str, reply: Reply | None = None) -> None:
        super().__init__(why)
        self.kind, self.reply = kind, reply


class Lost(Exception):
    """Nobody knows whether a member answered the request."""


@dataclass(eq=False)
class Job:
    """A request on its way. left: is set once it is aborted while the front holds it. sending: while a member has it.
    cut: why it is taken from there. of: the batch that it is a part of; prefers: the member that it was dealt to."""

    path: str
    target: str
    method: str
    headers: CIMultiDict[str]
    body: bytes
    asked: Asked
    key: bytes | None
    wanted: str | None
    of: "Job | None" = None
    prefers: str | None = None
    attempt: int = 1
    member: str | None = None
    sending: asyncio.Task[web.StreamResponse] | None = None
    cut: str | None = None
    left: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def names(self) -> frozenset[str]:
        """By which it may be aborted."""
        return frozenset(self.asked.rids) | (self.of.names if self.of is not None else frozenset())

    def take_away(self, why: str) -> None:
        """From the member that has it: the end of the connection is how a server hears that nobody waits any more."""
        if self.sending is not None and self.cut is None:
            self.cut = why
            self.sending.cancel()


@dataclass
class Counts:
    """Since the front started, for its metrics."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    resent: Counter[str] = field(default_factory=Counter)
    held: int = 0
    split: int = 0


def aborted(job: Job, version: str | None) -> Reply:
    """What a server answers to a request that was aborted before anything was sampled."""
    rids, prompts = job.asked.rids, job.asked.prompts
    if job.path != "/generate":
        choice: dict[str, Any] = {"finish_reason": "abort", "text": "", "token_ids": [], "logprobs": None}
        message = {"message": {"role": "assistant", "content": ""}} if "chat" in job.path else {}
        choices = [{"index": index, **choice, **message} for index in range(prompts * job.asked.samples)]
        return Reply(200, msgspec.json.encode({"id": rids[0] if rids else "", "choices": choices}))
    meta = {"finish_reason": {"type": "abort", "message": "Aborted"}, "prompt_tokens": 0, "completion_tokens": 0}
    several = [f"{rid}_{place}" for rid in rids[:1] or [""] for place in range(prompts)]
    named = rids if isinstance(job.asked.rid, list) else several if job.asked.batch else rids or [""]
    each = [
        {"text": "", "output_ids": [], "meta_info": meta | {"id": rid, "cached_tokens": 0, "weight_version": version}}
        for rid in named
        for _ in range(job.asked.samples)
    ]
    return Reply(200, msgspec.json.encode(each if job.asked.batch or len(each) > 1 else each[0]))
