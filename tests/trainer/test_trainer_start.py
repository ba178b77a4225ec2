"""Settings of the trainer: what cannot be used is refused before anything is trained, in one line."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.trainer.models import FOLDERS, TARGET_FOLDER
from tlt_server.config import DrafterKind
from tlt_server.errors import ConfigError
from tlt_server.trainer.config import TrainConfig
from tlt_server.trainer.learn.demands import Demands
from tlt_server.trainer.learn.loop import Settings
from tlt_server.trainer.learn.ranks import joined
from tlt_server.trainer.service import Parts
from tlt_server.trainer.start import _rehearse, prepared
from tlt_server.trainer.status import Status, shown
from tlt_server.wire.tree import Member

DEFAULTS = {"target": str(TARGET_FOLDER), "listen": "tcp://127.0.0.1:*", "features": "tcp://127.0.0.1:*"}


def read(file: Path | None = None, **flags: Any) -> TrainConfig:
    return TrainConfig.read(file, flags, DEFAULTS)


@contextmanager
def _prepared(config: TrainConfig) -> Iterator[Parts]:
    with joined(config.device) as place, prepared(config, place) as parts:
        yield parts


def test_flags_go_before_the_file_and_the_file_before_defaults(tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text('target = "a"\nfolder = "b"\nport = 1\n[optimizer]\nrate = 0.5\n')
    config = read(file, port=2, loss=None, drafter_kind=DrafterKind.EAGLE3)
    assert (config.target, config.folder, config.port, config.drafter_kind) == ("a", "b", 2, DrafterKind.EAGLE3)
    assert config.optimizer == Settings(rate=0.5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "missing required field `folder`"),
        ('folder = "b"\nspeed = 1', "unknown field `speed`"),
        ('folder = "b"\nentries = 3', "`int` >= 16 - at `$.entries`"),
        ('folder = "b"\nloss = "best"', "'best' - at `$.loss`"),
        ('folder = "b"\n[policy]\nmargin = -1.0', "at `$.policy.margin`"),
        ('folder = "b"\nkey = "k"', "belong together"),
        ('folder = "b"\nfan_out = -1', "`int` >= 0 - at `$.fan_out`"),
        ('folder = "b"\nfan_out = 17', "`int` <= 16 - at `$.fan_out`"),
        ("folder", "config file"),
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "train.toml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        read(tmp_path / "train.toml")
    assert said in str(refused.value)


def test_features_arrive_beside_the_control_link() -> None:
    for listen, features in (("tcp://127.0.0.1:70", "tcp://127.0.0.1:71"), ("ipc:///a", "ipc:///a.features")):
        assert TrainConfig(target="a", folder="b", listen=listen).features_address == features
    with pytest.raises(ConfigError, match="Name an address for features"):
        TrainConfig(target="a", folder="b", listen="tcp://127.0.0.1:*").features_address  # noqa: B018


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"target": "/nowhere"}, "/nowhere"),
        ({"drafter": "/nowhere"}, "/nowhere"),
        ({"drafter": str(TARGET_FOLDER)}, "it has no fc.weight"),
        ({"drafter": str(FOLDERS["eagle3"]), "loss": "hass"}, "Take eagle3"),
        ({"device": "abacus"}, "device abacus"),
        ({"spot": {"on": True, "at_least": 2}}, "at_least 2 of 1 processes"),
        ({"spot": {"slowdown": 0.03}}, "slowdown = 0.03 wants on = true"),
        ({"memory_gb": 4.0, "device": "cpu"}, "memory_gb 4.0: is of a GPU, but device is cpu"),
        ({"listen": "tcp://203.0.113.1:70"}, "give CURVE keys"),
        ({"features": "nonsense"}, "tcp://HOST:PORT"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, flags: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said), _prepared(read(folder=str(tmp_path), **flags)):
        pass


def test_a_rehearsal_teaches_nothing(tmp_path: Path) -> None:
    with _prepared(read(folder=str(tmp_path))) as parts:
        before = [weight.clone() for weight in parts.trainer.network.parameters()]
        _rehearse(parts)
        assert all(map(torch.equal, before, parts.trainer.network.parameters()))
        assert parts.trainer.steps == 0
        parts.sender.link.close()


@pytest.mark.parametrize("fan_out", [0, 3])
def test_the_fan_out_is_the_senders(tmp_path: Path, fan_out: int) -> None:
    with _prepared(read(folder=str(tmp_path), fan_out=fan_out)) as parts:
        tree = parts.sender._tree
        tree.members |= {b"%d" % number: Member(0.0, "tcp://10.0.0.1:1", b"") for number in range(9)}
        sources = [tree.source(peer) for peer in tree.begin(1 << 30)]
        assert sources.count(None) == (fan_out or 9)
        parts.sender.link.close()


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of"), shown("127.0.0.1", port, lambda: None):
            pass


def test_who_asked_for_steps_is_told_that_the_trainer_ends() -> None:
    """It had a traceback there, and "Internal Server Error" for who asked."""
    with ThreadPoolExecutor(1) as pool:
        with shown("127.0.0.1", 0, Status, demands := Demands()) as url:
            asking = pool.submit(httpx.post, f"{url}/tlt/v1/train/steps", json={"steps": 3, "within_s": 60})
            while not demands.left:
                time.sleep(0.01)
        assert (asking.result().status_code, asking.result().json()["detail"][:16]) == (503, "the trainer ends")


def test_former_names_are_shown_for_one_release() -> None:
    with shown("127.0.0.1", 0, lambda: Status(active=7, in_force=7)) as url:
        status = httpx.get(f"{url}/tlt/v1/train/status").json()
        metrics = httpx.get(f"{url}/metrics").text
    assert (status["active"], status["in_force"]) == (7, 7)
    assert {"tlt_train_drafter_active 7.0", "tlt_train_drafter_in_force 7.0"} <= set(metrics.splitlines())


@pytest.mark.parametrize(("kind", "width"), [("eagle", 256), ("eagle3", 768)])
def test_a_drafter_is_made_once_and_gone_on_from(tmp_path: Path, kind: str, width: int) -> None:
    config = read(folder=str(tmp_path), drafter_kind=kind)
    for _ in range(2):
        with _prepared(config) as parts:
            assert parts.drafter.network.fc.weight.shape == (256, width if kind == "eagle3" else 512)
            parts.sender.link.close()
