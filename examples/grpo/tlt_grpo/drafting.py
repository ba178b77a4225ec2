"""A drafter trainer's part of a step: it is judged, and then trained by what was just sampled."""

import logging
from concurrent.futures import Future, ThreadPoolExecutor

from tlt_client import Client
from tlt_client.errors import RequestUnserved
from tlt_client.schemas import TrainedUntil

from tlt_grpo.clock import Clock
from tlt_grpo.config import Beside, Config
from tlt_grpo.learning.policy import Policy

logger = logging.getLogger(__name__)
DRAFTERS_SHARE = 0.1
"""Of the policy's device, that a drafter trainer's passes may need there."""


class Drafting:
    """Of one step; nothing, without a drafter trainer."""

    def __init__(self, config: Config, policy: Policy, clock: Clock, number: int) -> None:
        self._config, self._policy, self._clock = config, policy, clock
        self._judges = number % config.drafter_judged_every == 0
        self._pool = ThreadPoolExecutor(1, "drafter")
        self._asked: Future[int] | None = None

    def beside(self, phase: Beside) -> None:
        """Begins, if this is what it is to train beside. It is judged by the target that is still active."""
        url = self._config.drafter_trainer
        if url is None or self._config.drafter_beside != phase:
            return
        if phase == "publish":
            with self._clock.phase("draft"):
                self._policy.rest(unless_free=DRAFTERS_SHARE)
                self._judge(url)
            self._asked = self._pool.submit(self._train, url)
        else:
            self._asked = self._pool.submit(self._judge_and_train, url)

    def end(self) -> int:
        """Waits for it; steps that it took."""
        if self._asked is None:
            return 0
        with self._clock.phase("draft"), self._pool:
            return self._asked.result()

    def _judge_and_train(self, url: str) -> int:
        self._judge(url)
        return self._train(url)

    def _judge(self, url: str) -> None:
        if self._judges:
            _ask(url, 0, "judged")

    def _train(self, url: str) -> int:
        return _ask(url, self._config.drafter_steps, "taken")


def _ask(url: str, asked: int, until: TrainedUntil) -> int:
    """Steps that the drafter trainer took; none where it is not there. What it publishes becomes active within the next
    rollouts."""
    try:
        with Client(url) as trainer:
            made = trainer.train_drafter(asked, until=until)
    except RequestUnserved as error:
        logger.warning("the drafter stays as it is: its trainer at %s: %s", url, error)
        return 0
    if made.waits_for:
        logger.warning("the drafter trainer took %d of %d steps, %s", made.steps, asked, made.waits_for)
    return made.steps
