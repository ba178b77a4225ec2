"""Servers that speculate in every way, against plain decoding: the same requests, on a CPU, in float32.

Each phase is a way that a response's tokens could come to depend on what is drafted, or on when and where it is
sampled.
"""

import random
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from threading import Event

import torch
from prometheus_client.parser import text_string_to_metric_families
from tlt_client import Client, DrafterUpdate, Rollout

from benchmarks.lib.command import Models
from benchmarks.lib.one_sample.judging import Compared, compare
from benchmarks.lib.one_sample.requests import KINDS, Request, requests
from benchmarks.lib.reload.weights import noisy
from benchmarks.lib.safety.aborts import ANY_ARM, SEVERAL
from tlt_server.demo import eagle3_path
from tlt_server.demo.reference import Reference
from tlt_server.process import running_module
from tlt_server.results import Figures

AT_ONCE = 32
NOISE = 0.02
"""Of the other drafter, as a share of each tensor's deviation: it proposes other tokens, and is still of use."""
SWAP_EVERY_S = 0.1
RETRACTED = "sglang:num_retracted_requests_total"
EAGLE3 = ["--drafter", str(eagle3_path())]
TIGHT = ["--chunked-prefill-size", "16", "--max-total-tokens", "1000", "--schedule-conservativeness", "0.1"]
RANKS = ["--tp-size", "2"]
RANKS_APART = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
Ask = Callable[[Client, Sequence[Request], Path], tuple[list[Rollout], Figures]]
"""From a server and requests to responses, and what was done meanwhile."""


@dataclass(frozen=True)
class Phase:
    """share: of the requests, and at least one of each kind."""

    name: str
    share: float
    ask: Ask

    def count(self, requests: int) -> int:
        """How many of so many requests, the first ones."""
        return min(requests, max(len(KINDS), round(self.share * requests)))


def at_once(client: Client, asked: Sequence[Request], _scratch: Path) -> tuple[list[Rollout], Figures]:
    """So many in flight, a next one as soon as any ends."""
    prompts, params = [each.prompt for each in asked], [each.params for each in asked]
    return client.generate_batch(prompts, params), {}


def swapping(client: Client, asked: Sequence[Request], scratch: Path) -> tuple[list[Rollout], Figures]:
    """While the drafter is exchanged for another one and back, again and again."""
    start = Path(client.drafter().live.path)
    others, over, before = cycle([noisy(start, scratch / "other", 1, NOISE), start]), Event(), client.drafter().newest

    def swap() -> None:
        while not over.wait(SWAP_EVERY_S):
            client.update_drafter(DrafterUpdate(str(next(others))))

    with ThreadPoolExecutor(1) as pool:
        swaps = pool.submit(swap)
        try:
            rollouts, _ = at_once(client, asked, scratch)
        finally:
            over.set()
        swaps.result()
    several = sum(len(each.drafter_versions) > 1 for each in rollouts)
    return rollouts, {"swaps": client.drafter().newest - before, "responses_of_several_drafters": several}


def breaking_off(client: Client, asked: Sequence[Request], _scratch: Path) -> tuple[list[Rollout], Figures]:
    """Each is aborted after a random number of tokens, and continued."""
    draw = random.Random(5)
    after = [draw.randint(1, 80) for _ in asked]

    def begin(place: int) -> Rollout:
        each, rid, got = asked[place], f"broken-off-{place}-", 0
        rollout = None
        for chunk in client.stream(each.prompt, each.params, rid=rid):
            got, rollout = got + len(chunk.tokens), chunk.rollout
            if rollout is None and got >= after[place]:
                client.abort(rid)
        assert rollout is not None  # a stream that breaks off raises
        return rollout

    with ThreadPoolExecutor(AT_ONCE) as pool:
        begun = list(pool.map(begin, range(len(asked))))
    prompts, params = [each.prompt for each in asked], [each.params for each in asked]
    return client.continue_batch(begun, prompts, params), {"aborts": sum(each.aborted for each in begun)}


def retracting(client: Client, asked: Sequence[Request], scratch: Path) -> tuple[list[Rollout], Figures]:
    """In a pool that is too small for all of them."""
    rollouts, _ = at_once(client, asked, scratch)
    samples = (each for family in text_string_to_metric_families(client.metrics()) for each in family.samples)
    return rollouts, {"retractions": sum(int(each.value) for each in samples if each.name == RETRACTED)}


SERVERS: dict[str, tuple[list[str], list[Phase]]] = {
    "eagle": (
        SEVERAL,
        [Phase("arms", 1, at_once), Phase("swaps", 1 / 4, swapping), Phase("aborts", 1 / 4, breaking_off)],
    ),
    "eagle3": ([*EAGLE3, *SEVERAL], [Phase("eagle3", 1 / 4, at_once)]),
    "tight": ([*SEVERAL, *TIGHT], [Phase("retractions", 1 / 4, retracting)]),
    "ranks": ([*EAGLE3, *SEVERAL, *RANKS], [Phase("ranks", 1 / 8, at_once)]),
}
"""Flags, and what is done. An arm, or none, is drawn for every step."""


@contextmanager
def serving(flags: Sequence[str], log: Path) -> Iterator[Client]:
    environment = RANKS_APART if RANKS[0] in flags else None
    arguments = [*flags, "--random-seed", "7"]
    started = running_module(["tlt_server", "serve"], arguments, log, start_timeout=300, environment=environment)
    with started as server, Client(server.url, max_concurrency=AT_ONCE) as client:
        yield client


def measured(models: Models, logs: Path, count: int, names: Collection[str] = SERVERS.keys()) -> Iterator[Figures]:
    """All figures so far, after each phase. names: of the servers that are to be compared."""
    asked, target = requests(models, count), Reference(models.target, torch.float64).along
    # upstream's penalties, which are this server's, count a token late where steps overlap
    with serving(["--no-speculation", "--disable-overlap-schedule"], logs / "plain.log") as client:
        expected, _ = at_once(client, asked, logs)
    drawn = sum(each.params.sampling_seed is None for each in asked)
    asked = [each.seeded(rollout.seed) for each, rollout in zip(asked, expected, strict=True)]
    figures: Figures = {"requests": count, "drawn_seeds": drawn, "tokens": sum(len(each.tokens) for each in expected)}
    compared: list[Compared] = []
    for name in names:
        flags, phases = SERVERS[name]
        with serving(flags, logs / f"{name}.log") as client, tempfile.TemporaryDirectory() as scratch:
            client.set_strategy(ANY_ARM)
            for phase in phases:
                ours, theirs = (each[: phase.count(count)] for each in (asked, expected))
                given, told = phase.ask(client, ours, Path(scratch))
                compared.append(compare(target, ours, theirs, given))
                figures |= told | compared[-1].figures(f"_{phase.name}")
                figures |= {f"accept_length_{phase.name}": accept_length(given)}
                yield figures | sum(compared, Compared()).figures()


def accept_length(rollouts: Sequence[Rollout]) -> float:
    """Tokens of a step with an arm."""
    counts = [each.spec for each in rollouts if each.spec is not None]
    return 1 + sum(each.accepted_drafts for each in counts) / max(1, sum(each.verify_calls for each in counts))
