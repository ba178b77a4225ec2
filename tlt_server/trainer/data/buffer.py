"""Features in memory: bounded in bytes and in age, what is long kept longest; batches that mix two RL steps.

In the middle of an RL step only short responses are whole, and a drafter is needed for the long ones: a batch mixes
sequences of this step with those of steps before, long ones first (arXiv 2511.16665, 4.2).

Whole groups are held out, to judge by: those that a hash of the prompt names; under a target that has none held out yet
the first prompt, if there is something else to learn from; and of four prompts one, until there are as many requests as
a judgement takes. A share alone may name none of a target's few prompts, and drafters are judged for the newest target.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from random import Random
from threading import Lock

from tlt_server.errors import WireError
from tlt_server.trainer.data.features import Feature, Piece, Track, assemble
from tlt_server.trainer.learn.packing import Run, within

FREED = 0.1
"""Share of the budget that is freed at once, so that not every feature needs another one's place."""

MOST_RESPONSES = 1 << 15
"""A message may bring thousands of nothing but a known prompt."""

LEARNT_FOR_ONE = 3
"""Groups of a target that are learnt from for one that is held out because a judgement takes more requests."""

JUDGED_PARTS = 16
"""Into which what is judged by is cut at least, half of each context: else it were two windows of long responses."""

CONTEXT = 0.25
"""Share of a pack that a window of a sequence may spend on the entries before it, which are read, not learnt."""


@dataclass
class _Group:
    """Requests of one prompt. newest: target version of its newest feature. track: of the prompt."""

    is_held_out: bool = False
    newest: int = -1
    track: Track = field(default_factory=Track)
    requests: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Response:
    """Of one request. group, prompt: as in `Feature`. track: of what comes after the prompt."""

    request: str
    group: int
    prompt: int
    track: Track = field(default_factory=Track)


@dataclass(frozen=True)
class _Window:
    """Rows [begin, end) of a response; context: entries before them that are read, at most."""

    response: _Response
    begin: int
    end: int
    context: int


