"""Does a publication of the target change the target alone, by every route, with rollouts in flight?

    python -m benchmarks publications --json benchmarks/results/publications.h200x2.json

By each route of SGLang's, the target of the start and one with noise are published in turn, to a server with an EAGLE
drafter and to one with an EAGLE-3 drafter. Rollouts are in flight; they hold still meanwhile and go on. After each
publication the checksums of all parameters must be those of the target that was published, and of the drafter as it
was: only what the drafter shares with the target follows. The last publication is the target of the start, and the
accept length that of the start.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median

import httpx
import torch

from benchmarks.lib import command
from benchmarks.lib.command import EMBEDDED, Models, parser, positive
from benchmarks.lib.reload import ipc, shown
from benchmarks.lib.reload.streams import beside
from benchmarks.lib.reload.trainer import Trainer
from benchmarks.lib.reload.weights import Tensors, changed, noisy, tensors_of
from benchmarks.lib.servers import Answer, Request
from benchmarks.lib.sides import Side, SideServer, Site, awake, on_ranks, side_by_side
from tlt_server.api.status import SpecCounts
from tlt_server.config import Arm
from tlt_server.demo.lossless import Tokens
from tlt_server.launch import has_gpu
from tlt_server.results import Figures

MEASURES = ("tlt_server/engine/weights", "tlt_server/api")
ROUTES = ("disk", "tensor", "distributed", "ipc")
STREAMS, TOKENS = 16, 200
BETWEEN_S = 0.05

Checksums = list[dict[str, str]]
"""Of every parameter on each rank; a drafter's names begin with `draft.`."""


@dataclass(frozen=True)
class Published:
    """One publication. took_s: from before its pause to after it."""

    checksums: Checksums
    took_s: float


def shared_names(checksums: Mapping[str, str]) -> set[str]:
    """The drafter's parameters that are the target's embedding or head."""
    both = ("model.embed_tokens.weight", "lm_head.weight")
    return {f"draft.{name}" for name in both if name in checksums and checksums.get(f"draft.{name}") == checksums[name]}


def moved_as_it_should(before: Checksums, after: Checksums) -> bool:
    """Whether on every rank each matrix of the target changed, the drafter's share of them alike, and nothing else."""
    for old, new in zip(before, after, strict=True):
        shared = shared_names(old)
        matrices = {n for n in old if not n.startswith("draft.") and not n.endswith((".bias", "norm.weight"))}
        if changed([old], [new]) != matrices | shared or shared_names(new) != shared:
            return False
    return True


class Routes:
    """The target's weights on their way to a server, by each route.

    targets: folders of the target of the start, and of the one with noise.
    """

    def __init__(self, trainer: Trainer, targets: Sequence[Path], ranks: int) -> None:
        self.trainer, self._targets, self._ranks = trainer, targets, ranks
        self._tensors = [tensors_of(target) for target in targets]

    def send(self, route: str, which: int) -> httpx.Response:
        """Sends one of the targets, while requests are running: their cache is not flushed."""
        fields, tensors = {"flush_cache": False}, self._tensors[which]
        match route:
            case "disk":
                return self.trainer.disk(self._targets[which], **fields)
            case "tensor":
                return self.trainer.tensor([self._on_gpu(tensors, rank) for rank in range(self._ranks)], **fields)
            case "distributed":
                return self.trainer.distributed(tensors, **fields)
            case _:

                def ask(handles: dict[str, str]) -> httpx.Response:
                    return self.trainer.post("/update_weights_from_ipc", zmq_handles=handles, **fields)

                return ipc.send(tensors, self._ranks, ask)

    def _on_gpu(self, tensors: Tensors, rank: int) -> Tensors:
        """As a trainer beside that rank has them: shared by CUDA IPC where there is a GPU."""
        return {name: tensor.to(f"cuda:{rank}") for name, tensor in tensors.items()} if has_gpu() else tensors


def routes_here(ranks: int) -> list[str]:
    """IPC needs a GPU; NCCL one more than the server has."""
    if not has_gpu():
        return ["disk", "tensor", "distributed"]
    return [route for route in ROUTES if route != "distributed" or torch.cuda.device_count() > ranks]


