"""What a trainer's process meets: the wire's own classes in place of a server, and features of the embedded target."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import torch
import zmq
import zmq.auth
from safetensors import deserialize
from safetensors.torch import load_file, save_file
from tlt_client import DrafterTrainer, DrafterUpdate
from tlt_client.schemas import DrafterVersion
from torch import Tensor

from tests.forks import Fork, forked
from tests.trainer.models import TARGET_FOLDER, texts
from tlt_server.process import free_port
from tlt_server.wire.features import FeatureBatch, FeatureHeader, Rows
from tlt_server.wire.messages import READS_TO_SERVER, Hello, ModelIdentity
from tlt_server.wire.server import Receiver
from tlt_server.wire.sockets import CurveKeys, Link

MODEL = ModelIdentity.of(json.loads((TARGET_FOLDER / "config.json").read_text()))
Process = subprocess.Popen[bytes] | Fork
WITHIN_S = 120.0
"""Far more than any wait takes on a busy machine; what never comes ends a test all the same."""


def until(done: Any, what: str) -> Any:
    deadline = time.monotonic() + WITHIN_S
    while not (found := done()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return found


@cache
def shared_tensors() -> dict[str, Tensor]:
    names = ("model.embed_tokens.weight", "lm_head.weight")
    return {name: each for name, each in load_file(TARGET_FOLDER / "model.safetensors").items() if name in names}


class Outlet:
    """Where the server of this name sends features from. count: of its target's publications."""

    def __init__(self, features: str, name: str, curve: CurveKeys | None = None) -> None:
        self.name, self.count = name, 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        if curve is not None:
            public, secret = zmq.auth.load_certificate(curve.own)
            self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
            self._socket.curve_serverkey = zmq.auth.load_certificate(curve.peers)[0]
        self._socket.connect(features)

    def push(self, run_numbers: Sequence[int], change: Callable[..., Any] | None = None, **said: Any) -> None:
        """Features of whole responses, each of a prompt of its own; what is to be changed of them."""
        runs = [texts("eagle", 40)[number % 40] for number in run_numbers]
        rows = tuple(
            Rows(
                f"{self.name} {self.count} {number}", number * 7919 + 2**63, run.prompt, 0, len(run.tokens), self.count
            )
            for number, run in zip(run_numbers, runs, strict=True)
        )
        fields = {"server": self.name, "model": MODEL, "kind": "eagle", "dtype": "float32", "width": 256} | said
        tokens = torch.cat([run.tokens for run in runs]).to(torch.int32)
        states = torch.cat([run.states for run in runs])
        if change:
            change(tokens, states)
        header = FeatureHeader(rows=rows, **fields)
        self.push_frames(FeatureBatch(header, tokens.numpy().data, states.numpy().data, b"").encode())

    def push_frames(self, frames: Sequence[Any]) -> None:
        self._socket.send_multipart(frames)

    def close(self) -> None:
        self._context.destroy(linger=0)