class Buffer:
    """What the trainer learns from and is judged by; for any thread.

    width, hidden: W of the states that the drafter reads, H of the target. budget: bytes of tensors at most. window:
    entries of a run at most; a longer sequence is learnt in several. max_age: target versions that a feature may be
    behind the newest. held_out: share of groups kept from training, at least; 0: none is. judged: requests that a
    judgement takes. dropped: features' parts that were not taken, and responses that had to go, counted by reason.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        budget: int,
        window: int,
        max_age: int = 1,
        held_out: float = 0.05,
        judged: int = 1,
    ) -> None:
        self._judged = judged
        self._width, self._hidden, self._budget = width, hidden, budget
        self._lock = Lock()
        self._window, self._context = window, int(CONTEXT * window)
        self._max_age, self._share = max_age, held_out
        self._responses: dict[str, _Response] = {}
        self._groups: dict[int, _Group] = {}
        self._judging: set[int] = set()  # groups that are held out
        self.newest = self.nbytes = 0
        self.dropped = Counter[str]()

    def add(self, feature: Feature) -> None:
        """Takes a feature; one that is too old, known, or at odds with others of its request is counted and dropped.
        Raises WireError: it is of another model."""
        self._check(feature)
        with self._lock:
            self._add(feature)

    def _add(self, feature: Feature) -> None:
        self._advance(feature.target_version)
        if feature.target_version < self.newest - self._max_age:
            self.dropped["old"] += 1
            return
        response = self._response(feature)
        stop = feature.first + len(feature.tokens)
        middle = min(max(response.prompt, feature.first), stop)
        self._take(self._groups[response.group].track, feature, feature.first, middle)
        self._take(response.track, feature, middle, stop)
        if self.nbytes > self._budget or len(self._responses) > MOST_RESPONSES:
            self._make_room()

    def advance(self, target_version: int) -> None:
        """Tells of a publication of the target; what is too old then goes."""
        with self._lock:
            self._advance(target_version)

    def _advance(self, target_version: int) -> None:
        if target_version <= self.newest:
            return
        self.newest = target_version
        for response in list(self._responses.values()):
            self._forget(response.track)
            if not response.track.rows:
                self._remove(response)
        for group in self._groups.values():
            self._forget(group.track)

    def held_out(self, entries: float = math.inf) -> list[Run]:
        """Runs to judge by, of `entries` entries or a little more: of groups kept from training, under the newest
        version of the target alone, from anywhere in them."""
        random = Random(0)  # so that the same features give the same runs
        most, context = self._window - self._context, self._context
        if entries < math.inf:
            part = max(1, int(entries / JUDGED_PARTS / 2))
            most, context = min(most, part), min(context, part)
        with self._lock:
            windows = self._windows(self._kept(True), random, most, context)
            random.shuffle(windows)
            return self._until(iter(windows), entries, self.newest)

    def draw(self, entries: int, random: Random, earlier: float = 0.5) -> list[Run]:
        """Runs to train on, each window of a sequence at most once, of `entries` entries or fewer; the last is cut to
        fit one pack.

        earlier: share of the entries from earlier steps, the longer a sequence the likelier; the rest is of the newest
            version of the target. What one of the two lacks, the other gives.
        """
        with self._lock:
            return self._draw(entries, random, earlier)

    def _draw(self, entries: int, random: Random, earlier: float) -> list[Run]:
        learnt, oldest = self._kept(False), self.newest - self._max_age
        most, context = self._window - self._context, self._context
        this = self._windows((each for each in learnt if each.track.newest == self.newest), random, most, context)
        before = self._windows((each for each in learnt if each.track.newest < self.newest), random, most, context)
        random.shuffle(this)
        # in the order of u^(1/w), u uniform: drawn by weight without replacement (Efraimidis and Spirakis, 2006)
        before.sort(key=lambda window: -(random.random() ** (1 / max(window.response.track.rows, 1))))
        runs, rest = self._about(before, earlier * entries, oldest, random)
        runs += self._until(chain(this, rest), entries - sum(run.entries for run in runs), oldest)
        return [run for run in within(runs, entries) if run.learnt]

    def _kept(self, is_held_out: bool) -> list[_Response]:
        return [each for each in self._responses.values() if self._groups[each.group].is_held_out == is_held_out]

    def _windows(self, responses: Iterable[_Response], random: Random, most: int, context: int) -> list[_Window]:
        """All rows of responses, at most so many in a window; the borders of windows lie elsewhere each time."""
        windows = []
        for response in responses:
            rows, begin = response.track.rows, 0
            end = rows if rows <= most else random.randint(1, most)
            while begin < rows:
                windows.append(_Window(response, begin, min(end, rows), context))
                begin, end = end, end + most
        return windows

    def _about(
        self, windows: Sequence[_Window], entries: float, oldest: int, random: Random
    ) -> tuple[list[Run], Sequence[_Window]]:
        """Runs of the first windows, of so many entries on average, and the other windows. The last one, with which
        they would be more, comes by chance: a long response's is as large as all that is drawn."""
        runs: list[Run] = []
        for index, window in enumerate(windows):
            more = list(self._runs(window, oldest))
            size = sum(run.entries for run in more)
            if entries <= 0 or (size > entries and random.random() * size >= entries):
                return runs, windows[index:]
            entries -= size
            runs += more
        return runs, ()

    def _until(self, windows: Iterator[_Window], entries: float, oldest: int) -> list[Run]:
        """Runs of the next windows, up to so many entries or a little more."""
        runs: list[Run] = []
        while entries > 0 and (window := next(windows, None)):
            more = list(self._runs(window, oldest))
            entries -= sum(run.entries for run in more)
            runs += more
        return runs

    def _runs(self, window: _Window, oldest: int) -> Iterator[Run]:
        """Of each stretch of a window without a gap, with what lies before it."""
        response = window.response
        for first, stop in response.track.stretches(window.begin, window.end, oldest):
            begin = first - window.context - 1
            before = self._groups[response.group].track.within(begin, response.prompt, oldest)
            runs = assemble((*before, *response.track.within(begin, stop, oldest)), first)
            if runs and runs[-1].learnt:
                yield replace(runs[-1], request=response.request)

    def _response(self, feature: Feature) -> _Response:
        """Of the feature's request; an empty one for a request that is new."""
        if (response := self._responses.get(feature.request)) is None:
            response = self._responses[feature.request] = _Response(feature.request, feature.group, feature.prompt)
            group = self._groups.setdefault(feature.group, _Group())
            if group.newest < feature.target_version:  # its old requests may have been learnt from under this target
                group.is_held_out = self._is_to_judge_by(feature)
                (self._judging.add if group.is_held_out else self._judging.discard)(feature.group)
            group.requests.add(feature.request)
        group = self._groups[response.group]
        group.newest = max(group.newest, feature.target_version)
        return response

    def _is_to_judge_by(self, feature: Feature) -> bool:
        """Whether a group is kept from training that is asked for the first time under a target."""
        if feature.is_held_out(self._share):
            return True
        if not self._share or feature.target_version < self.newest:
            return False
        others = self._judging - {feature.group}
        held = [group for each in others if (group := self._groups[each]).newest == self.newest]
        if not held:
            return len(self._groups) - 1 > len(others)  # there is something else to learn from
        learnt = sum(group.newest == self.newest and not group.is_held_out for group in self._groups.values())
        return sum(len(group.requests) for group in held) < self._judged and learnt >= LEARNT_FOR_ONE * len(held)

    def _take(self, track: Track, feature: Feature, first: int, stop: int) -> None:
        if first == stop:
            return
        before = track.nbytes
        if reason := track.add(Piece.of(feature, first, stop)):
            self.dropped[reason] += 1
        self.nbytes += track.nbytes - before

    def _forget(self, track: Track) -> None:
        before = track.nbytes
        track.forget(self.newest - self._max_age)
        self.nbytes += track.nbytes - before

    def _make_room(self) -> None:
        """The oldest step goes first, and of one step the shortest: so what stays of it are its long sequences."""
        order = sorted(self._responses.values(), key=lambda response: (response.track.newest, response.track.rows))
        for response in order:
            if self.nbytes <= (1 - FREED) * self._budget and len(self._responses) <= (1 - FREED) * MOST_RESPONSES:
                break
            self._remove(response)
            self.dropped["no room"] += 1

    def _remove(self, response: _Response) -> None:
        del self._responses[response.request]
        self.nbytes -= response.track.nbytes
        group = self._groups[response.group]
        group.requests.remove(response.request)
        if not group.requests:
            del self._groups[response.group]
            self._judging.discard(response.group)
            self.nbytes -= group.track.nbytes

    def _check(self, feature: Feature) -> None:
        rows = len(feature.tokens)
        finals = feature.states if feature.finals is None else feature.finals
        if feature.states.shape != (rows, self._width) or finals.shape != (rows, self._hidden):
            raise WireError(
                f"feature of {rows} tokens with states {tuple(feature.states.shape)} and final states "
                f"{tuple(finals.shape)}: of another model; this trainer's has {self._width} and {self._hidden}"
            )
