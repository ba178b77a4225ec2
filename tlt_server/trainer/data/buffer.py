"""Features in memory: bounded in bytes and in age, what is long kept longest; batches that mix two RL steps.

In the middle of an RL step only short responses are whole, and a drafter is needed for the long ones: a batch mixes
sequences of this step with those of steps before, long ones first (arXiv 2511.16665, 4.2).

Whole groups are held out, to judge by: those that a hash of the prompt names, and the first prompt under a target that
has none held out yet, if there is something else to learn from. A share alone may name none of a target's few prompts,
and drafters are judged for the newest target.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from random import Random

from tlt_server.errors import WireError
from tlt_server.trainer.data.features import Feature, Piece, assemble
from tlt_server.trainer.learn.packing import Run, within

FREED = 0.1
"""Share of the budget that is freed at once, so that not every feature needs another one's place."""

MOST_PIECES, MOST_RESPONSES = 4096, 1 << 15
"""Of one sequence, and in all: a message may bring thousands of a few bytes each, or of none but a known prompt."""


@dataclass
class _Pieces:
    """Of a response, or of a prompt that a group shares."""

    held: list[Piece] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.held)

    def add(self, piece: Piece) -> str | None:
        """Takes a piece, or says why not."""
        if len(self.held) >= MOST_PIECES:
            return "too many pieces"
        over = [other for other in self.held if other.overlaps(piece)]
        if any(other.contradicts(piece) for other in over):
            return "contradiction"
        if any(other.covers(piece) for other in over):
            return "known"
        self.held = [*(other for other in self.held if not piece.covers(other)), piece]
        return None

    def forget(self, oldest: int) -> None:
        self.held = [piece for piece in self.held if piece.version >= oldest]


@dataclass
class _Group:
    """Requests of one prompt. newest: target version of its newest feature. pieces: of the prompt."""

    is_held_out: bool = False
    newest: int = -1
    pieces: _Pieces = field(default_factory=_Pieces)
    requests: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Response:
    """Of one request. group, prompt: as in `Feature`."""

    request: str
    group: int
    prompt: int
    pieces: _Pieces = field(default_factory=_Pieces)

    @property
    def version(self) -> int:
        return max((piece.version for piece in self.pieces.held), default=-1)

    @property
    def length(self) -> int:
        return sum(len(piece.tokens) for piece in self.pieces.held)


class Buffer:
    """What the trainer learns from and is judged by.

    width, hidden: W of the states that the drafter reads, H of the target. budget: bytes of tensors at most. max_age:
    target versions that a feature may be behind the newest. held_out: share of groups kept from training, at least;
    0: none is. dropped: features' parts that were not taken, and responses that had to go, counted by reason.
    """

    def __init__(self, width: int, hidden: int, budget: int, max_age: int = 1, held_out: float = 0.05) -> None:
        self._width, self._hidden, self._budget = width, hidden, budget
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
        self.advance(feature.target_version)
        if feature.target_version < self.newest - self._max_age:
            self.dropped["old"] += 1
            return
        response = self._response(feature)
        stop = feature.first + len(feature.tokens)
        middle = min(max(feature.prompt, feature.first), stop)
        self._take(self._groups[response.group].pieces, Piece.of(feature, feature.first, middle))
        self._take(response.pieces, Piece.of(feature, middle, stop))
        if self.nbytes > self._budget or len(self._responses) > MOST_RESPONSES:
            self._make_room()

    def advance(self, target_version: int) -> None:
        """Tells of a publication of the target; what is too old then goes."""
        if target_version <= self.newest:
            return
        self.newest = target_version
        for response in list(self._responses.values()):
            response.pieces.forget(self.newest - self._max_age)
            if not response.pieces.held:
                self._remove(response)
        for group in self._groups.values():
            group.pieces.forget(self.newest - self._max_age)
        self.nbytes = sum(response.pieces.nbytes for response in self._responses.values())
        self.nbytes += sum(group.pieces.nbytes for group in self._groups.values())

    def held_out(self) -> list[Run]:
        """Runs to judge by: of groups kept from training, under the newest version of the target alone."""
        return [run for response in self._kept(True) for run in self._runs(response, self.newest)]

    def draw(self, entries: int, random: Random, earlier: float = 0.5) -> list[Run]:
        """Runs to train on, each sequence at most once, of `entries` entries or fewer; the last is cut to fit one pack.

        earlier: share of the entries from earlier steps, the longer a sequence the likelier; the rest is of the newest
            version of the target. What one of the two lacks, the other gives.
        """
        learnt = self._kept(False)
        this = [response for response in learnt if response.version == self.newest]
        before = [response for response in learnt if response.version < self.newest]
        random.shuffle(this)
        # in the order of u^(1/w), u uniform: drawn by weight without replacement (Efraimidis and Spirakis, 2006)
        before.sort(key=lambda response: -(random.random() ** (1 / max(response.length, 1))))
        order = iter(before)
        runs = self._until(order, earlier * entries)
        runs += self._until(chain(this, order), entries - sum(run.entries for run in runs))
        return within(runs, entries)

    def _kept(self, is_held_out: bool) -> list[_Response]:
        return [each for each in self._responses.values() if self._groups[each.group].is_held_out == is_held_out]

    def _until(self, responses: Iterator[_Response], entries: float) -> list[Run]:
        """Runs of the next responses, up to so many entries or a little more."""
        runs: list[Run] = []
        while entries > 0 and (response := next(responses, None)):
            more = self._runs(response, self.newest - self._max_age)
            entries -= sum(run.entries for run in more)
            runs += more
        return runs

    def _runs(self, response: _Response, oldest: int) -> list[Run]:
        pieces = (*self._groups[response.group].pieces.held, *response.pieces.held)
        runs = assemble((piece for piece in pieces if piece.version >= oldest), response.prompt)
        # a chain begins at the prompt's last token at the earliest: what ends there teaches nothing
        return [run for run in runs if run.first + run.entries >= response.prompt]

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
        if any(self._groups[each].newest == self.newest for each in others):
            return False
        return len(self._groups) - 1 > len(others)  # and there is something else to learn from

    def _take(self, pieces: _Pieces, piece: Piece) -> None:
        if not len(piece.tokens):
            return
        before = pieces.nbytes
        if reason := pieces.add(piece):
            self.dropped[reason] += 1
        self.nbytes += pieces.nbytes - before

    def _make_room(self) -> None:
        """The oldest step goes first, and of one step the shortest: so what stays of it are its long sequences."""
        order = sorted(self._responses.values(), key=lambda response: (response.version, response.length))
        for response in order:
            if self.nbytes <= (1 - FREED) * self._budget and len(self._responses) <= (1 - FREED) * MOST_RESPONSES:
                break
            self._remove(response)
            self.dropped["no room"] += 1

    def _remove(self, response: _Response) -> None:
        del self._responses[response.request]
        self.nbytes -= response.pieces.nbytes
        group = self._groups[response.group]
        group.requests.remove(response.request)
        if not group.requests:
            del self._groups[response.group]
            self._judging.discard(response.group)
            self.nbytes -= group.pieces.nbytes

    def _check(self, feature: Feature) -> None:
        rows = len(feature.tokens)
        finals = feature.states if feature.finals is None else feature.finals
        if feature.states.shape != (rows, self._width) or finals.shape != (rows, self._hidden):
            raise WireError(
                f"feature of {rows} tokens with states {tuple(feature.states.shape)} and final states "
                f"{tuple(finals.shape)}: of another model; this trainer's has {self._width} and {self._hidden}"
            )
