"""Rollouts that go on while the policy learns and is published, by whichever weights are in force.

So a response may be of several versions, and each of its log-probabilities is of the one that sampled the token. Which
one that was, the server says; `rollouts.ages` reads it.
"""

import uuid
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from tlt_client import Client, Rollout, SamplingParams
from tlt_client.errors import RequestUnserved
from tlt_server.demo.task import Problem

from tlt_grpo.config import Mode
from tlt_grpo.rollouts import PATIENCE, Batch, Rollouts

AHEAD: dict[Mode, int] = {"on_policy": 0, "one_step_off": 1, "partial": 2}
"""Steps whose responses are asked for before a step takes its own. Slots are for one step's: of two, a response that
ends makes room for another, so that as many are under way all the time."""


@dataclass(frozen=True)
class _Group:
    problem: Problem
    prompt: tuple[int, ...]
    responses: list[Future[tuple[Rollout, int]]]

    @property
    def has_ended(self) -> bool:
        return all(each.done() for each in self.responses)


class Flight:
    """Groups of responses, of which `slots` responses at most are under way; the others wait. For a `with`."""

    def __init__(self, client: Client, slots: int) -> None:
        self._client, self._name, self._over = client, uuid.uuid4().hex, False
        self._pool = ThreadPoolExecutor(slots, "flight")
        self._groups: list[_Group] = []

    def ask(self, problem: Problem, prompt: tuple[int, ...], params: Sequence[SamplingParams]) -> None:
        """For a group, a response by each of the parameters."""
        self._groups.append(_Group(problem, prompt, [self._pool.submit(self._respond, prompt, p) for p in params]))

    def take(self, number: int) -> Batch:
        """So many groups, of those that have ended the ones that were asked for first; waits until there are.

        Raises:
            tlt_client.errors.RequestUnserved: too many requests failed.
        """
        while len(ended := [each for each in self._groups if each.has_ended]) < min(number, len(self._groups)):
            wait([one for each in self._groups for one in each.responses if not one.done()], None, FIRST_COMPLETED)
        taken = ended[:number]
        self._groups = [each for each in self._groups if each not in taken]
        found = [(each, *one.result()) for each in taken for one in each.responses]
        rollouts = Rollouts([rollout for _, rollout, _ in found], sum(failed for *_, failed in found))
        return Batch([each.problem for each, *_ in found], [each.prompt for each, *_ in found], rollouts)

    def _respond(self, prompt: tuple[int, ...], params: SamplingParams) -> tuple[Rollout, int]:
        """A whole response, and how often it was cut short: by a pause that aborts, say. Then it goes on."""
        rid, failed = f"{self._name}-{uuid.uuid4().hex}", 0
        rollout = self._client.generate(prompt, params, logprobs=True, rid=rid)
        while rollout.aborted and not self._over:
            if (failed := failed + 1) > PATIENCE:
                raise RequestUnserved(f"a response was aborted {failed} times")
            rollout = self._client.continue_rollout(rollout, prompt, params)
        return rollout, failed

    def __enter__(self) -> "Flight":
        return self

    def __exit__(self, *_: object) -> None:
        """Ends what is under way."""
        self._over = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        if not all(each.has_ended for each in self._groups):
            self._client.abort(self._name)
        self._pool.shutdown()
