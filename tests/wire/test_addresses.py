"""Who may be at the other end of a link: addresses, and CURVE."""

import os
from pathlib import Path
from typing import Any

import pytest
import zmq.auth

from tests.wire.ends import ANY_PORT, HELLO, Open, heard, say
from tlt_server.errors import ConfigError
from tlt_server.wire.messages import READS_TO_SERVER, READS_TO_TRAINER, Heartbeat
from tlt_server.wire.sockets import CurveKeys, Link


@pytest.mark.parametrize(
    "address",
    [
        "tcp://*:5555",
        "tcp://0.0.0.0:5555",
        "tcp://10.0.0.1:5555",
        "tcp://eth0:5555",
        "tcp://[::]:5555",
        "tcp://trainer.example:5555",
        "tcp://127.0.0.1.example:5555",
        "tcp://127.0.0.1;10.0.0.1:5555",
    ],
)
@pytest.mark.parametrize("name", [None, "host"])
def test_what_leaves_the_machine_needs_keys(address: str, name: str | None) -> None:
    with pytest.raises(ConfigError, match="leaves this machine: give CURVE keys"):
        Link(address, READS_TO_TRAINER, name)


@pytest.mark.parametrize(
    "address", ["127.0.0.1:5555", "tcp:/127.0.0.1:1", "http://127.0.0.1:1", "inproc://x", "ipc://", ""]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="write ipc://PATH or tcp://HOST:PORT"):
        Link(address, READS_TO_TRAINER)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:no", "ipc:///no/such/folder/s", f"ipc:///tmp/{'x' * 200}"])
def test_what_zmq_cannot_bind_is_a_config_error(address: str) -> None:
    with pytest.raises(ConfigError, match=f"link {address[:20]}"):
        Link(address, READS_TO_TRAINER)


def test_an_address_in_use_is_a_config_error(opened: Open) -> None:
    first = opened(ANY_PORT, READS_TO_TRAINER)
    with pytest.raises(ConfigError, match="Address already in use"):
        Link(first.address, READS_TO_TRAINER)


def test_a_name_that_zmq_does_not_take_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"link tcp://127\.0\.0\.1:1: "):
        Link("tcp://127.0.0.1:1", READS_TO_SERVER, "x" * 300)


# -- CURVE ----------------------------------------------------------------------------------------------------------


class Keys:
    """Certificates of a trainer, a server that it knows, and one that it does not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known = folder / "known"
        self.known.mkdir()
        for name in ("trainer", "server", "stranger"):
            _, secret = zmq.auth.create_certificates(folder, name)
            Path(secret).chmod(0o600)
        (folder / "server.key").rename(self.known / "server.key")
        self.trainer = CurveKeys(folder / "trainer.key_secret", self.known)

    def of(self, name: str) -> CurveKeys:
        return CurveKeys(self.folder / f"{name}.key_secret", self.folder / "trainer.key")


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


def test_curve_there_and_back(keys: Keys, opened: Open) -> None:
    trainer = opened("tcp://*:*", READS_TO_TRAINER, curve=keys.trainer)
    port = trainer.address.rpartition(":")[2]
    server = opened(f"tcp://127.0.0.1:{port}", READS_TO_SERVER, "host", curve=keys.of("server"))
    say(server, HELLO)
    arrived = heard(trainer)
    assert arrived is not None
    assert trainer.send(Heartbeat(), to=arrived[0])
    answer = heard(server)
    assert answer is not None
    assert answer[1] == Heartbeat()


@pytest.mark.slow
@pytest.mark.parametrize("who", ["stranger", "nobody", "other trainer"])
def test_curve_keeps_others_out(keys: Keys, opened: Open, who: str) -> None:
    trainer = opened(ANY_PORT, READS_TO_TRAINER, curve=keys.trainer)
    curve = None if who == "nobody" else keys.of("stranger")
    if who == "other trainer":  # a right server, to whom somebody else answers
        curve = CurveKeys(keys.folder / "server.key_secret", keys.folder / "stranger.key")
    other = opened(trainer.address, READS_TO_SERVER, "host", curve=curve)
    for _ in range(5):
        other.send(HELLO)
        assert heard(trainer, tries=2) is None
    assert trainer.rejected.total() == 0


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda k: k.trainer._replace(own=k.folder / "no.key_secret"), "no.key_secret"),
        (lambda k: k.trainer._replace(own=k.folder / "trainer.key"), "trainer.key holds no secret key"),
        (lambda k: k.trainer._replace(peers=k.folder / "no"), "link"),
        (lambda k: k.trainer._replace(peers=k.folder.parent), "no certificate"),
    ],
    ids=["missing", "public", "no folder", "empty folder"],
)
def test_keys_that_cannot_be_used_are_named(keys: Keys, spoil: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Link("tcp://*:*", READS_TO_TRAINER, curve=spoil(keys))


def test_a_connecting_side_names_the_trainers_certificate(keys: Keys) -> None:
    with pytest.raises(ConfigError, match=r"absent\.key"):
        Link("tcp://127.0.0.1:1", READS_TO_SERVER, "host", keys.of("server")._replace(peers=keys.folder / "absent.key"))


def test_a_link_leaves_nothing_open(keys: Keys) -> None:
    def use() -> None:
        trainer = Link(ANY_PORT, READS_TO_TRAINER, curve=keys.trainer)
        server = Link(trainer.address, READS_TO_SERVER, "host", keys.of("server"))
        say(server, HELLO)
        assert heard(trainer) is not None
        for link in (server, trainer):
            link.close()
        with pytest.raises(ConfigError):
            Link("ipc:///no/such/folder/s", READS_TO_TRAINER)

    use()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        use()
    assert len(os.listdir("/proc/self/fd")) == before
