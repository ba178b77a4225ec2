"""What is known of servers, from what they say and in whatever order it arrives."""

from pathlib import Path

from tests.wire.ends import HELLO, Hands
from tlt_server.trainer.servers import Servers
from tlt_server.wire.messages import DrafterSwapped, Hello, TargetPublished, TargetShared
from tlt_server.wire.sender import SILENCE


def hello(count: int = 0, drafter: int = 0, newest: int = 0, shared: str = "", name: str = "default") -> Hello:
    return Hello(
        server="ignored",
        model=HELLO.model,
        target_version=count,
        weight_version=name,
        drafter_version=drafter,
        newest_drafter=newest,
        shared=shared,
    )


def test_a_publication_and_what_is_shared_of_it() -> None:
    servers = Servers()
    servers.hear("a/1", TargetPublished(target_version=1, weight_version="early"))
    assert servers.targets.newest == -1
    servers.hear("a/1", hello(shared="/s/0"))
    assert servers.shared(0) == Path("/s/0")
    servers.hear("a/1", TargetPublished(target_version=1, weight_version="step"))
    assert (servers.targets.newest, servers.shared(1)) == (1, None)
    servers.hear("a/1", TargetShared(target_version=0, path="/s/late"))
    assert servers.shared(1) is None
    servers.hear("a/1", TargetShared(target_version=1, path="/s/1"))
    assert servers.shared(1) == Path("/s/1")
    servers.forget(1)
    assert servers.shared(1) is None


def test_what_waited_while_the_trainer_was_away_is_not_new() -> None:
    servers = Servers()
    servers.hear("a/1", hello(count=4))
    for count in range(1, 5):
        servers.hear("a/1", TargetPublished(target_version=count, weight_version="default"))
    assert servers.targets.newest == 0
    assert servers.targets.count_of(0) == 4


def test_a_server_that_was_started_anew_shares_another_target() -> None:
    servers = Servers()
    servers.hear("a/1", hello(count=4, shared="/s/4"))
    servers.hear("a/2", hello(count=0))
    assert (servers.targets.newest, servers.shared(1)) == (1, None)
    servers.hear("a/2", hello(count=0, shared="/s/0"))
    assert servers.shared(1) == Path("/s/0")


def test_drafters_of_several_servers() -> None:
    servers = Servers()
    servers.hear("a/1", hello(drafter=3, newest=5))
    servers.hear("b/1", hello())
    assert (servers.drafter, servers.newest_drafter) == (3, 5)
    servers.hear("b/1", DrafterSwapped(version=6, outcome="live", drafter_version=6))
    assert servers.drafter == 6
    servers.hear("b/1", DrafterSwapped(version=6, outcome="rolled_back", drafter_version=2, reason="worse"))
    assert servers.drafter == 3


def test_a_silent_server_is_gone() -> None:
    hands = Hands()
    servers = Servers(hands)
    servers.hear("a/1", hello())
    assert servers.names == ["a"]
    hands.now += SILENCE
    assert servers.names == []
