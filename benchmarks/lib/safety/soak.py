"""Everything at once for half an hour: what fails that should not, and what grows.

One server with several arms follows a trainer. Rollouts of all kinds go on; meanwhile requests are aborted and streams
cut, targets and drafters come, the strategy changes, and the trainer is killed, or stopped while a drafter is on its
way. After a quarter of the time, and at the end, all hold still while memory and file handles are counted.
"""

import contextlib
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.reload.leaks import Held, held
from benchmarks.lib.reload.trainer import Trainer as Publisher
from benchmarks.lib.reload.weights import noisy, tensors_of
from benchmarks.lib.servers import KEPT
from tests.trainer.line import Line
from tests.trainer.stand_in import Running, until
from tlt_server.demo import default_paths
from tlt_server.demo.task import problems
from tlt_server.process import running_module
from tlt_server.results import Figures

ARMS = ["3,1,4", "3,4,8", "5,2,8", "1,1,2"]
WARM_UP = 0.25
"""Of the time: caches fill."""
CURVE_S = 120.0
"""Between two looks at memory while everything goes on."""
LOOKS, BETWEEN_LOOKS_S = 4, 4.0
"""A server that is asked nothing closes the connections that it kept within 5 s."""
STOP_S = 30.0
SLOW, IN_THE_MIDDLE = 1e6, 600_000
"""Bytes a second of the line, and how far a drafter of 1.8 MB is when its trainer is stopped."""
BEYOND = 10
"""Versions that the trainer will not publish meanwhile."""
PAUSES = ("in_place", "retract")


