"""Logbooks hold what Prometheus reads; TensorBoard's file is read back by TensorBoard."""

import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.trainer.stand_in import Running, Server, until
from tlt_server.errors import ConfigError
from tlt_server.trainer import logbooks
from tlt_server.trainer.logbooks import figures, kept, require
from tlt_server.trainer.status import Metrics, Status

STATUS = Status(
    steps=30,
    loss=0.5,
    candidate=2.5,
    candidate_reaches=[0.75, 0.5, 0.25],
    tokens_dropped={"stale": 3},
)


def test_figures_are_those_of_prometheus() -> None:
    registry = CollectorRegistry()
    registry.register(Metrics(lambda: STATUS))
    shown = {
        "/".join((sample.name, *sample.labels.values())): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }
    assert figures(STATUS) == shown
    assert shown["tlt_train_candidate_reach/2"] == 0.5
    assert shown["tlt_train_tokens_dropped_total/stale"] == 3
    assert "tlt_train_live_accept_length" not in shown  # nothing was judged


def test_none_is_kept_unless_asked_for(tmp_path: Path) -> None:
    with kept((), tmp_path, lambda: pytest.fail("it was asked for")):
        pass
    assert not list(tmp_path.iterdir())


def test_one_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logbooks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"logbook wandb: not installed. pip install 'tlt-server\[wandb\]'"):
        require(["wandb"])


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Of TensorBoard's files: by name, steps and values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [(each.step, each.value) for each in events.Scalars(name)] for name in events.Tags()["scalars"]}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_tensorboard_reads_what_a_trainer_wrote(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    trainer = Running(tmp_path / "trainer", 'logbooks = ["tensorboard"]\npasses = 2.0')
    with Server(tmp_path / "one", trainer.control, trainer.features) as server, trainer.process() as process:
        until(lambda: trainer.status().get("frozen") == 0, "the target is not followed")
        server.push(range(40))
        until(lambda: trainer.status()["judged_by"], "nothing is judged")
        until(lambda: trainer.status()["state"] == "waiting for features", "it trains for ever")
        last = trainer.status()
        trainer.end(process)
    found = scalars(trainer.folder / "tensorboard")
    assert found["tlt_train_steps_total"][-1] == (last["steps"], last["steps"])
    assert found["tlt_train_loss"][-1][1] == pytest.approx(last["loss"], rel=1e-5)
    for position, share in enumerate(last["candidate_reaches"], 1):
        assert found[f"tlt_train_candidate_reach/{position}"][-1][1] == pytest.approx(share, rel=1e-5)


WRITER = """
import sys
from pathlib import Path
from tlt_server.trainer.logbooks import kept
from tlt_server.trainer.status import Status

with kept(("wandb",), Path(sys.argv[1]), lambda: Status(steps=30, loss=0.5)):
    pass
"""


@pytest.mark.slow
def test_wandb_writes_a_run_that_can_be_synchronised(tmp_path: Path) -> None:
    """In a process of its own: W&B starts one beside it, and hooks into this one."""
    pytest.importorskip("wandb")
    subprocess.run([sys.executable, "-c", WRITER, str(tmp_path)], check=True, timeout=120, stdin=subprocess.DEVNULL)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"tlt_train_loss" in file.read_bytes()
