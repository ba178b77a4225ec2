"""A trainer that has no drafter begins with its server's: the process, over the link."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tlt_client.schemas import DrafterVersion

from tests.trainer.models import EAGLE_FOLDER, FOLDERS
from tests.trainer.stand_in import MODEL, Running, Server, until
from tlt_server.errors import ConfigError
from tlt_server.trainer.begin import _keep, begin, begins_with_servers
from tlt_server.trainer.config import TrainConfig
from tlt_server.wire.live import Taken
from tlt_server.wire.messages import Live


@pytest.mark.slow
def test_it_begins_with_the_servers_drafter_and_keeps_to_it(tmp_path: Path) -> None:
    """What the server drafts with is what it judges by: no drafter that learnt less is published. Started anew it asks
    nobody."""
    trainer = Running(tmp_path / "trainer")
    with trainer.process() as process:
        waiting = until(trainer.status, "the status is not shown while it waits")
        assert (waiting["state"], waiting["steps"]) == ("waiting for a server", 0)
        with Server(tmp_path / "one", trainer.control, trainer.features, newest=7, drafter=EAGLE_FOLDER) as server:
            until(lambda: trainer.status().get("frozen") == 0, f"it does not begin: {trainer.log}")
            assert "training begins with drafter 7 of one:1" in trainer.log
            theirs = load_file(EAGLE_FOLDER / "model.safetensors")
            ours = load_file(trainer.folder / "start" / "model.safetensors")
            assert all(torch.equal(ours[name], each) for name, each in theirs.items())
            server.push(range(40))
            judged = until(lambda: (now := trainer.status())["judged_by"] and now, "nothing is judged")
            assert judged["live"] > 3.5
            trainer.end(process)
    with trainer.process() as process:
        until(lambda: trainer.log.count("listens at") == 2, "it waits again")
        trainer.end(process)
    assert not {"Traceback", "fetched"} & {*trainer.log.split(), *(each.name for each in trainer.folder.iterdir())}


@pytest.mark.slow
def test_the_kind_is_the_servers(tmp_path: Path) -> None:
    trainer = Running(tmp_path / "trainer")
    eagle3 = FOLDERS["eagle3"]
    with (
        trainer.process() as process,
        Server(tmp_path / "one", trainer.control, trainer.features, drafter=eagle3),
    ):
        until(lambda: "listens at" in trainer.log, f"it does not begin: {trainer.log}")
        config = json.loads((trainer.folder / "start" / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        trainer.end(process)


def changed(folder: Path, change: Callable[[Path], object]) -> Taken:
    """The embedded drafter as it was fetched, and changed on the way."""
    folder.mkdir()
    file = folder / "arrived.partial"
    shutil.copy(EAGLE_FOLDER / "model.safetensors", file)
    config = json.loads((EAGLE_FOLDER / "config.json").read_text()) | (change(file) or {})
    return Taken("one:1", Live(version=1, config=json.dumps(config).encode()), file)


def spoil(file: Path) -> None:
    tensors = load_file(file)
    next(iter(tensors.values())).view(-1)[0] = float("nan")
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda file: os.truncate(file, 100), "damaged|safetensors"),
        (spoil, "NaN or infinity"),
        (lambda _: {"vocab_size": 296}, "vocab_size is 296, the target's"),
        (lambda _: {"intermediate_size": 1 << 40}, "not of the shape"),
        (lambda _: {"num_attention_heads": 1 << 40, "num_key_value_heads": 1 << 40}, "not of the shape"),
        (lambda _: {"hidden_act": "gelu"}, "hidden_act gelu"),
        (lambda _: {"intermediate_size": "many"}, "config.json"),
    ],
    ids=["no file", "not finite", "another vocabulary", "a lie", "a large lie", "not trained", "no number"],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, change: Callable[[Path], object], why: str) -> None:
    out = tmp_path / "start"
    with pytest.raises(ConfigError, match=why):
        _keep(changed(tmp_path / "fetched", change), MODEL, out)
    assert not out.exists()


def test_what_fits_is_kept(tmp_path: Path) -> None:
    _keep(changed(tmp_path / "fetched", lambda _: None), MODEL, tmp_path / "start")
    assert (tmp_path / "start" / "config.json").exists()


def test_who_says_what_to_begin_with_waits_for_nobody(tmp_path: Path) -> None:
    def config(**said: object) -> TrainConfig:
        return TrainConfig.read(None, {"target": str(EAGLE_FOLDER), "folder": str(tmp_path)} | said, {})

    assert begins_with_servers(config())
    assert not begins_with_servers(config(drafter_kind="eagle"))
    assert not begins_with_servers(config(drafter=str(EAGLE_FOLDER)))
    assert not begins_with_servers(config(drafter="/nowhere"))
    for learnt in ("start", "checkpoints", "published"):
        (tmp_path / learnt).mkdir()
        assert not begins_with_servers(config())
        (tmp_path / learnt).rmdir()


def test_a_server_without_one_to_give_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    control = f"ipc://{tmp_path}/control"
    said = {"target": str(FOLDERS["eagle"].parent / "target"), "folder": str(tmp_path / "trainer"), "listen": control}
    with Server(tmp_path / "one", control, f"{control}.features") as server:
        server._receiver.gives(DrafterVersion(2, str(tmp_path / "nowhere"), None, None))
        deadline = time.monotonic() + 20
        begin(TrainConfig.read(None, said, {}), lambda: time.monotonic() > deadline)
    assert "drafter 2 of one:1 is not begun with, but one that has learnt nothing: drafter 2: [Errno 2]" in caplog.text
    assert not (tmp_path / "trainer" / "start").exists()