@dataclass
class Soaked:
    """A server under everything: `group` is its processes'.

    failed: of each request that should not have failed, why it did. curve: resident MB, one each `CURVE_S`.
    """

    url: str
    group: int
    seed: int
    targets: tuple[Path, Path]
    failed: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    curve: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._turns = 0
        self._prompts = [problem.prompt for problem in problems(64, seed=self.seed)]

    def count(self, what: str) -> None:
        with self._lock:
            self.counts[what] = self.counts.get(what, 0) + 1

    def during(self, seconds: float, works: list[Callable[["Soaked", httpx.Client, random.Random], None]]) -> None:
        """Each work again and again in a thread of its own; returns when all have ended."""
        self._over.clear()
        self._turns += 1

        def go_on(work: Callable[["Soaked", httpx.Client, random.Random], None]) -> None:
            draw = random.Random(f"{self.seed} {self._turns} {work.__name__}")
            with httpx.Client(base_url=self.url, timeout=120, limits=KEPT) as http:
                while not self._over.is_set():
                    try:
                        work(self, http, draw)
                    except (httpx.HTTPError, AssertionError) as error:  # noted, and the soak goes on
                        with self._lock:
                            self.failed.append(f"{work.__name__}: {type(error).__name__}: {error}")
                        time.sleep(0.2)  # a server that is gone would be asked thousands of times

        threads = [threading.Thread(target=go_on, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        self._over.set()
        for thread in threads:
            thread.join()

    def wait(self, seconds: float) -> None:
        """Less where the soak is over."""
        self._over.wait(seconds)

    def prompt(self, draw: random.Random) -> str:
        return draw.choice(self._prompts)


# -- what goes on --


def rollouts(soaked: Soaked, http: httpx.Client, draw: random.Random) -> None:
    """A batch of sampled rollouts, by any parameters that speculation honours."""
    params = {
        "temperature": draw.choice([0.0, 0.7, 1.0]),
        "max_new_tokens": draw.choice([1, 16, 64, 200]),
        "top_p": draw.choice([1.0, 0.9]),
        "top_k": draw.choice([-1, 20]),
        "min_p": draw.choice([0.0, 0.05]),
        "n": draw.choice([1, 2]),
    }
    batch = [soaked.prompt(draw) for _ in range(draw.choice([1, 4, 8]))]
    body = {"text": batch, "sampling_params": params, "return_logprob": draw.random() < 0.3}
    answers = http.post("/generate", json=body).raise_for_status().json()
    for answer in answers:
        reason = answer["meta_info"]["finish_reason"]["type"]
        assert reason in ("stop", "length"), f"a rollout ended by {reason}"
        soaked.count("requests")


def chats(soaked: Soaked, http: httpx.Client, draw: random.Random) -> None:
    """A completion by OpenAI's route, streamed or not."""
    body = {"model": "default", "prompt": soaked.prompt(draw), "max_tokens": 48, "temperature": 1.0}
    if draw.random() < 0.5:
        http.post("/v1/completions", json=body).raise_for_status()
    else:
        with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert lines[-1] == "data: [DONE]", lines[-1]
    soaked.count("requests")


def aborts(soaked: Soaked, http: httpx.Client, draw: random.Random) -> None:
    """A request that another call ends; it answers with what it has."""
    rid = f"abort-{draw.getrandbits(64):x}"
    body = {"rid": rid, "text": soaked.prompt(draw), "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    after = draw.uniform(0, 0.5)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(http.post, "/generate", json=body)
        time.sleep(after)
        http.post("/abort_request", json={"rid": rid}).raise_for_status()
        answer = asking.result().raise_for_status().json()
    assert len(answer["output_ids"]) <= 400, "longer than its limit"
    soaked.count("aborts")


def cut_streams(soaked: Soaked, http: httpx.Client, draw: random.Random) -> None:
    """A stream whose reader goes away."""
    body = {"text": soaked.prompt(draw), "stream": True, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    with http.stream("POST", "/generate", json=body) as stream:
        assert stream.status_code == 200, stream.status_code
        lines = stream.iter_lines()
        for _ in range(draw.randrange(8)):
            next(lines)
    soaked.count("cut_streams")
    soaked.wait(0.2)


def publications(soaked: Soaked, http: httpx.Client, draw: random.Random) -> None:
    """Another target, by disk or by tensors, flushed or in place."""
    target, pause, flush = draw.choice(soaked.targets), draw.choice(PAUSES), draw.random() < 0.5
    http.post("/pause_generation", json={"mode": pause}).raise_for_status()
    try:
        if draw.random() < 0.5:
            body: dict[str, Any] = {"model_path": str(target), "flush_cache": flush}
            http.post("/update_weights_from_disk", json=body).raise_for_status()
        else:
            with contextlib.closing(Publisher(soaked.url)) as publisher:
                publisher.tensor(tensors_of(target), flush_cache=flush).raise_for_status()
    finally:
        http.post("/continue_generation", json={}).raise_for_status()
    soaked.count("publications")
    soaked.wait(draw.uniform(2, 12))


def strategies(soaked: Soaked, http: httpx.Client, draw: random.Random) -> None:
    """Another way to choose arms."""
    steps, topk, tokens = map(int, draw.choice(ARMS).split(","))
    arm = {"num_steps": steps, "topk": topk, "num_draft_tokens": tokens}
    mode = draw.choice(["bandit", "paper", "pinned", "off", "bandit"])
    body = {"mode": mode} | ({"pinned": arm} if mode == "pinned" else {})
    http.put("/tlt/v1/strategy", json=body).raise_for_status()
    soaked.count("strategy_changes")
    soaked.wait(draw.uniform(1, 6))


def drafters(soaked: Soaked, http: httpx.Client, draw: random.Random) -> None:
    """A drafter by path, from far above what the trainer has published; or the one of before again."""
    if draw.random() < 0.2:
        answer = http.post("/tlt/v1/drafter/rollback")
    else:
        version = http.get("/tlt/v1/drafter").raise_for_status().json()["newest"] + BEYOND
        answer = http.post("/tlt/v1/drafter/update", json={"path": str(default_paths()[1]), "version": version})
    # 409: overtaken by one of the trainer's, or none to go back to
    assert answer.status_code in (200, 409), answer.text
    soaked.count("drafters_by_path")
    soaked.wait(draw.uniform(5, 20))


def scrapes(soaked: Soaked, http: httpx.Client, _draw: random.Random) -> None:
    """What others watch."""
    for path in ("/health", "/metrics", "/tlt/v1/status", "/tlt/v1/events", "/tlt/v1/strategy", "/server_info"):
        http.get(path).raise_for_status()
    soaked.count("scrapes")
    soaked.wait(1)


def memory(soaked: Soaked, _http: httpx.Client, _draw: random.Random) -> None:
    """What the server holds meanwhile."""
    soaked.wait(CURVE_S)
    soaked.curve.append(held(soaked.group).rss_mb)


WORKS = [rollouts, chats, aborts, cut_streams, publications, strategies, drafters, scrapes, memory]


# -- the trainer --


@dataclass
class Trained:
    """The trainer beside it: killed, or stopped while a drafter is on its way, in turn."""

    trainer: Running
    control: Line

    def befall(self, soaked: Soaked, _http: httpx.Client, draw: random.Random) -> None:
        """One life of the trainer's, and its end."""
        with self.trainer.process() as process:
            soaked.wait(draw.uniform(20, 60))
            if draw.random() < 0.6:
                self._stop(soaked, process.send_signal)
            soaked.wait(draw.uniform(5, 20))
        soaked.count("trainer_kills")

    def _stop(self, soaked: Soaked, send_signal: Callable[[int], None]) -> None:
        stopped = threading.Event()

        def stop() -> None:
            send_signal(signal.SIGSTOP)
            stopped.set()

        self.control.rate = SLOW
        self.control.after(IN_THE_MIDDLE, stop)
        soaked.wait(60)
        self.control.rate = 0
        if stopped.is_set():
            time.sleep(STOP_S)
            soaked.count("trainer_stops_mid_push")
        self.control.after(1 << 60, stopped.set)  # not in the next life
        send_signal(signal.SIGCONT)


# -- one soak --


@contextlib.contextmanager
def scene(logs: Path, seed: int, folder: Path) -> Iterator[tuple[Soaked, Trained]]:
    """A server that follows a trainer, which does not run yet."""
    target, drafter = default_paths()
    trainer = Running(folder / "trainer", "passes = 1000.0", margin=0)
    settings = folder / "server.toml"
    ends = (address.removeprefix("ipc://") for address in (trainer.control, trainer.features))
    with contextlib.ExitStack() as stack:
        control, features = (stack.enter_context(Line(end)) for end in ends)
        settings.write_text(
            f'drafter = "{drafter}"\narms = {[[int(n) for n in arm.split(",")] for arm in ARMS]}\n'
            f'[trainer]\nserver = "soaked"\naddress = "{control.address}"\nfeatures = "{features.address}"\n'
        )
        # a small pool is touched whole before memory is counted first, and has requests retracted
        flags = ["--tlt-config", str(settings), "--watchdog", "observe", "--max-total-tokens", "6000"]
        server = stack.enter_context(
            running_module(["tlt_server", "serve"], flags, logs / "soak.log", start_timeout=240)
        )
        noise = noisy(target, folder / "noise", seed)
        yield Soaked(server.url, server.pid, seed, (target, noise)), Trained(trainer, control)


def greedy(soaked: Soaked) -> list[list[int]]:
    """Answers that say which target is in force."""
    prompts = [problem.prompt for problem in problems(8, seed=soaked.seed + 1)]
    body = {"text": prompts, "sampling_params": {"temperature": 0, "max_new_tokens": 64}}
    answers = httpx.post(f"{soaked.url}/generate", json=body, timeout=120).raise_for_status().json()
    return [answer["output_ids"] for answer in answers]


def settled(soaked: Soaked) -> Held:
    """What the server holds when nobody asks anything: the least of several looks."""
    with httpx.Client(base_url=soaked.url, timeout=60) as http:
        http.post("/flush_cache", params={"timeout": 30}).raise_for_status()
    looks = []
    for _ in range(LOOKS):
        time.sleep(BETWEEN_LOOKS_S)
        looks.append(held(soaked.group))
    return Held(*(min(values) for values in zip(*looks, strict=True)))


def measure(count: int, seed: int, logs: Path) -> Figures:
    """A soak of `count` seconds."""
    with tempfile.TemporaryDirectory(prefix="tlt-soak-") as folder, scene(logs, seed, Path(folder)) as found:
        soaked, trained = found
        before, began = greedy(soaked), time.monotonic()
        soaked.during(count * WARM_UP, [*WORKS, trained.befall])
        warm = settled(soaked)
        soaked.during(max(1.0, count - (time.monotonic() - began)), [*WORKS, trained.befall])
        end = settled(soaked)
        seconds = time.monotonic() - began
        with contextlib.closing(Publisher(soaked.url)) as publisher:
            publisher.disk(soaked.targets[0]).raise_for_status()
        until(lambda: httpx.get(f"{soaked.url}/health").status_code == 200, "no health at the end")
        mismatches = sum(one != other for one, other in zip(before, greedy(soaked), strict=True))
    for line in sorted(set(soaked.failed))[:20]:
        print(line)  # noqa: T201 - a table cannot say which
    return {
        "soak_s": seconds,
        "soak_failed_requests": len(soaked.failed),
        "soak_memory_growth": end.rss_mb / warm.rss_mb - 1,
        "soak_handle_growth": end.file_handles - warm.file_handles,
        "soak_mismatches": mismatches,
        "soak_rss_mb_warm": warm.rss_mb,
        "soak_rss_mb_end": end.rss_mb,
    } | counted(soaked)


def counted(soaked: Soaked) -> Figures:
    """What went on, and the curve of memory meanwhile."""
    curve = {f"soak_rss_mb_{number:02d}": value for number, value in enumerate(soaked.curve, 1)}
    return curve | {f"soak_{name}": number for name, number in sorted(soaked.counts.items())}
