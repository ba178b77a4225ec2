"""Strategies in turn on one server with several arms, none of which profits from what another has learned."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec import convert, to_builtins
from tlt_client.schemas import Selection, SelectionBucket, Speculation, StrategyUpdate

from benchmarks.lib.servers import Server
from benchmarks.lib.sides import Side, name_of
from tlt_server.config import Arm
from tlt_server.strategy.arms import Choice
from tlt_server.strategy.settings import to_client

OFF = "off"


def strategy(server: Server, **wanted: object) -> dict[str, object]:
    """Asks for a strategy. An error of the server's is shown with what it says."""
    answer = server.http.put(f"{server.url}/tlt/v1/strategy", json=wanted)
    if answer.is_error:
        raise RuntimeError(f"PUT /tlt/v1/strategy {wanted}: {answer.status_code} {answer.text}")
    found: dict[str, object] = answer.json()
    return found


class Strategies:
    """What each side has learned, kept while another has its turn on their server."""

    def __init__(self) -> None:
        self._learned: dict[str, Any] = {}

    def forget(self, side: Side) -> None:
        """It begins with what the server began with."""
        self._learned.pop(side.name, None)

    @contextmanager
    def active(self, server: Server, side: Side) -> Iterator[None]:
        """A side's strategy, if it has one, and what it learned before; of others, what the server began with."""
        if side.strategy is None:
            yield
            return
        url = f"{server.url}/tlt/v1/strategy/learned"
        if side.server not in self._learned:
            self._learned[side.server] = server.http.get(url).raise_for_status().json()
        strategy(server, **to_builtins(side.strategy))
        learned = self._learned.get(side.name, self._learned[side.server])
        server.http.put(url, json=learned).raise_for_status()
        yield
        if not server.failed:
            self._learned[side.name] = server.http.get(url).raise_for_status().json()


def any_arm(most: Mapping[Arm, int], largest: int) -> StrategyUpdate:
    """Each step draws its arm, or none, among those that have graphs for its batch size.

    Args:
        most: the largest batch of each arm.
        largest: that the server runs.
    """
    firsts = [1, *(size + 1 for size in sorted(set(most.values())) if size < largest)]
    drawn = {first: [to_client(arm) for arm, size in most.items() if size >= first] for first in firsts}
    return StrategyUpdate(
        "paper", epsilon=1.0, buckets=tuple(SelectionBucket(first, (*drawn[first], None)) for first in firsts)
    )


def selection(server: Server) -> Selection:
    """What a server with arms chose since its strategy was put in force, and what came of it."""
    answer = server.http.get(f"{server.url}/tlt/v1/strategy").raise_for_status()
    found = convert(answer.json(), Speculation).selection
    assert found is not None
    return found


def name_of_choice(arm: Choice) -> str:
    """`off`, or as `name_of`."""
    return OFF if arm is None else name_of(arm)


def fixed(most: Mapping[Arm, int], largest: int) -> list[Side]:
    """Plain decoding, and each arm by itself, of a server that has them all.

    Args:
        most: requests at once that each arm is asked.
        largest: that the server is asked.
    """
    arms = tuple(most)
    off = Side(OFF, arms=arms, strategy=StrategyUpdate("off"), max_batch=largest)
    return [off] + [
        Side(name_of(arm), arms=arms, strategy=StrategyUpdate("pinned", pinned=to_client(arm)), max_batch=most[arm])
        for arm in arms
    ]


def learning(arms: Sequence[Arm]) -> list[Side]:
    """The two bandits."""
    return [Side(mode, arms=tuple(arms), strategy=StrategyUpdate(mode)) for mode in ("paper", "bandit")]


def by_batch(name: str, arms: Sequence[Arm], table: Mapping[int, Choice]) -> Side:
    """A side that looks its arm up: by the first batch size of each range, ascending from 1."""
    buckets = tuple(SelectionBucket(first, (to_client(arm),)) for first, arm in table.items())
    return Side(name, arms=tuple(arms), strategy=StrategyUpdate("bandit", buckets=buckets))
