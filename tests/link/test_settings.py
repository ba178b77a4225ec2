"""What a link needs is checked before anything is loaded: each mistake is one line that names the value."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq.auth
from safetensors.torch import save_file

from tests.wire.ends import MODEL
from tlt_server.cli import read_config
from tlt_server.config import ServerConfig, Trainer
from tlt_server.demo import default_paths
from tlt_server.drafter.header import MOST_HEADER
from tlt_server.errors import ConfigError
from tlt_server.launch import QUIETLY, compose, following
from tlt_server.link import process
from tlt_server.link.process import LinkSettings, _most_bytes, settle
from tlt_server.wire.server import lock_folder

LOCAL = "tcp://127.0.0.1:7000"


def settled(tmp_path: Path, address: str = LOCAL, **fields: Any) -> LinkSettings:
    trainer = Trainer(address=address, **{"folder": str(tmp_path / "drafters")} | fields)
    return settle(trainer, "http://127.0.0.1:30000", None, None, MODEL, tmp_path)


def test_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = settled(tmp_path, folder=None)
    assert made.name.endswith(":30000")
    assert made.folder.name == f"tlt-drafters-{os.getuid()}-127.0.0.1:30000"
    assert not made.folder.exists()
    monkeypatch.setattr(process, "MEMORY", tmp_path / "no such folder")
    monkeypatch.setattr(process.tempfile, "tempdir", str(tmp_path))
    assert settled(tmp_path, folder=None).folder.parent == tmp_path


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:7000", "write ipc://PATH or tcp://HOST:PORT"),
        ("tcp://127.0.0.1", "write ipc://PATH or tcp://HOST:PORT"),
        ("tcp://127.0.0.1:99999", "write ipc://PATH or tcp://HOST:PORT"),
        ("tcp://10.0.0.1:7000", "leaves this machine: give CURVE keys"),
    ],
)
def test_an_address_that_cannot_be_used(tmp_path: Path, address: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settled(tmp_path, address)


def test_an_address_for_features_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="link elsewhere: write ipc"):
        settled(tmp_path, features="elsewhere")


def test_keys(tmp_path: Path) -> None:
    public, secret = zmq.auth.create_certificates(tmp_path, "server")
    Path(secret).chmod(0o600)
    made = settled(tmp_path, "tcp://10.0.0.1:7000", key=secret, trainer_key=public)
    assert made.curve == (Path(secret), Path(public))
    with pytest.raises(ConfigError, match="holds no secret key"):
        settled(tmp_path, key=public, trainer_key=public)
    with pytest.raises(ConfigError, match="belong together"):
        settled(tmp_path, key=secret)


def test_a_folder_that_another_server_uses(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path / "drafters")
    with pytest.raises(ConfigError, match="give each server its own"):
        settled(tmp_path)
    os.close(lock)
    settled(tmp_path)


def test_a_server_that_cannot_follow(tmp_path: Path) -> None:
    one = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "d", "model_path": "m", "nnodes": 1}
    for fields, said in (
        ({"speculative_algorithm": None}, "no drafter"),
        ({"speculative_draft_model_path": None}, "no drafter"),
        ({"nnodes": 2}, "on one machine"),
        ({"speculative_draft_model_path": "m"}, "an MTP head is the target's"),
    ):
        args: Any = SimpleNamespace(**one | fields)
        with pytest.raises(ConfigError, match=said):
            following(Trainer(address=LOCAL), args)


def test_flags_go_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tlt.toml"
    file.write_text('[trainer]\naddress = "ipc://a"\nserver = "rollout-3"\n')
    assert read_config(file).trainer == Trainer(address="ipc://a", server="rollout-3")
    assert read_config(file, trainer=LOCAL).trainer == Trainer(address=LOCAL, server="rollout-3")
    assert read_config(None, trainer=LOCAL).trainer == Trainer(address=LOCAL)


def test_the_links_questions_stay_out_of_the_log() -> None:
    model = ["--model-path", str(default_paths()[0])]
    assert QUIETLY[0] not in compose(ServerConfig(), model, gpu=True)
    config = ServerConfig(trainer=Trainer(address=LOCAL))
    assert compose(config, model, gpu=True)[-len(QUIETLY) :] == QUIETLY
    assert compose(config, [*model, QUIETLY[0], "/x"], gpu=True).count(QUIETLY[0]) == 1


def test_a_drafter_is_bounded_by_the_one_that_the_server_starts_with(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(10, 7, dtype=torch.bfloat16), "d2t": torch.zeros(5)}, tmp_path / "m.safetensors")
    assert _most_bytes(tmp_path) == 8 * 75 + MOST_HEADER
    (tmp_path / "m.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigError, match="damaged or incomplete"):
        _most_bytes(tmp_path)
