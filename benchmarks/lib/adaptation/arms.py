"""One arm's server, and for the adapting arm its drafter trainer, for as long as a run takes."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.lib.training.trainers import training
from tlt_server.demo import default_paths
from tlt_server.launch import has_gpu
from tlt_server.process import running_server
from tlt_server.trainer.config import TrainConfig

TRAINER = Path(__file__).with_name("drafter_trainer.toml")
TRAINER_JSON = "trainer.json"
"""Of the adapting arm: its trainer's status in the end, as it shows it over HTTP."""

# Several runs share the card: each takes what its tokens need. Triton's attention knows the embedded model's heads.
GPU_FLAGS = [
    *("--attention-backend", "triton", "--dtype", "bfloat16", "--mem-fraction-static", "0.6"),
    *("--max-total-tokens", "131072", "--max-running-requests", "128", "--disable-prefill-cuda-graph"),
    *("--cuda-graph-bs-decode", *map(str, (1, 2, 4, 8, 16, 32, 64, 128))),
]


def settings(seed: int) -> dict[str, Any]:
    """What the file of settings leaves open."""
    # a step on a CPU is small, or there would be none between two RL steps
    return {"entries": 4096 if has_gpu() else 1024, "seed": seed}


def trainer_config(seed: int) -> TrainConfig:
    """The settings of every drafter that is trained here, beside the RL or on its first policy's rollouts alone."""
    target, drafter = map(str, default_paths())
    return TrainConfig.read(TRAINER, settings(seed) | {"target": target, "drafter": drafter, "folder": ""}, {})


@contextmanager
def serving(arm: str, seed: int, drafter: Path, folder: Path) -> Iterator[str]:
    """A server of an arm; its URL.

    Args:
        drafter: that the server begins with.
        folder: for logs, and for what the trainer says in the end.

    Raises:
        ServerFailed: one of the processes ended early.
    """
    flags = ["--random-seed", str(seed), *(GPU_FLAGS if has_gpu() else [])]
    # a frozen drafter falls below the watchdog's floor, and is to be measured there
    speculating = ["--drafter", str(drafter), "--arm", "3,1,4", "--watchdog", "observe"]
    flags += ["--no-speculation"] if arm == "off" else speculating
    if arm != "adapting":
        with running_server(flags, folder / "server.log", start_timeout=400) as url:
            yield url
        return
    with _trainer(seed, drafter, folder) as (control, status):
        flags += ["--trainer", control]
        with running_server(flags, folder / "server.log", start_timeout=400) as url:
            yield url
            (folder / TRAINER_JSON).write_text(httpx.get(status, timeout=60).raise_for_status().text)


@contextmanager
def _trainer(seed: int, drafter: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """A drafter trainer: the address that a server follows it at, and the URL of its status."""
    said = (f"{name} = {value}\n" for name, value in settings(seed).items())
    config = folder / "train.toml"
    config.write_text("".join(said) + TRAINER.read_text())
    with tempfile.TemporaryDirectory(prefix="tlt-") as scratch:  # the path of a socket may not be long
        control, log = f"ipc://{scratch}/control", folder / "train.log"
        with training(control, config, Path(scratch) / "drafters", log, "--drafter", str(drafter)) as status:
            yield control, status


def trained(folder: Path) -> dict[str, Any]:
    """What the adapting run's trainer said in the end."""
    said: dict[str, Any] = msgspec.json.decode((folder / TRAINER_JSON).read_bytes())
    return said