class Case:
    """One server, what it is asked, and what its checksums may be.

    routes: to it. The disk's tells first what the target with noise leaves behind.
    """

    def __init__(self, server: SideServer, prompts: Sequence[Tokens], routes: Routes) -> None:
        self.server, self._prompts, self._routes = server, prompts, routes
        self._trainer = routes.trainer
        self.rollouts()  # kernels are compiled
        self._start = self._trainer.checksums()
        self._publish("disk", 1)
        self._noise = self._trainer.checksums()
        self._publish("disk", 0)

    def rollouts(self, temperature: float = 1.0) -> list[Answer]:
        params = {"temperature": temperature, "max_new_tokens": TOKENS, "ignore_eos": True}
        requests: list[Request] = [(prompt, params) for prompt in self._prompts]
        answers = self.server.ask(requests, at_once=len(requests), together=len(requests))
        return [answer for answer in answers if answer]

    def figures(self, name: str, route: str, count: int) -> Figures:
        """Publishes by one route, rollouts in flight, and compares with before."""
        version, length = self._target_version(), self._accept_length()
        before, made = self.server.counts(), list[Published]()
        rounds = beside(self.rollouts, lambda: made.extend(self._in_turn(route, count)))
        during = accept_length_between(before, self.server.counts())
        return {
            f"publications_{name}": len(made),
            f"rollouts_across_{name}": sum(len(each["meta_info"]["weight_versions"]) > 1 for each in chain(*rounds)),
            f"unexpected_checksums_{name}": unexpected(self._start, self._noise, [each.checksums for each in made]),
            f"unexpected_versions_{name}": abs(self._target_version() - version - len(made)),
            f"publication_ms_p50_{name}": 1000 * median(each.took_s for each in made),
            f"accept_length_before_{name}": length,
            f"accept_length_during_{name}": during,
            f"accept_length_after_{name}": self._accept_length(),
        }

    def _in_turn(self, route: str, count: int) -> list[Published]:
        """Noise and start, the start last; each is in force for a few steps."""
        made = []
        for i in reversed(range(count)):
            began = time.monotonic()
            self._publish(route, i % 2)
            took = time.monotonic() - began
            made.append(Published(self._trainer.checksums(), took))
            time.sleep(BETWEEN_S)
        return made

    def _publish(self, route: str, which: int) -> None:
        """Rollouts hold still meanwhile and go on. Without a pause upstream's HTTP process would wait for their end."""
        self._trainer.post("/pause_generation", mode="in_place").raise_for_status()
        self._routes.send(route, which).raise_for_status()
        self._trainer.post("/continue_generation").raise_for_status()

    def _accept_length(self) -> float:
        """Of greedy rollouts, over an empty cache."""
        self.server.http.post(f"{self.server.url}/flush_cache", params={"timeout": 10}).raise_for_status()
        before = self.server.counts()
        self.rollouts(temperature=0)
        return accept_length_between(before, self.server.counts())

    def _target_version(self) -> int:
        status = self.server.http.get(f"{self.server.url}/tlt/v1/status").raise_for_status().json()
        version: int = status["versions"]["target"]["version"]
        return version


def accept_length_between(before: SpecCounts, after: SpecCounts) -> float:
    return 1 + (after.accepted_tokens - before.accepted_tokens) / (after.drafts - before.drafts)


def unexpected(start: Checksums, noise: Checksums, found: Sequence[Checksums]) -> int:
    """How many publications, of noise and start in turn, start last, left checksums that they should not have; all of
    them if the noise itself moved what it should not."""
    if not moved_as_it_should(start, noise):
        return len(found)
    return sum(checksums != (noise if i % 2 else start) for i, checksums in enumerate(reversed(found)))


@contextmanager
def serving(models: Models, drafter: Path, ranks: int, logs: Path) -> Iterator[SideServer]:
    """A server of a drafter on so many GPUs."""
    name = f"{drafter.name}_tp{ranks}"
    side = Side(name, Arm(3, 1, 4), flags=on_ranks(ranks))
    site = Site(models.target, drafter, logs, [STREAMS], STREAMS * 1024, context=1024)
    with side_by_side([side], site) as servers, awake(servers[name]) as server:
        yield server


def measured(models: Models, logs: Path, arguments: argparse.Namespace) -> Figures:
    """All figures."""
    eagle3 = models.with_eagle3().drafter
    drafters = {"eagle": models.drafter} | ({"eagle3": eagle3} if eagle3.is_dir() else {})
    figures: Figures = {"requests": 0, "failed_requests": 0}
    count = arguments.count
    if arguments.smoke:
        drafters, count = {"eagle": models.drafter}, 2
    with tempfile.TemporaryDirectory(prefix="tlt-targets-") as scratch:
        noise = noisy(models.target, Path(scratch) / "noise", seed=5)
        for ranks in arguments.ranks:
            for drafter, path in drafters.items():
                with serving(models, path, ranks, logs) as server:
                    trainer = Trainer(server.url, ranks, f"cuda:{ranks}" if has_gpu() else "cpu")
                    case = Case(server, models.prompts(STREAMS), Routes(trainer, (models.target, noise), ranks))
                    for route in arguments.routes or routes_here(ranks):
                        figures |= case.figures(f"{drafter}_tp{ranks}_{route}", route, count)
                    trainer.close()
                figures["requests"] += server.requests
                figures["failed_requests"] += server.failed
    totals = ("unexpected_checksums", "unexpected_versions")
    return figures | {name: sum(figures[each] for each in figures if each.startswith(f"{name}_")) for name in totals}


def flags() -> argparse.ArgumentParser:
    found = parser("publications", __doc__, compares=False)
    gpus = torch.cuda.device_count() if has_gpu() else 1
    found.add_argument("--count", type=positive, default=100, help="publications by each route (default: 100)")
    found.add_argument("--routes", nargs="+", choices=ROUTES, help="default: all that this machine has")
    found.add_argument(
        "--ranks",
        nargs="+",
        type=positive,
        default=[1, 2] if gpus > 1 else [1],
        help="tensor-parallel sizes to serve with",
    )
    found.set_defaults(shape="18m" if has_gpu() else EMBEDDED)
    return found


def main(argv: Sequence[str]) -> None:
    command.main("publications", __doc__, argv, measured, shown.publications, flags())
