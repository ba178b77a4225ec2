"""When one publication of the target begins and ends, told from the calls that trainers make.

Trainers send a target in dozens of calls, and few say where it ends. One publication is

- what lies between `/begin_weight_update` and `/end_weight_update`,
- else what is written while generation is paused, until it continues,
- else a run of calls with one `weight_version`, which a flush of the cache, another `weight_version` or a silence ends.

One that ends before every tensor of the target was sent is incomplete, and the target lacks the others until a whole
one has ended. Where a part is allowed, what it leaves out stays as it was.

The version grows once for each, when it ends. Tokens sampled before that are of the version to come, and partial. Pure:
the clock is an argument. Every rank keeps one, of which rank 0's is shown: a silence may end a moment apart on others.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import msgspec

from tlt_server.errors import OutOfTurn, TargetIncomplete, listed

Gaps = Callable[[AbstractSet[str]], Sequence[str]]
"""Names of the target's tensors that are missing where these were sent."""


def no_gaps(_names: AbstractSet[str]) -> Sequence[str]:
    """Where nobody knows what the target is made of."""
    return ()


class Published(msgspec.Struct, frozen=True):
    """A publication that has ended.

    version: that it made, from 1 on. weight_version: the trainer's name for it, if it gave one. calls: that wrote.
    refused: calls that wrote nothing; the publication lacks what they carried. torn: whether a call failed while it was
    writing. seconds: from the first write to the last. missing: names of what the target lacks since.
    """

    version: int
    weight_version: str | None
    calls: int
    refused: int
    torn: bool
    seconds: float
    missing: tuple[str, ...] = ()


@dataclass
class _Open:
    """A publication under way; nothing is written yet while `calls` is 0. names: of the tensors that were written, and
    not spoilt since. unnamed: whether a call's are not known."""

    began: float
    last: float
    calls: int = 0
    refused: int = 0
    torn: bool = False
    weight_version: str | None = None
    names: set[str] = field(default_factory=set)
    unnamed: bool = False


@dataclass
class Publications:
    """The target's versions.

    weight_version: the trainer's name for the active weights; at start, SGLang's. silence_s: without a write, after
    which a run of calls has ended. gaps: what a publication lacks. allow_partial: whether it may lack something; a
    session says so for itself. missing: what the active target lacks.
    """

    weight_version: str
    silence_s: float
    clock: Callable[[], float]
    on_published: Callable[[Published], None]
    gaps: Gaps = no_gaps
    allow_partial: bool = False
    missing: tuple[str, ...] = ()
    version: int = 0
    _open: _Open | None = None
    _paused: bool = False
    _session: bool = False
    _partial_session: bool = False

    @property
    def partial(self) -> bool:
        """Whether a publication is under way: what samples now is neither the old target nor the new one."""
        return self._open is not None and self._open.calls > 0

    @property
    def sampling(self) -> tuple[str, int]:
        """The trainer's and our version of what samples now; of the one to come while it is partial."""
        if self._open is None or not self.partial:
            return self.weight_version, self.version
        return self._open.weight_version or self.weight_version, self.version + 1

    @property
    def in_session(self) -> bool:
        """Whether the trainer says where the publication begins and ends."""
        return self._session

    @property
    def may_be_partial(self) -> bool:
        """Whether a publication that goes on or begins now may leave tensors out."""
        return self.allow_partial or self._partial_session

    def begins(self, weight_version: str | None) -> bool:
        """Whether a call with this `weight_version` is the first of a publication."""
        self.tick()
        named = self._open.weight_version if self._open else None
        other = weight_version and named and weight_version != named
        return self._open is None or bool(other and not self._held)

    # -- what trainers do --

    def wrote(self, weight_version: str | None, names: AbstractSet[str] | None = None, *, torn: bool = False) -> None:
        """A call has changed weights. names: of the tensors that it carried; None where nobody knows: then the
        publication counts as whole. torn: whether it failed on the way."""
        publication = self._joined(weight_version)
        publication.last = self.clock()
        if not publication.calls:
            publication.began = publication.last
        publication.calls += 1
        publication.torn |= torn
        publication.unnamed |= names is None
        if torn:
            publication.names -= names or set()
        else:
            publication.names |= names or set()

    def refused(self, weight_version: str | None) -> None:
        """A call was refused, and has changed nothing."""
        self._joined(weight_version).refused += 1

    def named(self, weight_version: str) -> None:
        """The trainer names the weights, apart from the calls that carry them."""
        self.tick()
        if self._open:
            self._open.weight_version = weight_version
        else:
            self.weight_version = weight_version

    def reset(self) -> None:
        """The active weights are no target's any more."""
        self.missing = tuple(self.gaps(frozenset()))
        if self._open:
            self._open.names.clear()

    def begin(self, *, allow_partial: bool = False) -> None:
        """A session begins; what was under way has ended, a session too: its trainer may have begun anew."""
        self._close()
        self._session, self._partial_session = True, allow_partial

    def end(self) -> tuple[str, ...]:
        """The session ends. Returns what its publication lacks. Raises OutOfTurn: there is none."""
        if not self._session:
            raise OutOfTurn("no weight update is open: POST /begin_weight_update opens one")
        missing = self._close()
        self._session = self._partial_session = False
        return missing

    def paused(self) -> None:
        self.tick()
        self._paused = True

    def continued(self) -> tuple[str, ...]:
        """Returns what the publication lacks that this ends."""
        self._paused = False
        return () if self._session else self._close()

    def flushed(self) -> tuple[str, ...]:
        """Returns what the publication lacks that this ends."""
        return () if self._held else self._close()

    def tick(self) -> None:
        """Lets time pass: a run of calls ends by silence."""
        if self._open and not self._held and self.clock() - self._open.last >= self.silence_s:
            self._close()

    # -- within --

    @property
    def _held(self) -> bool:
        """Whether the trainer will say where the publication ends."""
        return self._session or self._paused

    def _joined(self, weight_version: str | None) -> _Open:
        """The publication that a call with this `weight_version` belongs to."""
        if self.begins(weight_version):
            self._close()
        if self._open is None:
            self._open = _Open(began=self.clock(), last=self.clock())
        self._open.weight_version = weight_version or self._open.weight_version
        return self._open

    def _close(self) -> tuple[str, ...]:
        """Ends what is under way; returns what the target lacks by it."""
        ended, self._open = self._open, None
        if ended is None or not ended.calls:
            return ()
        missing = () if ended.unnamed else tuple(self.gaps(ended.names))
        if self.may_be_partial and not ended.torn:  # a part leaves whole what is whole
            missing = tuple(name for name in missing if name in self.missing)
        self.missing = missing
        self.version += 1
        self.weight_version = ended.weight_version or self.weight_version
        seconds = ended.last - ended.began
        self.on_published(
            Published(self.version, ended.weight_version, ended.calls, ended.refused, ended.torn, seconds, self.missing)
        )
        return self.missing


def incomplete(missing: Sequence[str]) -> str:
    """What a trainer is told."""
    return (
        f"the target is incomplete: its publication lacks {listed(missing)}. Send the whole target again; "
        "what is to be a part is sent in a session begun with allow_partial"
    )


def require_whole(missing: Sequence[str]) -> None:
    """Raises TargetIncomplete where a publication that has ended lacks something."""
    if missing:
        raise TargetIncomplete(incomplete(missing))
