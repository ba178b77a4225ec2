"""One publication is one version, however its trainer sends it."""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_server.engine.weights.publications import Publications, Published, require_whole
from tlt_server.errors import OutOfTurn, TargetIncomplete

SILENCE = 2.0


@dataclass
class Story:
    """Publications, driven by words: what a trainer does, and `1.5` for seconds that pass."""

    now: float = 0.0
    events: list[Published] = field(default_factory=list)
    whole: str = ""
    partial: bool = False

    def __post_init__(self) -> None:
        self.target = Publications("default", SILENCE, lambda: self.now, self.events.append, self.gaps, self.partial)

    def gaps(self, names: AbstractSet[str]) -> list[str]:
        return [name for name in self.whole if name not in names]

    def tell(self, *words: str) -> "Story":
        for word in words:
            action, _, name = word.partition(":")
            if action in ("sent", "torn"):
                self.target.wrote(None, set(name), torn=action == "torn")
            elif action in ("wrote", "refused"):
                getattr(self.target, action)(name or None)
            elif hasattr(self.target, action):
                getattr(self.target, action)(*([name] if name else []))
            else:
                self.now += float(word)
                self.target.tick()
        return self

    def ended(self) -> list[tuple[int, str | None, int]]:
        return [(event.version, event.weight_version, event.calls) for event in self.events]


STORIES = {
    "slime: pause, flush, buckets, continue": ("paused flushed wrote:5 1 wrote:5 9 wrote:5 continued 9", [(1, "5", 3)]),
    "areal: both pauses, a flush with each bucket": (
        "paused paused wrote flushed wrote flushed continued",
        [(1, None, 2)],
    ),
    "miles: a session within a pause, named after it": (
        "paused flushed begin wrote 9 wrote named:7 end continued",
        [(1, "7", 2)],
    ),
    "a session without a pause": ("begin wrote:3 9 flushed wrote:4 end", [(1, "4", 2)]),
    "two sessions": ("begin wrote end begin wrote end", [(1, None, 1), (2, None, 1)]),
    "an empty session": ("begin end", []),
    "a session that its trainer left, and the next": ("begin wrote:1 9 begin wrote:2 end", [(1, "1", 1), (2, "2", 1)]),
    "a session that is opened twice": ("begin begin wrote:1 end", [(1, "1", 1)]),
    "one call from disk, which flushes": ("wrote:8 flushed", [(1, "8", 1)]),
    "a run that falls silent": ("wrote:8 1.9 wrote:8 1.9 wrote:8 2", [(1, "8", 3)]),
    "a run that is not over": ("wrote:8 1.9", []),
    "runs of two versions": ("wrote:8 wrote:8 wrote:9 flushed", [(1, "8", 2), (2, "9", 1)]),
    "a run of which one call names the version": ("wrote wrote wrote:8 flushed", [(1, "8", 3)]),
    "a session ends the run before it": ("wrote:8 begin wrote:9 end", [(1, "8", 1), (2, "9", 1)]),
    "a run that a pause overtakes": ("wrote:8 paused 9 wrote:8 continued", [(1, "8", 2)]),
    "a pause without an update": ("paused 9 continued", []),
    "calls that were all refused": ("paused refused refused continued refused 9", []),
}


@pytest.mark.parametrize("name", STORIES)
def test_what_trainers_do(name: str) -> None:
    words, ended = STORIES[name]
    assert Story().tell(*words.split()).ended() == ended


def test_what_is_sampled_meanwhile_is_partial() -> None:
    story = Story().tell("named:0", "paused", "refused:1")
    assert (story.target.partial, story.target.sampling) == (False, ("0", 0))
    story.tell("wrote:1")
    assert (story.target.partial, story.target.sampling) == (True, ("1", 1))
    story.tell("continued")
    assert (story.target.partial, story.target.sampling) == (False, ("1", 1))
    story.tell("wrote")
    assert (story.target.partial, story.target.sampling) == (True, ("1", 2))


