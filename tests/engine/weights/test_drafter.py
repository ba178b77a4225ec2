"""The drafter's versions: what is active is what was offered last and taken, on every rank at once."""

import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace as Made
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tlt_client.schemas import DrafterVersion

from tests.forks import on_ranks
from tlt_server.config import Arm, Watchfulness
from tlt_server.engine.decode.speculation import Speculation
from tlt_server.engine.events import EventLog
from tlt_server.engine.messages import Offer
from tlt_server.engine.weights.drafter import Drafter
from tlt_server.engine.weights.watchdog import FIRST_S, Watchdog
from tlt_server.errors import OutOfTurn, UpdateRefused

MOST = 3


class Contents:
    """Weights that are the name of the file that they came from; a file whose name begins with `bad` is refused."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.live, self.staged, self.previous = "start", "", ""
        self.may_stage = threading.Event()
        self.may_stage.set()
        self._late_s = late_s

    def stage(self, path: Path, sha256: str | None) -> str:
        self.may_stage.wait(10)
        time.sleep(self._late_s)
        self.staged = path.name
        if path.name.startswith("bad"):
            raise UpdateRefused(f"{path.name} holds NaN")
        return sha256 or path.name

    def flip(self, *, remember: bool) -> None:
        if remember:
            self.previous = self.live
        self.live = self.staged

    def flip_back(self) -> None:
        self.live = self.previous

    def reset(self) -> None:
        self.live = "random"


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


ARM = Arm(MOST, 1, MOST + 1)


class Rank:
    """A drafter with all that it is told and tells. The watchdog observes, unless a test says otherwise."""

    def __init__(
        self,
        contents: Contents,
        group: Any,
        mode: Watchfulness = Watchfulness.OBSERVE,
        *,
        untrained: bool = False,
    ) -> None:
        self.contents, self.events = contents, EventLog()
        self.worker = Made(all_arms=(ARM,), captured={ARM: 32}, costs=None, table=None, chooses=False, history=None)
        start = DrafterVersion(0, "start", None, None)
        self.speculation = speculation = Speculation(self.worker, 32, self.events)
        self.now = 1000.0
        dog = Watchdog([ARM], mode, 1.2, lambda: self.now)
        self.drafter = Drafter(contents, group, nullcontext, self.events, start, dog, speculation, untrained=untrained)

    def settles(self, accepted: int, steps: int) -> None:
        """Steps of eight requests, each of which has so many drafts accepted."""
        for _ in range(steps):
            self.drafter.settled(self.drafter.live.version, ARM, [(str(i), accepted) for i in range(8)])

    def told(self) -> list[str]:
        return [event.kind for event in self.events.after(0)]

    def last(self, kind: str) -> dict[str, Any]:
        return [event.detail for event in self.events.after(0) if event.kind == kind][-1]


@pytest.fixture
def contents() -> Contents:
    return Contents()


@pytest.fixture
def drafter(contents: Contents, group: Any) -> Drafter:
    return Rank(contents, group).drafter


@pytest.fixture
def armed(contents: Contents, group: Any) -> Rank:
    """Settled on the drafter of the start, which has two of three drafts accepted."""
    rank = Rank(contents, group, Watchfulness.ARMED)
    rank.settles(2, 200)
    assert rank.drafter.describe().watch.state == "settled"
    return rank


def committed(drafter: Drafter, version: int) -> None:
    """As the HTTP route does."""
    until = time.monotonic() + 10
    while not drafter.commit(version):
        assert time.monotonic() < until
        time.sleep(0.001)


def swap(drafter: Drafter, path: str, version: int) -> None:
    drafter.offer(Offer(path, version))
    committed(drafter, version)


def test_a_swap_and_its_way_back(drafter: Drafter, contents: Contents) -> None:
    swap(drafter, "/a", 1)
    assert (contents.live, drafter.live.version, drafter.live.sha256) == ("a", 1, "a")
    swap(drafter, "/b", 7)
    drafter.roll_back("it was asked for")
    assert (contents.live, drafter.live.version, drafter.describe().newest) == ("a", 1, 7)
    with pytest.raises(OutOfTurn, match="no drafter to go back to"):
        drafter.roll_back("again")
    swap(drafter, "/c", 8)
    assert contents.live == "c"


def test_a_drafter_that_has_learnt_nothing_is_never_drafted_with(contents: Contents, group: Any) -> None:
    rank = Rank(contents, group, Watchfulness.ARMED, untrained=True)
    assert not rank.speculation.on
    swap(rank.drafter, "/a", 1)
    assert rank.speculation.on
    rank.drafter.roll_back("it was asked for")
    assert not rank.speculation.on
    swap(rank.drafter, "/b", 2)
    assert rank.speculation.on
    rank.settles(0, 1000)  # it is of no use, and what it could go back to has learnt nothing
    assert not rank.speculation.on
    assert (rank.drafter.live.version, rank.last("accept_length_collapsed")["action"]) == (2, "speculation_off")


def test_only_a_trusted_drafters_cache_serves_the_next_one(armed: Rank) -> None:
    swap(armed.drafter, "/a", 1)
    assert armed.drafter.cache_era == 0  # the drafter of the start is trusted
    swap(armed.drafter, "/b", 2)
    assert armed.drafter.cache_era == 1  # /a was on trial
    armed.settles(2, 2000)
    assert armed.last("drafter_kept")["version"] == 2
    swap(armed.drafter, "/c", 3)
    assert armed.drafter.cache_era == 1
    armed.settles(0, 1000)
    assert (armed.drafter.live.version, armed.drafter.cache_era) == (2, 2)  # rolled back by itself


def test_nothing_is_in_force_before_it_is_staged(drafter: Drafter, contents: Contents) -> None:
    contents.may_stage.clear()
    drafter.offer(Offer("/a", 1))
    for _ in range(3):
        assert not drafter.commit(1)
    assert (contents.live, drafter.describe().staging.ready) == ("start", False)
    contents.may_stage.set()
    committed(drafter, 1)
    assert contents.live == "a"


def test_a_duplicate_changes_nothing(drafter: Drafter, contents: Contents) -> None:
    contents.may_stage.clear()
    for _ in range(2):
        drafter.offer(Offer("/a", 3))  # on its way
    with pytest.raises(OutOfTurn, match="from other weights"):
        drafter.offer(Offer("/b", 3))
    contents.may_stage.set()
    committed(drafter, 3)
    committed(drafter, 3)  # who joined is told as who began
    drafter.offer(Offer("/a", 3))  # active
    drafter.offer(Offer("/copy", 3, sha256="a"))
    assert drafter.describe().staging is None
    with pytest.raises(OutOfTurn, match="active, with other weights"):
        drafter.offer(Offer("/a", 3, sha256="other"))


def test_versions_only_grow(drafter: Drafter) -> None:
    swap(drafter, "/a", 5)
    with pytest.raises(OutOfTurn, match="version 4 is too late: version 5 was active"):
        drafter.offer(Offer("/b", 4))
    swap(drafter, "/b", 6)
    drafter.roll_back("it was bad")
    with pytest.raises(OutOfTurn, match="version 6 is too late: it was rolled back, to 5"):
        drafter.offer(Offer("/b", 6))


def test_the_newer_of_two_at_once_is_taken(drafter: Drafter, contents: Contents) -> None:
    contents.may_stage.clear()
    drafter.offer(Offer("/a", 4))
    drafter.offer(Offer("/b", 6))
    with pytest.raises(OutOfTurn, match="version 5 is too late: version 6 is on its way"):
        drafter.offer(Offer("/c", 5))
    contents.may_stage.set()
    with pytest.raises(OutOfTurn, match="another one overtook it"):
        committed(drafter, 4)
    committed(drafter, 6)
    assert contents.live == "b"


def test_what_is_refused_may_be_mended(drafter: Drafter, contents: Contents) -> None:
    drafter.offer(Offer("/bad", 1))
    for _ in range(2):  # and whoever joined is told the same
        with pytest.raises(UpdateRefused, match="bad holds NaN"):
            committed(drafter, 1)
    assert (contents.live, drafter.live.version) == ("start", 0)
    swap(drafter, "/good", 1)
    assert contents.live == "good"


def test_frozen(drafter: Drafter, contents: Contents) -> None:
    swap(drafter, "/a", 1)
    drafter.offer(Offer("/b", 2))
    drafter.freeze(True)
    with pytest.raises(OutOfTurn, match="frozen"):
        committed(drafter, 2)
    with pytest.raises(OutOfTurn, match="frozen"):
        drafter.offer(Offer("/c", 3))
    drafter.roll_back("a rollback is no update")
    assert contents.live == "start"
    drafter.freeze(False)
    swap(drafter, "/d", 4)


def test_a_fault_of_our_own_is_told_too(drafter: Drafter, contents: Contents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "stage", lambda path, sha256: 1 / 0)
    with pytest.raises(UpdateRefused, match="ZeroDivisionError"):
        swap(drafter, "/a", 1)


def test_a_drafter_that_is_worse_goes_by_itself(armed: Rank) -> None:
    swap(armed.drafter, "/useless", 1)
    armed.settles(0, 50)
    assert (armed.contents.live, armed.drafter.live.version) == ("start", 0)
    assert armed.told() == ["drafter_swapped", "accept_length_collapsed", "drafter_rolled_back"]
    collapsed, back = armed.last("accept_length_collapsed"), armed.last("drafter_rolled_back")
    assert (collapsed["version"], collapsed["since"], collapsed["action"]) == (1, "drafter", "rolled_back")
    assert (collapsed["accept_length"], collapsed["before"]) == (1.0, 3.0)
    assert (back["from_version"], back["steps"]) == (1, collapsed["steps"])
    assert back["recovery_s"] > 0
    assert "accept length 1.00 since drafter" in back["why"]
    assert armed.drafter.watchdog.trusted
    with pytest.raises(OutOfTurn, match="it was rolled back"):
        armed.drafter.offer(Offer("/useless", 1))


def test_a_drafter_as_good_is_kept(armed: Rank) -> None:
    swap(armed.drafter, "/good", 1)
    armed.settles(2, 200)
    assert armed.told() == ["drafter_swapped", "drafter_kept"]
    swap(armed.drafter, "/useless", 2)
    armed.settles(0, 50)
    assert (armed.contents.live, armed.drafter.live.version) == ("good", 1)


def test_two_in_a_row_go_back_to_the_trusted_one(armed: Rank) -> None:
    for version in (1, 2, 3):
        swap(armed.drafter, f"/useless{version}", version)
        armed.settles(0, 5)
    assert armed.drafter.previous is not None
    assert armed.drafter.previous.version == 0
    armed.settles(0, 50)
    assert (armed.contents.live, armed.drafter.live.version) == ("start", 0)


def test_who_rolls_back_one_on_trial_gets_the_trusted_one(armed: Rank) -> None:
    """Armed, one that was overtaken on trial is not kept. Observing, the drafter of before is whichever was before."""
    for first, mode, expected in ((1, Watchfulness.ARMED, "start"), (3, Watchfulness.OBSERVE, "b3")):
        armed.drafter.set_watchdog(mode)
        swap(armed.drafter, f"/b{first}", first)
        swap(armed.drafter, f"/c{first + 1}", first + 1)
        armed.drafter.roll_back("it was asked for")
        assert armed.contents.live == expected


def test_observing_it_only_says_so(armed: Rank) -> None:
    armed.drafter.set_watchdog(Watchfulness.OBSERVE)
    swap(armed.drafter, "/useless", 1)
    armed.settles(0, 500)
    assert armed.told() == ["watchdog_set", "drafter_swapped", "accept_length_collapsed"]
    assert armed.last("accept_length_collapsed")["action"] == "none"
    assert (armed.contents.live, armed.drafter.describe().watch.state) == ("useless", "worse")
    armed.drafter.set_watchdog(Watchfulness.ARMED)
    swap(armed.drafter, "/useless2", 2)
    armed.settles(0, 50)
    assert (armed.contents.live, armed.speculation.on) == ("start", True)


def test_with_nothing_to_go_back_to_speculation_is_off_until_the_next(armed: Rank) -> None:
    armed.drafter.stop("the drafter has learnt nothing yet")
    swap(armed.drafter, "/useless", 1)
    assert armed.told()[-2:] == ["drafter_swapped", "speculation_on"]
    armed.settles(0, 2000)
    assert armed.last("accept_length_collapsed")["before"] is None
    assert armed.told()[-1] == "speculation_off"
    assert armed.last("speculation_off")["why"].endswith("at least 1.20 was demanded")
    seen = len(armed.told())
    armed.settles(0, 1000)  # of steps that draft nothing
    assert len(armed.told()) == seen
    swap(armed.drafter, "/good", 2)
    armed.settles(2, 200)
    assert armed.told()[seen:] == ["drafter_swapped", "speculation_on", "drafter_kept"]
    assert armed.speculation.on


@pytest.mark.parametrize(("accepted", "action"), [(1, "none"), (0, "speculation_off")])
def test_a_target_that_no_drafter_is_to_blame_for(armed: Rank, accepted: int, action: str) -> None:
    """Going back would not help: off, if it is no help any more; else it is only said, and is how it is from now on."""
    rank = armed
    rank.settles(3, 3000)
    rank.drafter.watchdog.hear("target")
    rank.settles(accepted, 200)
    collapsed = rank.last("accept_length_collapsed")
    assert (collapsed["since"], collapsed["action"]) == ("target", action)
    assert rank.contents.live == "start"
    assert rank.speculation.on == (action == "none")


def test_what_was_turned_off_is_probed(armed: Rank) -> None:
    """By what makes sense again, or after a while that grows; what is still of no use is soon off, else it stays."""
    drafter = armed.drafter
    assert drafter.watchdog.probe_due(1) is None
    drafter.watchdog.hear("target")
    armed.settles(0, 200)
    assert not armed.speculation.on
    for wait in (FIRST_S, 2 * FIRST_S):
        assert drafter.describe().watch.probe_time == armed.now + wait
        assert drafter.watchdog.probe_due(2) is None
        armed.now += wait
        drafter.probe(str(drafter.watchdog.probe_due(2)))
        assert (armed.speculation.on, drafter.describe().watch.probe_time) == (True, None)
        assert (drafter.describe().watch.event, drafter.describe().watch.state) == ("probe", "watching")
        assert drafter.watchdog.probe_due(3) is None, "one is under way"
        armed.settles(0, 800)
        assert armed.last("accept_length_collapsed")["since"] == "probe"
        assert not armed.speculation.on
    assert drafter.watchdog.probe_due(2) is None
    drafter.set_watchdog(Watchfulness.OBSERVE)
    assert (drafter.watchdog.probe_due(3), drafter.describe().watch.probe_time) == (None, None)
    drafter.set_watchdog(Watchfulness.ARMED)
    drafter.probe(str(drafter.watchdog.probe_due(3)))
    assert armed.last("speculation_on")["why"] == "probing, as the target is now version 3"
    armed.settles(2, 800)
    assert armed.told()[-1] == "drafter_kept"
    assert drafter.watchdog.trusted
    armed.now += 1e6
    assert drafter.watchdog.probe_due(4) is None
    drafter.probe("it came late")
    assert armed.told()[-1] == "drafter_kept"


def test_what_has_learnt_nothing_is_never_probed(contents: Contents, group: Any) -> None:
    rank = Rank(contents, group, Watchfulness.ARMED, untrained=True)
    rank.now += 1e6
    assert not rank.speculation.on
    assert rank.drafter.watchdog.probe_due(1) is rank.drafter.watchdog.probe_due(2) is None
    assert rank.drafter.describe().watch.probe_time is None


def test_steps_of_another_drafter_say_nothing(armed: Rank) -> None:
    """Under overlap one is settled after the swap that followed its launch."""
    swap(armed.drafter, "/good", 1)
    for _ in range(100):
        armed.drafter.settled(0, ARM, [(str(i), 0) for i in range(8)])
    assert armed.drafter.describe().watch.steps == 0


ACTIONS = st.one_of(
    st.tuples(st.just("offer"), st.sampled_from(["/a", "/b", "/bad"]), st.integers(1, 8)),
    st.tuples(st.just("commit"), st.integers(1, 8)),
    st.tuples(st.sampled_from(["roll_back", "freeze", "unfreeze", "arm", "disarm", "publish"])),
    st.tuples(st.just("settle"), st.integers(0, MOST), st.sampled_from([1, 30, 200])),
)


@settings(max_examples=60)
@given(st.lists(ACTIONS, max_size=25))
def test_whatever_is_asked(group: Any, actions: list[Any]) -> None:
    """What is active is what its version says, was offered under it, and grows but for a rollback."""
    contents = Contents()
    rank = Rank(contents, group)
    drafter, events = rank.drafter, rank.events
    offered: dict[int, str] = {0: "start"}
    for action, *rest in actions:
        before, newest = drafter.live.version, drafter.describe().newest
        try:
            if action == "offer":
                drafter.offer(Offer(*rest))
                if rest[1] != before:
                    offered[rest[1]] = Path(rest[0]).name
            elif action == "commit":
                committed(drafter, *rest)
            elif action == "roll_back":
                drafter.roll_back("asked")
            elif action == "settle":
                rank.settles(*rest)
            elif action in ("arm", "disarm"):
                drafter.set_watchdog(Watchfulness.ARMED if action == "arm" else Watchfulness.OBSERVE)
            elif action == "publish":
                drafter.watchdog.hear("target")
            else:
                drafter.freeze(action == "freeze")
        except UpdateRefused:
            assert drafter.live.version == before
        now = drafter.live.version
        goes_back = action in ("roll_back", "settle")
        assert now == before or (now > newest if action == "commit" else goes_back and now < before)
        assert contents.live == offered[now]
        assert drafter.previous is None or contents.previous == offered[drafter.previous.version]
        if action == "settle" and now != before:
            assert drafter.watchdog.trusted
        assert not contents.live.startswith("bad")
    swapped = [event.detail["version"] for event in events.after(0) if event.kind == "drafter_swapped"]
    assert swapped == sorted(set(swapped))


def rank_main(rank: int, store: str) -> list[Any]:
    """One of two ranks; the second stages late, and cannot stage `worse`, which the first can."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    contents = Contents(late_s=0.3 * rank)
    drafter = Rank(contents, dist.group.WORLD).drafter
    told: list[Any] = []
    drafter.offer(Offer("/a", 1))
    while drafter.describe().staging is not None and rank == 0 and not drafter.describe().staging.ready:
        time.sleep(0.001)
    waits = 0
    while not drafter.commit(1):
        waits += 1
    told += [waits > 0, contents.live]
    drafter.offer(Offer("/bad" if rank else "/good", 2))
    try:
        while not drafter.commit(2):
            pass
    except UpdateRefused as refused:
        told.append(str(refused))
    told += [contents.live, drafter.live.version]
    dist.destroy_process_group()
    return told


@pytest.mark.slow
def test_a_rank_that_is_late_or_fails_holds_all_back(tmp_path: Path) -> None:
    assert on_ranks(rank_main, str(tmp_path / "store")) == [[True, "a", "bad holds NaN", "a", 1]] * 2