class Server(Outlet):
    """Inside a `with`, it follows the trainer: every drafter that arrives is in force at once, while it is not `held`.

    devices: that it says to compute on. drafter: folder of its own, which a trainer may begin with.

    Attributes:
        arrived: drafters, in order.
        held: drafters that arrive are not put in force.
        refuses: it goes back to the one of its start at once.
        link: what it knows of its trainer.
    """

    def __init__(
        self,
        folder: Path,
        control: str,
        features: str,
        name: str = "one:1",
        newest: int = 0,
        devices: tuple[str, ...] = (),
        curve: CurveKeys | None = None,
        drafter: Path | None = None,
    ) -> None:
        super().__init__(features, name, curve)
        self._drafter = drafter
        self.folder = folder
        self.arrived: list[DrafterUpdate] = []
        self.held = self.refuses = False
        self.link = DrafterTrainer(address=control, connected=False)
        self._changes: deque[Callable[[], None]] = deque()  # written by any thread, taken by the receiving one
        self._over = threading.Event()
        self._control, self._newest, self._devices, self._curve = control, newest, devices, curve
        self._shared = self._save()

    def __enter__(self) -> "Server":
        hello = Hello(
            server=self.name,
            model=MODEL,
            target_version=0,
            weight_version="default",
            drafter_version=self._newest,
            newest_drafter=self._newest,
            shared=self._shared,
            devices=self._devices,
        )
        self._receiver = Receiver(
            Link(self._control, READS_TO_SERVER, self.name, self._curve), hello, self.folder / "drafters"
        )
        self._receiver.told = self._hear
        if self._drafter is not None:
            self._receiver.gives(DrafterVersion(self._newest, str(self._drafter), None, None))
        self._receiving = threading.Thread(target=self._receive)
        self._receiving.start()
        return self

    def _receive(self) -> None:
        try:
            while not self._over.wait(0.005):
                while self._changes:
                    self._changes.popleft()()
                self._receiver.step()
        finally:
            self._receiver.close()

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._receiving.join()
        self.close()

    @property
    def newest(self) -> int:
        return self.arrived[-1].version if self.arrived else 0

    def publish(self) -> None:
        """Another target, of which nothing is shared yet."""
        self.count += 1
        self.change(target_version=self.count, weight_version=f"step {self.count}", shared="")

    def share(self) -> None:
        self.change(shared=self._save())

    def swap(self) -> None:
        """Puts the newest drafter in force."""
        version = self.newest
        self._changes.append(lambda: self._receiver.settle(version, drafter_version=version))

    def _save(self) -> str:
        """The head is a little another one each time."""
        path = self.folder / f"target-{self.count}"
        path.mkdir(parents=True)
        moved = {name: each * (1 + 1e-3 * self.count) for name, each in shared_tensors().items()}
        for name, tensor in moved.items():
            save_file({name: tensor}, path / f"{name}.safetensors")
        return str(path)

    def change(self, **state: object) -> None:
        """What it tells the trainer of itself; from any thread."""
        self._changes.append(lambda: self._receiver.change(**state))

    def _hear(self, told: DrafterUpdate | DrafterTrainer) -> None:
        if isinstance(told, DrafterUpdate):
            self.arrived.append(told)
            if self.refuses:
                self._changes.append(lambda: self._receiver.settle(told.version, "worse than the one before"))
            elif not self.held:
                self.swap()
        else:
            self.link = told


def torchrun(ranks: int) -> list[str]:
    """Before the module's name and its arguments."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


class Running:
    """A trainer's process, or its processes under torchrun.

    control, features: where it listens: no ports, of which one found free may soon not be, but where `tcp` names a
    host's address.
    """

    def __init__(
        self,
        folder: Path,
        settings: str = "",
        judged_every: int = 5,
        margin: float = 0.01,
        entries: int = 256,
        tables: str = "",
        *,
        tcp: str = "",
    ) -> None:
        self.port, self.folder, self._file = free_port(), folder, folder / "train.toml"
        self.control, self.features = f"ipc://{folder}/control", f"ipc://{folder}/control.features"
        if tcp:
            self.control, self.features = (f"tcp://{tcp}:{free_port()}" for _ in range(2))
        self._process: Process | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._file.write_text(
            f'folder = "{folder}"\nlisten = "{self.control}"\nfeatures = "{self.features}"\nport = {self.port}\n'
            f"entries = {entries}\nheld_out = 0.2\ncheckpoint_every = 5\n{settings}\n"
            f"[optimizer]\nrate = 4e-3\nwarmup = 10\n[policy]\nfloor = 1.0\nmargin = {margin}\n"
            f"[gate]\nevery = {judged_every}\n{tables}\n"
        )

    @contextlib.contextmanager
    def process(self, ranks: int = 1) -> "Iterator[Process]":
        """Killed at the end, where it still runs, with what it has started. A fork, but under torchrun."""
        argv, path = ["train", "--tlt-config", str(self._file)], self.folder / "log"
        process: Process
        if ranks == 1:
            process = forked(argv, path)
        else:
            with path.open("ab") as log:
                command = [*torchrun(ranks), "-m", "tlt_server", *argv]
                process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self._process = process
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def end(self, process: Process) -> None:
        process.send_signal(signal.SIGTERM)
        assert process.wait(WITHIN_S) == 0, self.log

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def get(self, path: str = "/tlt/v1/train/status") -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.port}{path}").raise_for_status()

    def status(self) -> dict[str, Any]:
        """Empty before it answers."""
        assert self._process is None or self._process.poll() is None, self.log
        try:
            found: dict[str, Any] = self.get().json()
        except httpx.TransportError:
            return {}
        return found


def published(trainer: Running, version: int) -> Path:
    """The file of a drafter that it published."""
    return trainer.folder / "published" / f"drafter-{version:08}" / "model.safetensors"


def contents(file: Path) -> dict[str, Any]:
    return {name: (each["shape"], bytes(each["data"])) for name, each in deserialize(file.read_bytes())}
