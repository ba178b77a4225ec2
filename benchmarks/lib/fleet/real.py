"""Two real servers as a fleet, on the embedded model: publications go through, and one of them is killed."""

import os
import shutil
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import torch
from safetensors.torch import load_file, save_file
from tlt_client import Client, SamplingParams
from tlt_client.errors import RequestUnserved

from tlt_server.demo import default_paths
from tlt_server.demo.task import problems
from tlt_server.errors import ServerFailed
from tlt_server.process import Running, await_answer, free_port, running, running_module
from tlt_server.results import Figures

CLIENTS, PUBLICATIONS, KILLED_AT = 4, 6, 4
GREEDY = SamplingParams(temperature=0, max_new_tokens=32)
SERVER = ["--max-total-tokens", "4096", "--max-running-requests", "8"]
START_S = 300.0
REST_S = 2.0
Answers = dict[str, tuple[int, ...]]
"""By prompt."""


def checkpoints(folder: Path) -> list[Path]:
    """The embedded target, and one whose last norm is another: greedy answers differ."""
    target = default_paths()[0]
    other = folder / "other"
    shutil.copytree(target, other)
    for file in other.glob("*.safetensors"):
        tensors = load_file(file)
        generator = torch.Generator().manual_seed(1)
        changed = {
            name: tensor * (1 + 0.5 * torch.rand(tensor.shape, generator=generator))
            if name == "model.norm.weight"
            else tensor
            for name, tensor in tensors.items()
        }
        save_file(changed, file, metadata={"format": "pt"})
    return [target, other]


def measure(folder: Path) -> Figures:
    """Counted from what the answers say of their weights, and held against one server's own answers."""
    prompts, kinds = [problem.prompt for problem in problems(8, seed=3)], checkpoints(folder)
    with ExitStack() as stack:
        members = [
            stack.enter_context(
                running_module(["tlt_server", "serve"], SERVER, folder / f"{name}.log", start_timeout=START_S)
            )
            for name in "ab"
        ]
        expected = [_answers(members[0].url, kind, prompts) for kind in reversed(kinds)][::-1]
        if expected[0] == expected[1]:
            raise ServerFailed("both checkpoints answer alike, so answers would not show which of them gave them")
        with httpx.Client() as http:  # the other one, too, as the first is by now
            http.post(f"{members[1].url}/update_weights_from_disk", json=_update(kinds[0])).raise_for_status()
        port, log = free_port(), folder / "front.log"
        command = ["tlt_server", "fleet", "--port", str(port), *(f"--member={each.url}" for each in members)]
        front = stack.enter_context(running(command, log))
        url = f"http://127.0.0.1:{port}"
        await_answer(front, f"{url}/health", log, START_S)
        return _through(url, members, kinds, prompts, expected)


def _update(folder: Path) -> dict[str, str]:
    return {"model_path": str(folder), "weight_version": "default"}


def _answers(url: str, folder: Path, prompts: list[str]) -> Answers:
    with Client(url) as client:
        client.update_weights_from_disk(str(folder), "default")
        return {prompt: client.generate(prompt, GREEDY).tokens for prompt in prompts}


def _through(
    url: str, members: list[Running], kinds: list[Path], prompts: list[str], expected: list[Answers]
) -> Figures:
    counts = dict.fromkeys(("rollouts", "rollouts_lost", "stale_served", "wrong_tokens"), 0)
    published, counting, ended = [0], threading.Lock(), threading.Event()

    def ask(number: int) -> None:
        with Client(url) as client:
            for count in range(number, 10**9, CLIENTS):
                if ended.is_set():
                    return
                prompt, least = prompts[count % len(prompts)], published[-1]
                try:
                    rollout = client.generate(prompt, GREEDY)
                except RequestUnserved:
                    rollout = None
                with counting:
                    counts["rollouts"] += 1
                    if rollout is None:
                        counts["rollouts_lost"] += 1
                        continue
                    spans = [
                        int(span.version.removeprefix("v") if span.version != "default" else 0)
                        for span in rollout.weight_versions
                    ]
                    counts["stale_served"] += min(spans) < least
                    one = len(set(spans)) == 1  # an update that waits for running requests is between two
                    counts["wrong_tokens"] += one and rollout.tokens != expected[spans[0] % 2][prompt]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        with Client(url) as trainer:
            for number in range(1, PUBLICATIONS + 1):
                time.sleep(REST_S)
                if number == KILLED_AT:
                    os.killpg(members[1].pid, signal.SIGKILL)
                trainer.update_weights_from_disk(str(kinds[number % 2]), f"v{number}")
                published.append(number)
            time.sleep(REST_S)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    with httpx.Client() as http:
        states = [each["state"] for each in http.get(f"{url}/tlt/v1/fleet").json()["replicas"]]
    if states != ["ready", "quarantined"]:
        raise ServerFailed(f"the members are {states} at the end, and one was killed")
    return {f"real_{name}" if name == "rollouts" else name: value for name, value in counts.items()} | {
        "real_publications": PUBLICATIONS
    }
