"""Memory lent to a trainer and taken back, in the orders of trainers and in others, with requests all the while.

An order is a row of steps of a trainer's on one server. After it, whatever waited must have been answered, `/health`
must answer, and a greedy answer must be that of the weights in force.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from benchmarks.lib.reload.trainer import Trainer
from benchmarks.lib.reload.weights import buckets, noisy, tensors_of
from tlt_server.demo import default_paths
from tlt_server.demo.task import problems
from tlt_server.process import running_server
from tlt_server.results import Figures

Order = tuple[str, ...]
"""Each step is a verb and its objects; `no` before it: it must be refused, in a line, within `WITHIN_S`."""
WITHIN_S = 10.0
GREEDY = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
LONG = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
TAGS = ("kv_cache", "weights", "cuda_graph")
OF_TRAINERS = """
# slime, Miles: all away; the weights back, a publication, the rest
pause abort; flush; release; resume weights; update distributed; resume kv_cache cuda_graph; continue
run; pause retract; release; ask; resume weights; pause; flush; update tensor; continue; resume kv_cache cuda_graph
release kv_cache; release weights; ask; resume weights; update disk; resume kv_cache
# verl: in buckets, while a request waits
release kv_cache weights; ask; resume weights; update buckets; flush; resume kv_cache
# NeMo-RL: all away, what is needed back, graphs never named
release; ask; health; resume weights; update disk; resume kv_cache
# the fault that this began with, and its mirror
release; resume weights; update tensor; ask; resume kv_cache
release; ask; resume kv_cache; no update disk; health_generate; resume weights; update disk
# held before, with what was running
run; pause in_place; release; ask; resume weights; update disk; resume; continue
run; pause in_place; release weights; resume weights; health; continue; ask
run; pause retract; release kv_cache; flush; resume kv_cache; update tensor; continue
run; pause in_place; pause abort; release; health; resume; continue
release; ask; pause in_place; continue; resume weights; update distributed; continue; resume
# out of turn
release; no update distributed; no update tensor; no update disk; ask; resume
release; release; ask; resume; resume
resume; ask; no release wights; no resume wights; release cuda_graph; health; resume kv_cache
run; no release; release_unpaused; ask; resume
release weights; ask; release kv_cache; abort; ask; resume kv_cache; resume weights
release kv_cache; ask; pause abort; resume; continue; ask
"""


def measure(count: int, seed: int, logs: Path) -> Figures:
    """Tries `count` orders, those of trainers first.

    Args:
        count: of orders, all different.
        seed: of the targets, and of the orders beyond those of trainers.
        logs: for the server's output.
    """
    logs.mkdir(parents=True, exist_ok=True)
    tried = tuple(orders(count, Random(seed)))
    arguments = ["--random-seed", str(seed)]
    with TemporaryDirectory() as made, running_server(arguments, logs / "offload.log") as url:
        targets = (default_paths()[0], noisy(default_paths()[0], Path(made) / "other", seed, scale=0.2))
        found = run_all(url, targets, tried)
    return {
        "offload_orders": len(tried),
        "offload_hung": sum(bool(each.hung) for each in found),
        "offload_wrong": sum(bool(each.wrong) for each in found),
        "offload_refused_wrongly": sum(bool(each.odd) for each in found),
    }


def run_all(url: str, targets: Sequence[Path], tried: Sequence[Order]) -> list["Session"]:
    """Runs orders one after another on one server."""
    trainer = Trainer(url)
    trainer.http.timeout = httpx.Timeout(WITHIN_S)
    try:
        controls = [control_of(trainer, target) for target in targets]
        found, force = [], len(targets) - 1
        for order in tried:
            session = Session(trainer, targets, controls, force)
            session.run(order)
            force = session.force
            found.append(session)
        trainer.disk(targets[0]).raise_for_status()
        return found
    finally:
        trainer.close()


def control_of(trainer: Trainer, target: Path) -> Any:
    trainer.disk(target).raise_for_status()
    return answers(trainer)


def answers(trainer: Trainer) -> Any:
    asked = {"text": [problem.prompt for problem in problems(3, seed=5)], "sampling_params": GREEDY}
    given = trainer.http.post("/generate", json=asked).raise_for_status().json()
    return [each["output_ids"] for each in given]


def of_trainers() -> Iterator[Order]:
    """What slime, Miles, verl and NeMo-RL do, and what they may not."""
    for line in OF_TRAINERS.strip().splitlines():
        if not line.startswith("#"):
            yield tuple(line.split("; "))


def orders(count: int, draw: Random) -> Iterator[Order]:
    """Distinct orders."""
    made: set[Order] = set()
    for order in chain(of_trainers(), (drawn(draw) for _ in repeat(None))):
        if len(made) == count:
            return
        if order not in made:
            made.add(order)
            yield order


def drawn(draw: Random) -> Order:
    """An order that none of the trainers has: stages of any tags, a publication where there are weights."""
    pause = draw.choice(("", "pause in_place", "pause retract", "pause abort"))
    steps, paused = (["run", pause], True) if pause else ([], False)
    tags = draw.sample(TAGS, draw.randint(1, 3))
    lent: set[str] = set()

    def meanwhile() -> None:
        nonlocal paused
        if paused and draw.random() < 0.2:
            steps.append("continue")
            paused = False
        if lent - {"cuda_graph"} or (paused and pause != "pause abort"):  # else what is asked runs, and is in the way
            steps.extend(draw.choice(([], [], ["ask"], ["ask"], ["health"], ["flush"], ["abort"])))

    for tag in tags:
        steps.append(f"release {tag}")
        lent.add(tag)
        meanwhile()
    for tag in draw.sample(tags, len(tags)):
        if "weights" in lent and draw.random() < 0.3:
            steps.append(f"no update {draw.choice(('disk', 'tensor', 'distributed'))}")
        steps.append(f"resume {tag}")
        lent.remove(tag)
        if tag == "weights":
            steps.append(f"update {draw.choice(('disk', 'tensor', 'buckets', 'distributed'))}")
        meanwhile()
    return (*steps, *(["continue"] if paused else []))


@dataclass
class Session:
    """One order on a server, and what was odd.

    force: which of the targets is in force.
    hung: steps that did not end in time, and requests. wrong: answers of other weights. odd: unlike what was expected.
    """

    trainer: Trainer
    targets: Sequence[Path]
    controls: Sequence[Any]
    force: int
    hung: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    _asked: list[tuple[threading.Thread, list[int]]] = field(default_factory=list)

    def run(self, order: Order) -> None:
        """Runs its steps, then looks whether the server does as before."""
        cut = any(word in order for word in ("abort", "pause", "pause abort"))
        for step in order:
            refused, words = step.startswith("no "), step.removeprefix("no ").split()
            try:
                self._check(step, getattr(self, f"_{words[0]}")(*words[1:]), refused=refused)
            except httpx.TimeoutException:
                self.hung.append(step)
                break
        self._look(cut=cut)
        if self.hung:
            self._mend()

    def _check(self, step: str, answer: httpx.Response | None, *, refused: bool) -> None:
        if answer is None:
            return
        if answer.is_success == refused or answer.status_code >= 500:
            self.odd.append(f"{step}: {answer.status_code} {answer.text}")
        elif refused and len(answer.json()["message"].splitlines()) != 1:
            self.odd.append(f"{step}: not a line, {answer.text}")

    def _look(self, *, cut: bool) -> None:
        try:
            for thread, statuses in self._asked:
                thread.join(WITHIN_S)
                if not statuses:
                    self.hung.append("a request that waited")
                elif statuses != [200] and not cut:
                    self.odd.append(f"a request that waited: {statuses}")
            self._check("health", self._health(), refused=False)
            if answers(self.trainer) != self.controls[self.force]:
                self.wrong.append(f"not of target {self.force}")
        except httpx.TimeoutException as error:
            self.hung.append(f"the control: {error!r}")
        except httpx.HTTPStatusError as error:
            self.odd.append(f"the control: {error!r}")

    def _mend(self) -> None:
        """So that the next order is judged by itself."""
        for route in ("/resume_memory_occupation", "/continue_generation"):
            try:
                self.trainer.post(route)
            except httpx.TimeoutException:
                self.hung.append(route)

    # -- steps --

    def _pause(self, mode: str = "abort") -> httpx.Response:
        return self.trainer.post("/pause_generation", mode=mode)

    def _continue(self) -> httpx.Response:
        return self.trainer.post("/continue_generation")

    def _flush(self) -> httpx.Response:
        return self.trainer.post("/flush_cache")

    def _abort(self) -> httpx.Response:
        return self.trainer.post("/abort_request", abort_all=True)

    def _health(self) -> httpx.Response:
        return self.trainer.http.get("/health")

    def _health_generate(self) -> httpx.Response:
        return self.trainer.http.get("/health_generate")

    def _release(self, *tags: str) -> httpx.Response:
        return self._memory("release", tags)

    def _release_unpaused(self) -> httpx.Response:
        """As soon as what runs has ended."""
        until = time.monotonic() + WITHIN_S
        while not (answer := self._memory("release", ())).is_success and time.monotonic() < until:
            time.sleep(0.05)
        return answer

    def _resume(self, *tags: str) -> httpx.Response:
        return self._memory("resume", tags)

    def _memory(self, verb: str, tags: Sequence[str]) -> httpx.Response:
        return self.trainer.post(f"/{verb}_memory_occupation", **({"tags": list(tags)} if tags else {}))

    def _update(self, route: str) -> httpx.Response:
        """Sends the other target; it is in force once it is whole."""
        other = 1 - self.force
        if route == "disk":
            answer = self.trainer.disk(self.targets[other])
        elif route == "buckets":
            for part in buckets(tensors_of(self.targets[other]), 3):
                answer = self.trainer.bucket(part)
        else:
            answer = getattr(self.trainer, route)(tensors_of(self.targets[other]))
        if answer.is_success:
            self.force = other
        return answer

    def _run(self) -> None:
        """A request that is running at the next step."""
        self._begin(LONG)
        time.sleep(0.3)

    def _ask(self) -> None:
        """A request that may have to wait, for as long as it takes."""
        self._begin(GREEDY)
        time.sleep(0.1)

    def _begin(self, sampling: dict[str, Any]) -> None:
        statuses: list[int] = []
        asked = {"text": problems(1, seed=len(self._asked))[0].prompt, "sampling_params": sampling}
        url = str(self.trainer.http.base_url)

        def ask() -> None:
            statuses.append(httpx.post(f"{url}/generate", json=asked, timeout=60).status_code)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        self._asked.append((thread, statuses))
