"""A server under live traffic, whose drafter has learnt nothing when it begins, and a drafter trainer beside it."""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from tlt_client import Client, DrafterUpdate, Rollout
from tlt_grpo.rollouts import sampling
from tokenizers import Tokenizer

from benchmarks.lib.adaptation.arms import GPU_FLAGS
from benchmarks.lib.command import SEED
from benchmarks.lib.online.plan import SETTINGS, Plan, settings
from benchmarks.lib.reload.weights import noisy
from benchmarks.lib.training.trainers import training
from tlt_server.demo import default_paths
from tlt_server.demo.lossless import Tokens
from tlt_server.demo.task import Problem, problems, training_problems
from tlt_server.errors import ServerFailed
from tlt_server.launch import has_gpu
from tlt_server.process import running_server

CHANGED = 0.5
"""Noise that another policy has on each matrix, by the matrix's deviation: enough for what was learnt before to draft
plainly less."""
LOOK_EVERY_S = 0.5
PATIENCE_S = 1800.0


class Sampled(NamedTuple):
    """A response, and what it answers."""

    prompt: Tokens
    rollout: Rollout


class Counts(NamedTuple):
    """Of one response: target passes that gave tokens, and the drafted tokens that they accepted."""

    passes: int
    accepted: int

    @classmethod
    def of(cls, rollout: Rollout) -> "Counts":
        if rollout.spec is None:  # decoded plainly: the first token is the prefill's
            return cls(rollout.completion_tokens - 1, 0)
        return cls(rollout.spec.verify_calls, rollout.spec.accepted_drafts)


def accept_length(counts: Sequence[Counts]) -> float:
    """Tokens of a verifying pass, the bonus token counted; 1 where nothing was drafted."""
    return 1 + sum(each.accepted for each in counts) / max(sum(each.passes for each in counts), 1)


class Live:
    """The server. control: address of the trainer that it follows. drafter: a folder, of the one that learnt last."""

    def __init__(self, client: Client, control: str, folder: Path) -> None:
        self.client, self.control, self._folder = client, control, folder
        self.drafter = folder / "drafter"
        self._tokenizer = Tokenizer.from_file(str(default_paths()[0] / "tokenizer.json"))

    def traffic(self, plan: Plan, seed: int) -> Iterator[tuple[list[Sampled], dict[str, Any]]]:
        """Each round's responses, and what the trainer says once it has learnt from them; for `recovery` rounds more
        after another policy was published. What drafted last before that is `drafter` then.

        The trainer is there for as long as this goes on; after it the policy is the first one again.
        """
        rounds = plan.rounds + plan.recovery
        asked, file = training_problems(rounds * plan.prompts, seed), self._folder / "train.toml"
        said = (f"{name} = {value}\n" for name, value in settings(plan, seed).items())
        file.write_text("".join(said) + SETTINGS.read_text())
        with training(self.control, file, self._folder / "online", self._folder / "train.log") as status:
            for number in range(rounds):
                if number == plan.rounds:
                    shutil.copytree(newest(self._folder / "online"), self.drafter)
                    other = noisy(default_paths()[0], self._folder / "other", seed, CHANGED)
                    self.client.update_weights_from_disk(str(other), "changed")
                some = asked[number * plan.prompts : (number + 1) * plan.prompts]
                yield self._sample([each for each in some for _ in range(plan.group)], plan), learnt(status)
        self.client.update_weights_from_disk(str(default_paths()[0]), "again")

    def judge(self, plan: Plan) -> list[Counts]:
        """Of the drafter in force, a response to each held-out problem: the same ones for every drafter and seed.

        What is cached of the problems was read by the drafter that was judged before, which this one cannot use.
        """
        self.client.flush_cache(wait_s=30)
        return [Counts.of(rollout) for _, rollout in self._sample(problems(plan.judged, SEED), plan)]

    def activate(self, drafter: Path) -> None:
        """From a folder.

        Raises:
            tlt_client.errors.TltClientError: the server refuses it.
        """
        self.client.update_drafter(DrafterUpdate(str(drafter)))

    def _sample(self, asked: Sequence[Problem], plan: Plan) -> list[Sampled]:
        """A response to each at temperature 1, all sent at once."""
        prompts = [tuple(each.ids) for each in self._tokenizer.encode_batch([each.prompt for each in asked])]
        rollouts = self.client.generate_batch(prompts, sampling(1.0, plan.max_new_tokens))
        if lost := sum(rollout.aborted for rollout in rollouts):
            raise ServerFailed(f"{lost} of {len(rollouts)} rollouts were aborted")
        return [Sampled(prompt, rollout) for prompt, rollout in zip(prompts, rollouts, strict=True)]


@contextmanager
def serving(seed: int, control: str, folder: Path) -> Iterator[Live]:
    """Decodes plainly until a drafter is published at `control`. folder: for logs.

    Raises:
        ServerFailed: it ended early.
    """
    flags = ["--random-seed", str(seed), *(GPU_FLAGS if has_gpu() else [])]
    flags += ["--drafter", "auto", "--arm", "3,1,4", "--watchdog", "observe", "--trainer", control]
    with running_server(flags, folder / "server.log", start_timeout=400) as url, Client(url) as client:
        yield Live(client, control, folder)


def newest(trainer: Path) -> Path:
    """What a trainer published last, in its folder; what it began with, before that."""
    return max((trainer / "published").glob("drafter-*"), default=trainer / "start")


def learnt(url: str) -> dict[str, Any]:
    """What a trainer says once it waits for features, and no more came for a while; its drafter is in force then.

    Raises:
        ServerFailed: it does not answer, or is not done for very long.
    """
    before: dict[str, Any] = {}
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)
        try:
            now: dict[str, Any] = httpx.get(url, timeout=60).raise_for_status().json()
        except httpx.HTTPError as error:
            raise ServerFailed(f"the drafter trainer does not answer: {error}") from error
        same = all(now[name] == before.get(name) for name in ("tokens_received", "steps", "published"))
        if same and now["state"] == "waiting for features" and now["published"] == now["active"]:
            return now
        before = now
    raise ServerFailed(f"the drafter trainer is not done after {PATIENCE_S:.0f} s; it says {before}")
