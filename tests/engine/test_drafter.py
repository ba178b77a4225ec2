"""The drafter's versions: what is in force is what was offered last and taken, on every rank at once."""

import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tlt_client.schemas import DrafterVersion

from tlt_server.engine.drafter import Drafter
from tlt_server.engine.events import EventLog
from tlt_server.engine.messages import Offer
from tlt_server.engine.swap import Staged
from tlt_server.errors import OutOfTurn, UpdateRefused


class Contents:
    """Weights that are the name of the file that they came from; a file whose name begins with `bad` is refused."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.live, self.staged, self.previous = "start", "", ""
        self.may_stage = threading.Event()
        self.may_stage.set()
        self._late_s = late_s

    def stage(self, path: Path, sha256: str | None) -> Staged:
        self.may_stage.wait(10)
        time.sleep(self._late_s)
        self.staged = path.name
        if path.name.startswith("bad"):
            raise UpdateRefused(f"{path.name} holds NaN")
        return Staged(sha256 or path.name)

    def flip(self) -> None:
        self.previous, self.live = self.live, self.staged

    def flip_back(self) -> None:
        self.live = self.previous


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def drafter_of(contents: Contents, group: Any) -> tuple[Drafter, EventLog]:
    events = EventLog()
    return Drafter(contents, group, nullcontext, events, DrafterVersion(0, "start", None, None)), events


@pytest.fixture
def contents() -> Contents:
    return Contents()


@pytest.fixture
def drafter(contents: Contents, group: Any) -> Drafter:
    return drafter_of(contents, group)[0]


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
    drafter.offer(Offer("/a", 3))  # in force
    drafter.offer(Offer("/copy", 3, sha256="a"))
    assert drafter.describe().staging is None
    with pytest.raises(OutOfTurn, match="in force, with other weights"):
        drafter.offer(Offer("/a", 3, sha256="other"))


def test_versions_only_grow(drafter: Drafter) -> None:
    swap(drafter, "/a", 5)
    with pytest.raises(OutOfTurn, match="version 4 is too late: version 5 was in force"):
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


ACTIONS = st.one_of(
    st.tuples(st.just("offer"), st.sampled_from(["/a", "/b", "/bad"]), st.integers(1, 8)),
    st.tuples(st.just("commit"), st.integers(1, 8)),
    st.tuples(st.sampled_from(["roll_back", "freeze", "unfreeze"])),
)


@settings(max_examples=60)
@given(st.lists(ACTIONS, max_size=25))
def test_whatever_is_asked(group: Any, actions: list[Any]) -> None:
    """What is in force is what its version says, was offered under it, and grows but for a rollback."""
    contents = Contents()
    drafter, events = drafter_of(contents, group)
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
            else:
                drafter.freeze(action == "freeze")
        except UpdateRefused:
            assert drafter.live.version == before
        now = drafter.live.version
        assert now == before or (now > newest if action == "commit" else action == "roll_back" and now < before)
        assert contents.live == offered[now]
        assert not contents.live.startswith("bad")
    swapped = [event.detail["version"] for event in events.after(0) if event.kind == "drafter_swapped"]
    assert swapped == sorted(set(swapped))


def rank_main(rank: int, store: str, results: Any) -> None:
    """One of two ranks; the second stages late, and cannot stage `worse`, which the first can."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    contents = Contents(late_s=0.3 * rank)
    drafter, _ = drafter_of(contents, dist.group.WORLD)
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
    results[rank] = told
    dist.destroy_process_group()


def test_a_rank_that_is_late_or_fails_holds_all_back(tmp_path: Path) -> None:
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(rank_main, args=(str(tmp_path / "store"), results), nprocs=2)
        assert results[0] == results[1] == [True, "a", "bad holds NaN", "a", 1]
