"""Does any request read cached prefixes of weights that are gone?

Targets are published in turn, in place and without a flush, by every route that a CPU has, while requests run and wait.
The first request after a publication must find nothing cached, and say what transformers says by the weights in force;
so must those that waited for the publication, of whose tokens none is older. Half of it without speculation.
"""

import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.reload.trainer import Trainer
from benchmarks.lib.reload.weights import noisy, tensors_of
from benchmarks.lib.servers import Serving
from tlt_server.demo import default_paths
from tlt_server.demo.lossless import Tokens
from tlt_server.demo.reference import Reference
from tlt_server.demo.task import problems
from tlt_server.process import running_server
from tlt_server.results import Figures

SIDES = {"chain": ["--arm", "3,1,4"], "plain": ["--no-speculation"]}
RUNNING = 3
"""Of the requests that are on their way at a publication; the others wait."""
FLAGS = ["--max-running-requests", str(RUNNING), "--random-seed", "7"]
ON_THEIR_WAY = 5
TOKENS = 24
LONG = 40
NOISE = 0.1
"""Times each tensor's deviation: enough for another answer to most prompts."""

Answer = dict[str, Any]


class Targets:
    """Some targets of one shape, and what each says greedily, never ending."""

    def __init__(self, folder: Path, seed: int, count: int = 3) -> None:
        start, _ = default_paths()
        noise = [noisy(start, folder / f"{i}", seed=seed + i, scale=NOISE) for i in range(1, count)]
        self.folders = [start, *noise]
        self._references = [Reference(path) for path in self.folders]
        self.says = cache(self._greedy)

    def tokens(self, prompt: str) -> Tokens:
        return self._references[0].tokens(prompt)

    def _greedy(self, which: int, prompt: Tokens) -> Tokens:
        model = self._references[which].model
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=LONG, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return tuple(output[0, len(prompt) :].tolist())


class Asked:
    """A server, and what it answers."""

    def __init__(self, trainer: Trainer, targets: Targets, rng: random.Random) -> None:
        self._trainer, self._targets, self._rng = trainer, targets, rng
        self._tensors = [tensors_of(folder) for folder in targets.folders]
        self._prompts = [targets.tokens(problem.prompt) for problem in problems(8, seed=rng.randrange(1 << 30))]
        self._version = 0

    def stale(self, which: int) -> int:
        """Publishes a target in place; how many answers after it were not of it alone."""
        with ThreadPoolExecutor(ON_THEIR_WAY) as pool:
            there = [pool.submit(self._ask, prompt, LONG) for prompt in self._elsewhere()]
            time.sleep(self._rng.uniform(0, 0.1))
            self._publish(which)
            prompt = self._rng.choice(self._prompts)
            first = self._ask(prompt, TOKENS)
            again = self._ask(prompt, TOKENS)
            found = [
                first["meta_info"]["cached_tokens"] > 0,
                again["meta_info"]["cached_tokens"] == 0,  # nothing would be shown, were nothing ever cached
                *(self._is_wrong(which, prompt, answer) for answer in (first, again)),
                *self._wrong_waiters(which, there),
            ]
        return sum(found)

    def _elsewhere(self) -> list[Tokens]:
        """Prompts that share no prefix with those of the others."""
        first = self._rng.sample(range(3, 200), ON_THEIR_WAY)
        return [(token, *self._rng.choice(self._prompts)) for token in first]

    def _wrong_waiters(self, which: int, there: Sequence["Future[Answer]"]) -> Iterator[bool]:
        for answer in (future.result() for future in there):
            if [span["target_version"] for span in answer["meta_info"]["weight_versions"]] == [self._version]:
                yield self._is_wrong(which, tuple(answer["prompt"]), answer)

    def _is_wrong(self, which: int, prompt: Tokens, answer: Answer) -> bool:
        said = tuple(answer["output_ids"])
        return said != self._targets.says(which, prompt)[: len(said)]

    def _publish(self, which: int) -> None:
        route = self._rng.choice(("disk", "tensor", "distributed"))
        self._trainer.post("/pause_generation", mode="in_place").raise_for_status()
        what = self._targets.folders[which] if route == "disk" else self._tensors[which]
        getattr(self._trainer, route)(what, flush_cache=False).raise_for_status()
        self._trainer.post("/continue_generation").raise_for_status()
        self._version += 1

    def _ask(self, prompt: Tokens, count: int) -> Answer:
        params = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        answer: Answer = self._trainer.post("/generate", input_ids=prompt, sampling_params=params).json()
        return answer | {"prompt": prompt}


@contextmanager
def training(side: str, logs: Path, serving: Serving) -> Iterator[Trainer]:
    """A server's trainer."""
    with serving([*SIDES[side], *FLAGS], logs / f"prefixes-{side}.log") as url:
        trainer = Trainer(url)
        yield trainer
        trainer.close()


def measure(count: int, seed: int, logs: Path, serving: Serving = running_server) -> Figures:
    """`prefix_publications`: targets published in place without a flush. `stale_prefixes`: answers after one that read
    what others had left, or were not of the weights in force."""
    rng, stale = random.Random(seed), 0
    made = {side: count // 2 + (count % 2) * (side == "chain") for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="tlt-targets-") as scratch:
        targets = Targets(Path(scratch), seed)
        for side in SIDES:
            with training(side, logs, serving) as trainer:
                asked = Asked(trainer, targets, rng)
                stale += sum(asked.stale((i + 1) % len(targets.folders)) for i in range(made[side]))
    return {"prefix_publications": sum(made.values()), "stale_prefixes": stale}
