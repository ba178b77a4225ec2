"""Which arm decodes the next step: the one object of this package that an engine talks to.

On rank 0, in the order of a scheduler's loop:

    table()             what every rank does next; with several ranks it is sent to all where it has changed
    launched(...)       a decode step begins, with what that table says for its batch size
    interrupted()       a prefill, a swap or a pause begins instead
    settled(...)        a decode step's result has come, under overlap after the next one was launched
    weights_changed()   another target or drafter is in force

Upstream's `activate_step_by_batch` is where a worker looks its arm up, and `on_verify_complete_cpu` where counts come.
Other ranks hold a table and nothing else. All modes learn all the time, so that a change of mode starts from what is
known. Pure: the clock's seconds and the random generator are arguments.

Steps are noted, and learned from several at a time where nothing depends on one of them (`_learn`). Between two steps
the scheduler, torch and the driver have their turn, and what is needed here has left the processor's caches: a step by
itself takes 90 to 115 us (mode `paper` in benchmarks/results/strategy.h200.json); in a row with others a quarter, by
counts on a CPU host that are not kept.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from tlt_client import schemas

from tlt_server.config import Arm
from tlt_server.errors import ConfigError
from tlt_server.strategy.arms import ArmTable, Bucket, Buckets, Choice, pinned_table
from tlt_server.strategy.bandit import Bandit
from tlt_server.strategy.beg_mab import BegMab
from tlt_server.strategy.costs import StepCosts
from tlt_server.strategy.curve import Accepted
from tlt_server.strategy.knowledge import Knowledge
from tlt_server.strategy.learned import Learned
from tlt_server.strategy.pulls import Pull, UnderWay
from tlt_server.strategy.report import Tallies
from tlt_server.strategy.settings import faults, from_client, to_buckets

NOTED = 16
"""Launches and results that are learned from at once: eight steps."""
_NONE = range(0)


class Selector:
    """Chooses arms; in mode `bandit`, over the server's own buckets, until it is told otherwise.

    costs: of every arm and of off, from start-up timing.
    captured: the largest batch size of each arm's CUDA graphs; beyond it, the arm is never chosen.
    largest: batch size that the server runs.
    buckets: the server's own, as `defaults.default_buckets` makes them.
    random: what mode `paper` draws from; `bandit` draws nothing.

    Raises:
        ConfigError: an arm was captured and not timed.
    """

    def __init__(
        self, costs: StepCosts, captured: Mapping[Arm, int], largest: int, buckets: Sequence[Bucket], random: Random
    ) -> None:
        if unknown := [str(arm) for arm in captured if arm not in costs.arms]:
            raise ConfigError(f"arms {', '.join(unknown)}: captured and not timed; time every arm that is captured")
        self._costs, self._captured, self._largest = costs, captured, largest
        self._own, self._random = Buckets(buckets, largest), random
        self._under_way = UnderWay()
        self._noted: list[tuple[Callable[..., Pull | None], tuple[Any, ...]]] = []
        self._before: Choice = None
        self._over: float | None = None  # seconds that the step before took more than expected
        self._arrange(schemas.StrategyUpdate("bandit"), Knowledge(self._own, costs))

    def table(self) -> ArmTable:
        """One arm for each bucket, for the next step."""
        if self._fixed is not None:
            return self._fixed
        return self._paper.table() if self._settings.mode == "paper" else self._bandit.table()

    def launched(self, arm: Choice, batch: int, cached: int, now: float, behind: int = 0) -> None:
        """A decode step begins.

        Args:
            arm: it runs with, which is what all ranks looked up.
            batch: requests in it, at least 1.
            cached: tokens in the KV cache, of them all; a few more or less do not matter.
            now: seconds.
            behind: tokens of all requests that the drafter has missed since off came into force, as far back as it will
                read; an arm's step begins with reading them.
        """
        if self._settings.mode == "bandit":
            self._bandit.begins()
        elif self._settings.mode == "paper":
            self._paper.launched(batch)
        self._noted.append((self._launch, (arm, batch, cached, now, behind)))
        if len(self._noted) >= NOTED:
            self._learn()

    def interrupted(self) -> None:
        """Something else than a decode step is launched: the time of the next one does not count."""
        self._learn()
        self._under_way.interrupt()

    def settled(self, batch: int, accepted: Sequence[int], now: float) -> None:
        """A decode step's result has come.

        Args:
            batch: requests in it, as it was launched.
            accepted: accepted drafts of each request that counts, the bonus token left out; zeros for off. A request
                that had ended before this step is better left out: what follows an end is no text.
            now: seconds, once the result is on the CPU.
        """
        self._noted.append((self._settle, (batch, accepted, now)))
        if len(self._noted) >= NOTED or (self._fixed is None and batch not in self._calm):
            self._learn()

    def weights_changed(self) -> None:
        """Another target or drafter is in force: what was accepted before says less. What a step costs stays."""
        self._learn()
        self._calm = _NONE
        self._knowledge.acceptance.weights_changed()
        self._bandit.weights_changed()

    def faults(self, update: schemas.StrategyUpdate) -> list[str]:
        """What is wrong with settings for this server, one line each."""
        return faults(update, self._captured, self._largest)

    def configure(self, update: schemas.StrategyUpdate) -> None:
        """Takes settings whole, for the next table; what was learned stays, where its bucket begins as before.

        Raises:
            ConfigError: they have a fault, and nothing was changed.
        """
        if found := self.faults(update):
            raise ConfigError("; ".join(found))
        self._learn()
        buckets = self._own if update.buckets is None else Buckets(to_buckets(update.buckets), self._largest)
        knowledge = self._knowledge
        if buckets.all != self._buckets.all:
            knowledge = Knowledge(buckets, self._costs)
            knowledge.restore(self._knowledge.learned())
        self._arrange(update, knowledge)

    def learned(self) -> Learned:
        """What a restart needs in order to be warm."""
        self._learn()
        return self._knowledge.learned()

    def restore(self, learned: Learned) -> None:
        """Starts from what was learned before, here or on a server like this one."""
        self._learn()
        knowledge = Knowledge(self._buckets, self._costs)
        knowledge.restore(learned)
        self._arrange(self._settings, knowledge)

    def report(self) -> schemas.Selection:
        """How things stand."""
        self._learn()
        arms = self.table().arm
        settings = self._settings
        return schemas.Selection(
            mode=settings.mode,
            epsilon=settings.epsilon,
            window=settings.window,
            exploration=settings.exploration,
            explored_s=self._tallies.explored_s,
            explored_lost_s=self._bandit.lost_s,
            decoded_s=self._tallies.decoded_s,
            lost=self._under_way.lost,
            unmatched=self._under_way.unmatched,
            buckets=tuple(
                self._tallies.bucket_report(i, arms(first), self._knowledge, self._paper)
                for i, first in enumerate(self._buckets.firsts)
            ),
        )

    def _learn(self) -> None:
        """From all that was noted, in its order; then decides."""
        noted, self._noted = self._noted, []
        newest: Pull | None = None
        for learn, what in noted:
            newest = learn(*what) or newest
        if self._settings.mode == "bandit" and newest is not None:
            self._bandit.decide(newest.batch, newest.cached)
            self._calm = self._buckets.sizes(newest.batch) if self._bandit.calm(newest.batch) else _NONE

    def _launch(self, arm: Choice, batch: int, cached: int, now: float, behind: int) -> None:
        charged = self._bandit.launched(arm, batch, cached, behind) if self._settings.mode == "bandit" else 0.0
        self._under_way.launch(Pull(arm, batch, cached, now, charged, behind))

    def _settle(self, batch: int, accepted: Sequence[int], now: float) -> Pull | None:
        """The step that was learned from; None where the result is nobody's, or of no request that counts."""
        seen = Accepted.of(accepted)
        found = self._under_way.settle(batch, now, seen.most)
        if found is None or not accepted:
            return None
        pull, seconds = found
        own, took = self._told(pull, seconds)
        self._knowledge.observe(pull.arm, batch, pull.cached, seen, own)
        if seconds is not None and not pull.reads:
            self._tallies.add(pull, seconds)
            self._paper.settled(pull.arm, batch, 1 + seen.drafts / seen.requests, seconds)
        if self._settings.mode == "bandit":
            self._bandit.settled(pull, seconds, took)
        return pull

    def _told(self, pull: Pull, seconds: float | None) -> tuple[float | None, float | None]:
        """What a step's time tells.

        Under overlap a result is settled behind the launch of the next step. So a step that another arm follows seems
        longer, or shorter, by what that arm's launch takes more or less, and the other arm's last step the reverse.
        Of one step alone, among steps with one other arm, the step before it says how much. Off's first step seems
        shorter even so; of off only a step between two others with off is believed. A time that is half too long or too
        short is no launch's doing.

        The launch of a step before which the drafter reads waits for that: what the step before takes more than
        expected is this one's.

        Returns:
            Its seconds among steps with the same arm, and those that it takes here, with what is read before it. None:
            that cannot be told.
        """
        before, self._before = self._before, pull.arm
        over, self._over = self._over, None
        follower = self._under_way.follower()
        if seconds is None:
            return None, None
        if pull.reads:
            return None, None if over is None else seconds + over
        expected = self._knowledge.seconds(pull.arm, pull.batch, pull.cached)
        self._over = seconds - expected
        if follower and follower.reads:
            return None, seconds
        if abs(self._over) > expected / 2:
            self._over = 0.0
        elif follower and not pull.arm == before == follower.arm:
            if pull.arm is None or over is None or before != follower.arm:
                return None, seconds
            return max(seconds + over, seconds / 2), seconds
        return seconds, seconds

    def _arrange(self, settings: schemas.StrategyUpdate, knowledge: Knowledge) -> None:
        self._settings, self._knowledge, self._buckets = settings, knowledge, knowledge.buckets
        self._tallies = Tallies(self._buckets)
        self._paper = BegMab(self._buckets, self._random, settings.epsilon, settings.window)
        self._bandit = Bandit(self._buckets, self._knowledge, settings.exploration)
        self._fixed: ArmTable | None = None
        self._calm = _NONE  # batch sizes whose results may wait; where the arms are fixed, all may
        if settings.mode in ("pinned", "off"):
            arm = from_client(settings.pinned) if settings.mode == "pinned" else None
            self._fixed = pinned_table(arm, self._captured)
