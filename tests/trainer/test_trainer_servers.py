"""What is known of servers, from what they say and in whatever order it arrives."""

import logging
from pathlib import Path

import msgspec
import pytest

from tests.wire.ends import HELLO, Hands
from tlt_server.trainer.servers import STAGING_S, Servers
from tlt_server.wire.messages import Hello
from tlt_server.wire.sharing import Source
from tlt_server.wire.trainer import SILENCE


def hello(
    count: int = 0, drafter: int = 0, newest: int = 0, shared: str = "", name: str = "default", settled: int = 0
) -> Hello:
    return Hello(
        server="ignored",
        model=HELLO.model,
        target_version=count,
        weight_version=name,
        drafter_version=drafter,
        newest_drafter=newest,
        shared=shared,
        settled_drafter=settled,
    )


def test_a_publication_and_what_is_shared_of_it(tmp_path: Path) -> None:
    servers, (first, second) = Servers(), folders(tmp_path)
    assert servers.targets.newest == -1
    servers.hear("a/1", hello(shared=str(first)))
    assert servers.shared(0) == first
    servers.hear("a/1", hello(count=1, name="step"))
    assert (servers.targets.newest, servers.shared(1)) == (1, None)
    servers.hear("a/1", hello(count=1, name="step", shared=str(second)))
    assert servers.shared(1) == second
    servers.forget(1)
    assert servers.shared(1) is None
    servers.hear("a/1", hello(count=1, name="step", shared=str(second)))
    assert servers.shared(1) is servers.elsewhere(1) is None


def test_what_lies_on_another_machine_is_asked_of_who_has_it(tmp_path: Path) -> None:
    servers, (here, _) = Servers(), folders(tmp_path)
    servers.hear("a/1", hello(count=4, name="step", shared="/of/another/machine"))
    assert servers.shared(0) is None
    assert servers.elsewhere(0) == Source(0, b"a/1", 4)
    servers.take(0, here)
    assert servers.shared(0) == here
    servers.hear("b/1", hello(count=7, name="next"))
    servers.take(0, here)  # too late
    assert servers.shared(1) is servers.elsewhere(1) is None
    servers.hear("b/1", hello(count=7, name="next", shared="/of/another/machine"))
    servers.forget(1)
    assert servers.elsewhere(1) is None


def folders(within: Path) -> list[Path]:
    made = [within / "first", within / "second"]
    for each in made:
        each.mkdir()
    return made


def test_what_is_shared_late_of_an_older_target_is_nothing() -> None:
    servers = Servers()
    servers.hear("a/1", hello(count=1, name="step 1"))
    servers.hear("b/1", hello(count=2, name="step 2"))
    servers.hear("a/1", hello(count=1, name="step 1", shared="/s/late"))
    assert servers.targets.newest == 1
    assert servers.shared(0) is servers.shared(1) is None


def test_publications_while_the_trainer_was_away_are_one() -> None:
    servers = Servers()
    servers.hear("a/1", hello(count=4))
    servers.hear("a/1", hello(count=4))
    assert servers.targets.newest == 0
    assert servers.targets.count_of(0) == 4


def test_a_server_that_was_started_anew_shares_another_target(tmp_path: Path) -> None:
    servers, (first, second) = Servers(), folders(tmp_path)
    servers.hear("a/1", hello(count=4, shared=str(first)))
    servers.hear("a/2", hello(count=0))
    assert (servers.targets.newest, servers.shared(1)) == (1, None)
    servers.hear("a/2", hello(count=0, shared=str(second)))
    assert servers.shared(1) == second


def test_drafters_of_several_servers() -> None:
    servers = Servers()
    servers.hear("a/1", hello(drafter=3, newest=5))
    servers.hear("b/1", hello())
    assert (servers.drafter, servers.newest_drafter) == (3, 5)
    servers.hear("b/1", hello(drafter=6, newest=6, settled=6))
    assert servers.drafter == 6
    servers.hear("b/1", hello(drafter=2, newest=6, settled=6))
    assert servers.drafter == 3


def test_a_drafter_is_on_its_way_until_a_server_says_what_became_of_it() -> None:
    servers = Servers()
    assert servers.is_on_its_way(1)
    servers.hear("a/1", hello())
    servers.hear("b/1", hello())
    for version, in_force in ((1, 1), (2, 1), (3, 3), (4, 3)):  # it is in force, refused, in force, rolled back
        assert servers.is_on_its_way(version)
        servers.hear("a/1", hello(drafter=in_force, newest=version, settled=version - 1))
        assert servers.is_on_its_way(version) == (in_force < version)
        servers.hear("a/1", hello(drafter=in_force, newest=version, settled=version))
        assert not servers.is_on_its_way(version)
    servers.hear("b/1", hello(settled=5))
    assert not servers.is_on_its_way(5)
    servers.hear("a/1", hello(drafter=6, newest=6))  # of a swap that was not told of
    assert not servers.is_on_its_way(6)


def test_a_drafter_is_on_its_way_again_to_a_server_that_was_started_anew() -> None:
    servers = Servers()
    servers.hear("a/1", hello(drafter=3, newest=3))
    servers.hear("a/2", hello())
    assert servers.is_on_its_way(3)


def test_a_word_that_was_lost_is_not_waited_for_for_ever() -> None:
    hands = Hands()
    servers = Servers(hands)
    for _ in range(int(STAGING_S) + 1):
        servers.hear("a/1", hello(newest=1))
        assert servers.is_on_its_way(1)
        hands.now += 1
    assert not servers.is_on_its_way(1)
    assert servers.is_on_its_way(2)
    hands.now += SILENCE
    assert servers.is_on_its_way(1)


def test_why_a_drafter_is_not_in_force_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    servers = Servers()
    for _ in range(3):
        servers.hear("a/1", hello())
    for why in ("drafter 1: no room", "drafter 1: no room", "", "drafter 2: no room", "drafter 2: no room"):
        servers.hear("a/1", msgspec.structs.replace(hello(), reason=why))
    warned = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert warned == ["a: drafter 1: no room", "a: drafter 2: no room"]


def test_a_silent_server_is_gone() -> None:
    hands = Hands()
    servers = Servers(hands)
    servers.hear("a/1", hello())
    assert servers.names == ["a"]
    hands.now += SILENCE
    assert servers.names == []
