"""A fleet on two GPUs, each of which one server has: what a trainer broadcasts to it by NCCL, members sample from.

python -m tests.fleet.gpu_fanout

First to a fleet of one server, whose rank is in the trainer's group; then to a keeper before both servers, one of which
is killed between two publications. After each a greedy answer must be that of the same weights read from a disk.
Without two GPUs the same runs by gloo.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file
from tlt_client import Client, SamplingParams

from benchmarks.models.shapes import build
from tests.fleet.conftest import NO_KEYS, Fleet, wait_for
from tlt_server.demo import default_paths
from tlt_server.demo.task import problems
from tlt_server.fleet.front import ALONE, Beside, Front
from tlt_server.fleet.links import Limits
from tlt_server.process import Running, free_port, running_module

TWO = torch.cuda.device_count() > 1
LIMITS = Limits(probe_every=1.0, probe=10.0, call=120.0, patience=60.0)
FLAGS = ["--no-speculation", "--max-total-tokens", "8192", "--max-running-requests", "8"]
GPU_FLAGS = ["--attention-backend", "flashinfer", "--disable-prefill-cuda-graph", "--cuda-graph-bs-decode", "1", "8"]
PROMPTS = [problem.prompt for problem in problems(4, seed=9)]
GREEDY = SamplingParams(temperature=0, max_new_tokens=64)
Policy = dict[str, torch.Tensor]


def policies(model: Path, folder: Path, count: int) -> Iterator[tuple[Path, Policy]]:
    """Checkpoints that answer differently, and their tensors, on the trainer's device."""
    (file,) = model.glob("*.safetensors")
    torch.manual_seed(0)
    for number in range(count):
        made = {name: noised(each) for name, each in load_file(file).items()}
        path = folder / f"policy-{number}"
        path.mkdir()
        for other in model.iterdir():
            if other != file and other.is_file():
                (path / other.name).write_bytes(other.read_bytes())
        save_file(made, path / file.name, metadata={"format": "pt"})
        yield path, {name: each.to("cuda:0" if TWO else "cpu") for name, each in made.items()}


def noised(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * (1 + 0.1 * torch.randn_like(tensor))


@contextmanager
def front(fleet: Fleet, folder: Path, members: dict[str, Running], beside: Beside = ALONE) -> Iterator[Client]:
    port, made = free_port(), Front(folder, 1, LIMITS, NO_KEYS, beside)
    fleet.run(made.start("127.0.0.1", port, {name: each.url for name, each in members.items()}))
    try:
        wait_for(lambda: len(made.fleet.ready()) == len(members), within_s=60)
        with Client(f"http://127.0.0.1:{port}") as client:
            yield client
    finally:
        fleet.run(made.close())


def answers(url: str) -> list[list[int]]:
    with Client(url) as client:
        return [list(client.generate(prompt, GREEDY).tokens) for prompt in PROMPTS]


def publish(client: Client, group: object, policy: Policy, version: str) -> float:
    """Seconds until it is in force."""
    began = time.monotonic()
    client.begin_weight_update()
    client.update_weights_from_distributed(group, policy, version)  # type: ignore[arg-type]
    client.end_weight_update()
    return time.monotonic() - began


class Run:
    """members: by name. wrong: answers that were not those of the weights in force."""

    def __init__(self, stack: ExitStack, folder: Path, model: Path) -> None:
        self.stack, self.folder, self.model = stack, folder, model
        self.fleet = Fleet(folder, LIMITS)
        stack.callback(self.fleet.close)
        self.members: dict[str, Running] = {}
        self.wrong = self.compared = 0

    def serve(self, name: str, gpu: int) -> None:
        flags = ["--model-path", str(self.model), *FLAGS, *(GPU_FLAGS if TWO else [])]
        self.members[name] = self._module("serve", flags, name, gpu)

    def keeper(self, gpu: int) -> str:
        flags = ["--model-path", str(self.model), "--folder", str(self.folder / "kept")]
        return self._module("keeper", [*flags, *(["--device", "cuda:0"] if TWO else [])], "keeper", gpu).url

    def _module(self, command: str, flags: list[str], name: str, gpu: int) -> Running:
        seen = {"CUDA_VISIBLE_DEVICES": str(gpu)} if TWO else {}
        log = self.folder / f"{name}.log"
        return self.stack.enter_context(
            running_module(["tlt_server", command], flags, log, start_timeout=300, environment=seen)
        )

    def known(self, path: Path) -> list[list[int]]:
        """What these weights answer, read from a disk."""
        with Client(self.members["b"].url) as client:
            client.update_weights_from_disk(str(path), path.name)
        return answers(self.members["b"].url)

    def compare(self, expected: list[list[int]], *names: str) -> None:
        for name in names:
            self.wrong += answers(self.members[name].url) != expected
            self.compared += 1


def measure(run: Run, folder: Path) -> list[str]:
    """What is told of it."""
    run.serve("a", 0)
    run.serve("b", 1)
    made = list(policies(run.model, folder, 4))
    expected = [run.known(path) for path, _ in made]
    assert len({str(each) for each in expected}) == len(made), "policies that answer alike would show nothing"
    backend = "nccl" if TWO else "gloo"
    told = []
    with front(run.fleet, folder / "one", {"b": run.members["b"]}) as client:
        group = client.init_weights_update_group(backend=backend)
        told.append(f"{backend}, one member: {publish(client, group, made[0][1], 'v0'):.2f} s")
        client.destroy_weights_update_group(group)
    run.compare(expected[0], "b")
    with front(run.fleet, folder / "both", run.members, Beside(keeper=run.keeper(1))) as client:
        group = client.init_weights_update_group(backend=backend)
        told.append(f"{backend}, a keeper and two members: {publish(client, group, made[1][1], 'v1'):.2f} s")
        run.compare(expected[1], "a", "b")
        os.killpg(run.members["b"].pid, signal.SIGKILL)
        told.append(f"one of them killed: {publish(client, group, made[2][1], 'v2'):.2f} s")
        run.compare(expected[2], "a")
        told.append(f"and again: {publish(client, group, made[3][1], 'v3'):.2f} s")
        run.compare(expected[3], "a")
        client.destroy_weights_update_group(group)
    return told


def main() -> int:
    with TemporaryDirectory() as place, ExitStack() as stack:
        folder = Path(place)
        model = default_paths()[0]
        if TWO:
            model = build("18m", folder / "models").target
        run = Run(stack, folder, model)
        told = measure(run, folder)
    sys.stdout.write("\n".join((*told, f"{run.wrong} of {run.compared} members answered otherwise\n")))
    return int(run.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
