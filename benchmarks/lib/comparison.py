"""Sides measured in turn, and what is computed of it: medians of every side, and ratios to plain decoding.

A ratio is taken within one group of servers, which stand side by side on one machine, and within one round. What is
reported is the median over the rounds, with the least and the greatest.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tlt_client.schemas import Selection

from benchmarks.lib.decoding import Load, Window, decode
from benchmarks.lib.sides import Side, SideServer, Site, awake, servers_of, side_by_side
from benchmarks.lib.strategies import Strategies, selection
from tlt_server.process import tail
from tlt_server.results import Figures

PLAIN = "plain"  # the side of each group that the others are compared with
LAGS = 0.93
"""In a race, a side that drafts and has made less than this share of the best side's rate at a load lags there."""
SELDOM = 4
"""Rounds, of which the first alone asks a side where it lags: further ones would decide nothing."""


@dataclass(frozen=True)
class Measured:
    """What one group gave: windows[side, load][round]; of sides that learn, selections[side, load][round]."""

    sides: Sequence[Side]
    windows: Mapping[tuple[str, str], Sequence[Sequence[Window]]]
    requests: int
    failed: int
    selections: Mapping[tuple[str, str], Sequence[Selection]] = field(default_factory=dict)

    def speedups(self, side: str, load: str) -> list[float]:
        """A side's rate over plain decoding's, round by round; without rounds that gave either no window."""
        rate = mean_rate if side in (each.name for each in self.sides if each.learns) else _rate
        pairs = zip(self.windows[side, load], self.windows[PLAIN, load], strict=True)
        return [rate(ours) / _rate(plain) for ours, plain in pairs if ours and plain]

    def slowdowns(self, side: str, load: str) -> list[float]:
        """By what share a side's steps take longer than plain's, round by round, whatever they accept."""
        pairs = zip(self.windows[side, load], self.windows[PLAIN, load], strict=True)
        return [_step_ms(ours) / _step_ms(plain) - 1 for ours, plain in pairs if ours and plain]


def mean_rate(windows: Sequence[Window]) -> float:
    """Tokens/s over all windows together, which are of equally many steps. A median would pass over the steps in which
    a bandit explores."""
    tokens = [window.batch * window.accept_length for window in windows]
    return sum(tokens) / sum(n / window.tokens_per_s for n, window in zip(tokens, windows, strict=True))


def _rate(windows: Sequence[Window]) -> float:
    return median(window.tokens_per_s for window in windows)


def _step_ms(windows: Sequence[Window]) -> float:
    return median(window.step_ms for window in windows)


def measure(groups: Sequence[Sequence[Side]], loads: Sequence[Load], site: Site, rounds: int) -> list[Measured]:
    """Every load on every side, `rounds` times, the order of sides rotated from round to round; group after group.

    A side that learns is asked each load twice, of which the first does not count: it learns from that. One that
    remembers what it learned has both counted after the first round.
    """
    *_, measured = measuring(groups, loads, site, rounds)
    return measured


def measuring(
    groups: Sequence[Sequence[Side]], loads: Sequence[Load], site: Site, rounds: int, *, race: bool = False
) -> Iterator[list[Measured]]:
    """As `measure`, after each round what there is by then. In a race, sides that lag are asked seldom (`lagging`)."""
    total = sum((rounds + 1) * len(_asked(side, loads)) for group in groups for side in group)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("starting", total=total)
        measured: list[Measured] = []
        for number, group in enumerate(groups, 1):
            progress.update(task, description=f"group {number} of {len(groups)}: starting")
            with side_by_side(group, site) as servers:

                def tick(side: Side, load: Load, number: int = number) -> None:
                    progress.update(task, advance=1, description=f"group {number}: {side.name}, {load.name}")

                for found in measure_group(group, servers, loads, rounds, tick, race):
                    yield [*measured, found]
                measured.append(found)


def _asked(side: Side, loads: Sequence[Load]) -> list[Load]:
    return [load for load in loads if load.batch <= side.max_batch]


