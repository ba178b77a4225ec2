"""Closed loops: so many requests always in flight, on each side in turn."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import NamedTuple
from uuid import uuid4

from tlt_client import AsyncClient, SamplingParams, schemas
from tlt_client.wire import Prompt

from tlt_server.bench.plan import WARM_UP_S, Plan, Side, present, sides_of
from tlt_server.errors import ConfigError

ABORT_EVERY = 0.1
"""Seconds: an abort may overtake the request that it is for, and is said again."""


class Visit(NamedTuple):
    """A side, asked once at a load. tokens: sampled, those of aborted responses too. drafts: verify passes, counted per
    request. accepted: of these, how many accepted the draft beyond each depth."""

    seconds: float
    tokens: int
    responses: int
    drafts: int
    accepted: tuple[int, ...]


@dataclass
class Measured:
    """By side and load, a visit for each round that was whole."""

    sides: list[Side] = field(default_factory=list)
    visits: dict[tuple[str, int], list[Visit]] = field(default_factory=dict)


async def measure(
    client: AsyncClient,
    plan: Plan,
    found: Measured,
    say: Callable[[str], None],
    tick: Callable[[str, int], None],
    *,
    arms: bool,
) -> None:
    """Fills `found` visit by visit, so that what is there counts when it is cancelled; then sets the strategy back.

    Raises ConfigError: the server has no drafter, or is busy.
    Raises TltClientError: it did not answer, or refused.
    """
    before = await client.strategy()
    found.sides = sides_of(before, arms=arms)
    if (load := await client.load()).running + load.waiting:
        raise ConfigError(
            f"{plan.url} has {load.running + load.waiting} requests of others: bench it when nobody else uses it"
        )
    say(plan.told(found.sides))
    prompts = cycle(plan.prompts)
    try:
        for round_ in range(plan.rounds):
            turns = plan.turns(found.sides)
            for side, at_once in turns if round_ % 2 == 0 else reversed(turns):
                tick(side.name, at_once)
                await client.set_strategy(side.strategy)
                if round_ == 0:
                    await _closed_loop(client, prompts, plan.sampling, at_once, WARM_UP_S)
                visit = await _visit(client, prompts, plan, at_once)
                found.visits.setdefault((side.name, at_once), []).append(visit)
                tick(side.name, at_once)
    finally:
        await client.set_strategy(present(before))


async def _visit(client: AsyncClient, prompts: Iterator[Prompt], plan: Plan, at_once: int) -> Visit:
    before = (await client.status()).counters
    seconds, tokens, responses = await _closed_loop(client, prompts, plan.sampling, at_once, plan.seconds)
    after = (await client.status()).counters
    return Visit(seconds, tokens, responses, after.drafts - before.drafts, _grown(before, after))


def _grown(before: schemas.Counters, after: schemas.Counters) -> tuple[int, ...]:
    known: Sequence[int] = before.per_position
    return tuple(n - (known[depth] if depth < len(known) else 0) for depth, n in enumerate(after.per_position))


async def _closed_loop(
    client: AsyncClient, prompts: Iterator[Prompt], sampling: SamplingParams, at_once: int, seconds: float
) -> tuple[float, int, int]:
    """Seconds, tokens, and responses that ended by themselves."""
    in_flight: set[str] = set()
    tokens = responses = 0
    began = time.monotonic()

    async def ask() -> None:
        nonlocal tokens, responses
        while time.monotonic() < began + seconds:
            rid = f"bench-{uuid4().hex}"
            in_flight.add(rid)
            rollout = await client.generate(next(prompts), sampling, rid=rid)
            in_flight.discard(rid)
            tokens += rollout.completion_tokens
            responses += not rollout.aborted

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(ask())
            await asyncio.sleep(seconds)
            while in_flight:
                await asyncio.gather(*map(client.abort, tuple(in_flight)))
                await asyncio.sleep(ABORT_EVERY)
    except ExceptionGroup as failed:  # of a server that has ended, each request says so
        raise failed.exceptions[0] from failed
    return time.monotonic() - began, tokens, responses
