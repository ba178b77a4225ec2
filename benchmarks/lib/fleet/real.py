"""Two real servers as a fleet, on the embedded model: publications go through, and one of them is killed."""

import itertools
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import torch
from safetensors.torch import load_file, save_file
from tlt_client import Client, Rollout, SamplingParams
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


class _Asking:
    """Clients that ask a fleet for greedy responses, one after another, and what they counted.

    expected: what each kind of checkpoint answers, by prompt. published: numbers of publications, the newest last.
    """

    def __init__(self, url: str, prompts: list[str], expected: list[Answers]) -> None:
        self._url, self._prompts, self._expected = url, prompts, expected
        self.counts = dict.fromkeys(("rollouts", "rollouts_lost", "stale_served", "wrong_tokens"), 0)
        self.published = [0]
        self._counting, self._ended = threading.Lock(), threading.Event()

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Meanwhile they ask."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            asking = [pool.submit(self._ask, number) for number in range(CLIENTS)]
            try:
                yield
            finally:
                self._ended.set()
            for each in asking:
                each.result()

    def _ask(self, number: int) -> None:
        with Client(self._url) as client:
            for count in itertools.count(number, CLIENTS):
                if self._ended.is_set():
                    return
                prompt, least = self._prompts[count % len(self._prompts)], self.published[-1]
                try:
                    rollout = client.generate(prompt, GREEDY)
                except RequestUnserved:
                    rollout = None
                with self._counting:
                    self._count(prompt, rollout, least)

    def _count(self, prompt: str, rollout: Rollout | None, least: int) -> None:
        """least: the publication that was the newest when it was asked for."""
        self.counts["rollouts"] += 1
        if rollout is None:
            self.counts["rollouts_lost"] += 1
            return
        names = (span.version for span in rollout.weight_versions)
        spans = [0 if name == "default" else int(name.removeprefix("v")) for name in names]
        self.counts["stale_served"] += min(spans) < least
        one = len(set(spans)) == 1  # an update that waits for running requests is between two
        self.counts["wrong_tokens"] += one and rollout.tokens != self._expected[spans[0] % 2][prompt]


def _through(
    url: str, members: list[Running], kinds: list[Path], prompts: list[str], expected: list[Answers]
) -> Figures:
    asking = _Asking(url, prompts, expected)
    with asking.going_on(), Client(url) as trainer:
        for number in range(1, PUBLICATIONS + 1):
            time.sleep(REST_S)
            if number == KILLED_AT:
                os.killpg(members[1].pid, signal.SIGKILL)
            trainer.update_weights_from_disk(str(kinds[number % 2]), f"v{number}")
            asking.published.append(number)
        time.sleep(REST_S)
    states = [each["state"] for each in httpx.get(f"{url}/tlt/v1/fleet").json()["replicas"]]
    if states != ["ready", "quarantined"]:
        raise ServerFailed(f"the members are {states} at the end, and one was killed")
    counts: Figures = {f"real_{name}" if name == "rollouts" else name: value for name, value in asking.counts.items()}
    return counts | {"real_publications": PUBLICATIONS}