def visit(side: Side, load: Load) -> Load:
    """The load; of its waves a quarter where nothing is drafted, so that chance decides nothing of the rate."""
    return load if side.drafts else replace(load, waves=-(-load.waves // 4))


def lagging(
    windows: Mapping[tuple[str, str], Sequence[Sequence[Window]]], group: Sequence[Side], load: Load
) -> set[str]:
    """The sides that are far behind the best at a load, by the rounds so far; none that learns, or drafts nothing."""
    rates = {
        side: median(map(_rate, found))
        for side in group
        if not side.learns and (found := [each for each in windows.get((side.name, load.name), ()) if each])
    }
    best = max(rates.values(), default=0.0)
    return {side.name for side, rate in rates.items() if side.drafts and rate < LAGS * best}


def measure_group(
    group: Sequence[Side],
    servers: Mapping[str, SideServer],
    loads: Sequence[Load],
    rounds: int,
    tick: Callable[[Side, Load], None],
    race: bool = False,
) -> Iterator[Measured]:
    """One group, whose servers stand already: what there is after each round. tick: called before each visit."""
    visits = _Visits(servers)
    for side in group:  # the first time, kernels are compiled and prompts prefilled
        for load in _asked(side, loads):
            tick(side, load)
            visits.give(side, load.warm_up, warm=False)
    windows: dict[tuple[str, str], list[list[Window]]] = defaultdict(list)
    selections: dict[tuple[str, str], list[Selection]] = defaultdict(list)
    for round_ in range(rounds):
        first = round_ % len(group)
        for load in loads:
            left_out = lagging(windows, group, load) if race and round_ % SELDOM else set()
            for side in [*group[first:], *group[:first]]:
                if load not in _asked(side, loads):
                    continue
                tick(side, load)
                found, chosen = [], None
                if side.name not in left_out:
                    found, chosen = visits.give(side, visit(side, load), warm=round_ > 0 and side.remembers)
                windows[side.name, load.name].append(found)
                selections[side.name, load.name] += [chosen] if chosen else []
        asked = [servers[side.server] for side in servers_of(group)]
        requests, failed = sum(each.requests for each in asked), sum(each.failed for each in asked)
        kept = {key: list(found) for key, found in windows.items()}
        yield Measured(group, kept, requests, failed, {key: list(found) for key, found in selections.items()})


class _Visits:
    """What loads give on servers, each of which is left out from its first failure on."""

    def __init__(self, servers: Mapping[str, SideServer]) -> None:
        self._servers, self._broken, self._strategies = servers, set[str](), Strategies()

    def give(self, side: Side, load: Load, warm: bool) -> tuple[list[Window], Selection | None]:
        """A load's windows, and what was chosen."""
        server, chosen = self._servers[side.server], None
        if side.server in self._broken:
            return [], None
        with awake(server), self._strategies.active(server, side):
            before = decode(server, load) if side.learns else []
            found = (before if warm else []) + decode(server, load)
            if side.learns and not server.failed:
                chosen = selection(server)
        if server.failed:
            logging.error("%s failed, and is left out from here on:\n%s", side.server, tail(server.log))
            self._broken.add(side.server)
        return found, chosen


def merged(groups: Sequence[Measured]) -> Measured:
    """Groups that could not stand side by side, as if they had."""
    return Measured(
        [side for group in groups for side in group.sides],
        {key: value for group in groups for key, value in group.windows.items()},
        sum(group.requests for group in groups),
        sum(group.failed for group in groups),
        {key: value for group in groups for key, value in group.selections.items()},
    )


def side_figures(measured: Sequence[Measured], loads: Sequence[Load], of: str = "") -> Figures:
    """Of every side at every load: rate, step time, accept length, and how it compares with plain decoding.

    Plain decoding is measured in every group; its own figures are those of the first. of: before each side's name.
    """
    figures: Figures = {}
    for group in reversed(measured):
        for side in group.sides:
            for load in loads:
                rounds = group.windows.get((side.name, load.name), [])
                found = [window for round_ in rounds for window in round_]
                if not found:
                    continue
                name = f"{of}{side.name}_{load.name}"
                figures[f"tokens_per_s_{name}"] = median(window.tokens_per_s for window in found)
                figures[f"step_ms_{name}"] = _step_ms(found)
                figures[f"accept_length_{name}"] = sum(window.accept_length for window in found) / len(found)
                figures[f"windows_{name}"] = len(found)
                figures[f"windows_without_graph_{name}"] = sum(not window.graph for window in found)
                if side.name != PLAIN and (ratios := group.speedups(side.name, load.name)):
                    figures |= _ratio_figures(name, ratios, median(window.accept_length for window in found))
    return dict(sorted(figures.items()))


def _ratio_figures(name: str, ratios: Sequence[float], accept_length: float) -> Figures:
    speedup = median(ratios)
    return {
        f"speedup_{name}": speedup,
        f"speedup_min_{name}": min(ratios),
        f"speedup_max_{name}": max(ratios),
        f"break_even_{name}": accept_length / speedup,
    }


def totals(measured: Sequence[Measured]) -> Figures:
    """Requests sent and failed."""
    return {
        "requests": sum(group.requests for group in measured),
        "failed_requests": sum(group.failed for group in measured),
    }
