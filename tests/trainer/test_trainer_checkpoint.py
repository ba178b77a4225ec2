"""Checkpoints: whole or not there, whatever the moment of a kill; the last few kept; training resumed to the bit."""

import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.trainer.models import embedded, frozen, run_of
from tlt_server.errors import ConfigError, DiskFailed
from tlt_server.trainer.checkpoint import Checkpoints
from tlt_server.trainer.learn.loop import Settings, Trainer
from tlt_server.trainer.learn.losses import HASS
from tlt_server.trainer.learn.packing import join


def test_the_last_few_are_kept_and_the_newest_comes_back(tmp_path: Path) -> None:
    saves = Checkpoints(tmp_path, keep=2)
    assert saves.newest() is None
    for step in (1, 5, 12):
        saves.save(step, {"x": torch.full((3,), step), "y": torch.tensor(step)}, {"step": step, "list": [1, None]})
    saves.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-00000012"]
    tensors, facts = Checkpoints(tmp_path).newest() or pytest.fail("none")
    assert facts == {"step": 12, "list": [1, None]}
    assert tensors["x"].tolist() == [12, 12, 12]


def test_a_checkpoint_half_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = Checkpoints(tmp_path, keep=1)
    monkeypatch.setattr("shutil.rmtree", lambda path: None)  # as if killed on the way
    for step in (1, 2):
        saves.save(step, {"x": torch.ones(1)}, {"step": step})
    saves.close()
    (tmp_path / "step-00000002" / "facts.json").unlink()
    assert saves.newest() is None


def test_weights_may_change_while_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, write, saves = threading.Event(), Checkpoints._write, Checkpoints(tmp_path)
    monkeypatch.setattr(Checkpoints, "_write", lambda *args: held.wait(10) and write(*args))
    weight = torch.ones(4)
    saves.save(1, {"w": weight}, {})
    weight.fill_(7)  # before a byte is written: so `save` has not waited for it
    held.set()
    saves.close()
    assert Checkpoints(tmp_path).newest().tensors["w"].tolist() == [1, 1, 1, 1]


def test_a_failure_to_write_is_told_by_the_next_call(tmp_path: Path) -> None:
    saves = Checkpoints(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    saves.save(1, {"w": torch.ones(1)}, {})
    with pytest.raises(DiskFailed, match="gone"):
        saves.save(2, {"w": torch.ones(1)}, {})
    with pytest.raises(DiskFailed, match="step-00000002 cannot be written"):
        saves.close()


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    saves = Checkpoints(tmp_path)
    saves.save(3, {"w": torch.ones(1)}, {})
    saves.close()
    (tmp_path / "step-00000003" / "state.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigError, match="step-00000003: damaged"):
        saves.newest()


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    command = [sys.executable, "-m", "tests.trainer.killed_savers", str(tmp_path), "12", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"


def test_training_resumes_to_the_bit(tmp_path: Path) -> None:
    packs = [join([run_of(torch.randint(2, 290, (20,)), 0, "eagle")]) for _ in range(6)]

    def trainer() -> Trainer:
        return Trainer(embedded("eagle"), frozen(), HASS, Settings(warmup=4), seed=1)

    whole = trainer()
    for pack in packs[:3]:
        whole.step([pack])
    whole.random.random()
    saves = Checkpoints(tmp_path)
    saves.save(whole.steps, *whole.state())
    saves.close()
    drawn, torch_drawn = whole.random.random(), torch.rand(1)
    for pack in packs[3:]:
        whole.step([pack])
    resumed = trainer()
    resumed.restore(*Checkpoints(tmp_path).newest())
    assert (resumed.random.random(), torch.rand(1)) == (drawn, torch_drawn)
    metrics = [resumed.step([pack]) for pack in packs[3:]]
    assert metrics[-1].step == whole.steps == 6
    for name, weight in whole.network.named_parameters():
        assert torch.equal(weight, resumed.network.get_parameter(name)), name
        assert torch.equal(whole.average.get_parameter(name), resumed.average.get_parameter(name)), name


def test_a_checkpoint_of_another_drafter_is_refused() -> None:
    trainer = Trainer(embedded("eagle"), frozen(), HASS)
    with pytest.raises(ConfigError, match=r"its weights\.fc\.weight is not this drafter's"):
        trainer.restore(*Trainer(embedded("eagle3"), frozen(), HASS).state())


def test_a_checkpoint_holds_no_frozen_tensor() -> None:
    trainer = Trainer(embedded("eagle"), frozen(), HASS)
    trainer.step([join([run_of(torch.arange(2, 20), 0, "eagle")])])
    tensors, _ = trainer.state()
    trained = sum(weight.nbytes for weight in trainer.network.parameters())
    assert sum(tensor.nbytes for tensor in tensors.values()) < 4 * trained + 10_000