def test_a_publication_says_what_it_lacks() -> None:
    story = Story().tell("paused", "refused", "wrote", "3")
    story.target.wrote(None, torn=True)
    story.tell("wrote", "1", "continued")
    assert story.events == [Published(1, None, calls=3, refused=1, torn=True, seconds=3.0)]


@pytest.mark.parametrize("words", ["end", "begin end end", "begin begin end end"])
def test_a_session_ends_once(words: str) -> None:
    with pytest.raises(OutOfTurn, match="no weight update is open"):
        Story().tell(*words.split())


WRITES, REFUSALS = ["wrote", "wrote:a", "wrote:b"], ["refused", "refused:a"]
WORDS = st.sampled_from(
    ["paused", "continued", "flushed", "begin", "end", "named:c", "0.5", "1", "3", *WRITES, *REFUSALS]
)


def told(story: Story, words: list[str], check: Callable[[str], None]) -> None:
    for word in words:
        try:
            story.tell(word)
        except OutOfTurn:
            assert word == "end"
        check(word)


@given(st.lists(WORDS, max_size=40))
def test_whatever_a_trainer_does(words: list[str]) -> None:
    """Versions are 1, 2, 3, …; each write is of exactly one; what samples is never of an earlier one than before; and
    what a trainer leaves alone, not holding it, ends."""
    story = Story()
    sampled = [0]
    writes = sum(word.startswith("wrote") for word in words)

    def check(word: str) -> None:
        assert [event.version for event in story.events] == list(range(1, story.target.version + 1))
        sampled.append(story.target.sampling[1])
        assert sampled[-1] in (sampled[-2], sampled[-2] + 1)
        assert story.target.sampling[1] == story.target.version + story.target.partial

    told(story, words, check)
    told(story, ["end", "continued", "3"], lambda word: None)
    assert not story.target.partial
    assert sum(event.calls for event in story.events) == writes


WHOLE = {
    "all in a call": ("sent:abc flushed", ""),
    "all in parts": ("paused sent:a sent:b refused sent:c continued", ""),
    "a part is missing": ("paused sent:a sent:c continued", "b"),
    "by silence": ("sent:b 2", "ac"),
    "a call that was refused and sent again": ("begin refused sent:bc sent:a end", ""),
    "a call that failed": ("begin sent:abc torn:b end", "b"),
    "a call that failed and was sent again": ("begin torn:ab sent:ab sent:c end", ""),
    "two parts of two publications": ("sent:ab flushed sent:c flushed", "ab"),
    "a whole one heals": ("sent:a flushed sent:abc flushed", ""),
    "a part by leave": ("begin_partial sent:a end", ""),
    "a part by leave, after a gap": ("sent:a flushed begin_partial sent:b end", "c"),
    "leave ends with its session": ("begin_partial sent:a end sent:a flushed", "bc"),
    "leave does not cover a failure": ("begin_partial torn:a end", "abc"),
    "a reset": ("sent:abc flushed reset", "abc"),
    "a reset within": ("begin sent:ab reset sent:c end", "ab"),
    "a loader of the user's own": ("paused wrote continued", ""),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_target_is_whole_once_all_of_it_was_sent(name: str) -> None:
    words, missing = WHOLE[name]
    story = Story(whole="abc")
    for word in words.split():
        if word == "begin_partial":
            story.target.begin(allow_partial=True)
        else:
            story.tell(word)
    assert "".join(story.target.missing) == missing


def test_what_ends_a_publication_says_what_it_lacks() -> None:
    story = Story(whole="abc").tell("begin", "sent:a")
    assert story.target.end() == ("b", "c")
    story.tell("paused")
    assert story.target.continued() == ()  # nothing was written meanwhile
    story.tell("paused", "sent:ab")
    assert story.target.continued() == ("c",)
    assert [event.missing for event in story.events] == [("b", "c"), ("c",)]
    with pytest.raises(TargetIncomplete, match=r"lacks a, b, c \(and 2 more\)"):
        require_whole("abcde")


def test_a_server_may_be_told_that_parts_are_meant() -> None:
    story = Story(whole="abc", partial=True).tell("sent:a", "flushed")
    assert (story.target.missing, story.target.may_be_partial) == ((), True)
