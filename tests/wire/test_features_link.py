"""The features link: what is sent arrives as it was, and a trainer that is away or does not read holds up nobody."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq.auth

from tests.wire.ends import ANY_PORT
from tlt_server.errors import ConfigError
from tlt_server.process import free_port
from tlt_server.wire.sockets import FEATURES_UNSENT, FEATURES_WAITING, CurveKeys, Inlet, Outlet

Connect = Callable[[str, CurveKeys | None], Outlet]


@pytest.fixture
def connected() -> Iterator[Connect]:
    with contextlib.ExitStack() as stack:

        def connect(address: str, curve: CurveKeys | None = None) -> Outlet:
            outlet = Outlet(address, curve)
            stack.callback(outlet.close)
            return outlet

        yield connect


@contextlib.contextmanager
def listening(address: str, curve: CurveKeys | None = None) -> Iterator[Inlet]:
    inlet = Inlet(address, curve)
    try:
        yield inlet
    finally:
        inlet.close()


def sent(outlet: Outlet, frames: list[bytes], seconds: float = 5) -> bool:
    """Once the two have met."""
    deadline = time.monotonic() + seconds
    while not (done := outlet.send(frames)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return done


def heard(inlet: Inlet, seconds: float = 5) -> list[bytes] | None:
    inlet.wait(seconds)
    frames = inlet.receive()
    return None if frames is None else [bytes(frame) for frame in frames]


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_there(connected: Connect, tmp_path: Path, scheme: str) -> None:
    frames = [b"header", b"x" * 3_000_000, b""]
    with listening(ANY_PORT if scheme == "tcp" else f"ipc://{tmp_path}/s") as inlet:
        assert sent(connected(inlet.address, None), frames)
        assert heard(inlet) == frames


@pytest.mark.slow
def test_curve(connected: Connect, tmp_path: Path) -> None:
    (known := tmp_path / "known").mkdir()
    for name in ("trainer", "server", "stranger"):
        _, secret = zmq.auth.create_certificates(tmp_path, name)
        Path(secret).chmod(0o600)
    (tmp_path / "server.key").rename(known / "server.key")
    with listening(ANY_PORT, CurveKeys(tmp_path / "trainer.key_secret", known)) as inlet:
        strange, own = (
            connected(inlet.address, CurveKeys(tmp_path / f"{name}.key_secret", tmp_path / "trainer.key"))
            for name in ("stranger", "server")
        )
        assert not sent(strange, [b"strange"], seconds=0.5)
        assert sent(own, [b"own"])
        assert heard(inlet) == [b"own"]
    with pytest.raises(ConfigError, match="holds no secret key"):
        Outlet("tcp://127.0.0.1:1", CurveKeys(tmp_path / "trainer.key", tmp_path / "trainer.key"))


def test_a_trainer_that_is_away_is_not_waited_for(connected: Connect) -> None:
    outlet = connected(f"tcp://127.0.0.1:{free_port()}", None)
    began = time.monotonic()
    assert not any(outlet.send([b"x"]) for _ in range(100))
    assert time.monotonic() - began < 1


def test_a_trainer_that_does_not_read_is_not_waited_for(connected: Connect) -> None:
    with listening(ANY_PORT) as inlet:
        outlet = connected(inlet.address, None)
        assert sent(outlet, [b"first"])
        most = 4 * (FEATURES_WAITING + FEATURES_UNSENT)
        taken = sum(outlet.send([b"x" * 4_000_000]) for _ in range(most))
        assert taken < most


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:7000", "tcp://127.0.0.1", "elsewhere"])
def test_an_address_that_cannot_be_used_is_named(address: str) -> None:
    with pytest.raises(ConfigError, match=address):
        Outlet(address)
