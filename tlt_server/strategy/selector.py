"""Which arm decodes the next step: the one object of this package that an engine talks to.

Rank 0 holds one, other ranks a table and nothing else. All modes learn all the time, so that a change of mode starts
from what is known. The clock's seconds and the random generator are arguments.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from random import Random

from tlt_client import schemas

from tlt_server.config import Arm
from tlt_server.errors import ConfigError
from tlt_server.strategy.arms import ArmTable, Bucket, Buckets, Choice, pinned_table, undrafted
from tlt_server.strategy.bandit import Bandit
from tlt_server.strategy.beg_mab import BegMab
from tlt_server.strategy.costs import StepCosts
from tlt_server.strategy.estimates import Estimates, Learned
from tlt_server.strategy.pulls import Pull, UnderWay
from tlt_server.strategy.settings import faults, from_client, to_buckets, to_client


class Selector:
    """Chooses arms; in mode `bandit`, over the server's own buckets, until it is told otherwise.

    costs: of every arm and of off. captured: the largest batch size of each arm's CUDA graphs; beyond it, it is never
    chosen. largest: batch size that the server runs. buckets: the server's own. random: what mode `paper` draws from.

    Raises:
        ConfigError: an arm was captured and not timed.
    """

    def __init__(
        self, costs: StepCosts, captured: Mapping[Arm, int], largest: int, buckets: Sequence[Bucket], random: Random
    ) -> None:
        if unknown := [str(arm) for arm in captured if arm not in costs.arms]:
            raise ConfigError(f"arms {', '.join(unknown)}: captured and not timed; time every arm that is captured")
        self._costs, self._captured, self._largest, self._random = costs, captured, largest, random
        self._own = Buckets(buckets, largest)
        self._drafted = True
        self._estimates, self._under_way = Estimates(costs), UnderWay()
        self._over: float | None = None  # seconds that the step before took more than expected
        self.configure(schemas.StrategyUpdate("bandit"))

    def table(self) -> ArmTable:
        """One arm for each bucket, for the next step."""
        return self._fixed or (self._paper.table() if self._mode == "paper" else self._bandit.table)

    def launched(self, arm: Choice, batch: int, cached: int, now: float, behind: int = 0) -> None:
        """A decode step begins.

        Args:
            arm: it runs with. batch: requests in it, at least 1. cached: tokens in the KV cache, of them all.
            now: seconds. behind: tokens of all requests that the drafter has missed, and reads first.
        """
        charged = 0.0
        if self._mode == "bandit":
            charged = self._bandit.launched(arm, batch, cached, behind)
        elif self._mode == "paper":
            self._paper.launched(batch)
        self._under_way.launch(Pull(arm, batch, cached, now, charged, behind))

    def interrupted(self) -> None:
        """Something else than a decode step is launched: the time of the next one does not count."""
        self._under_way.interrupt()

    def settled(self, batch: int, accepted: Sequence[int], now: float, late: bool = False) -> None:
        """A decode step's result has come.

        Args:
            batch: requests in it, as it was launched.
            accepted: accepted drafts of each request that counts, zeros for off. Best without those that had ended.
            now: seconds, once the result is on the CPU. late: it had been there before anyone asked.
        """
        found = self._under_way.settle(batch, now, max(accepted, default=0))
        if found is None or not accepted:
            return
        pull, seconds = found
        expected = self._estimates.seconds(pull.arm, batch, pull.cached)
        took, own = self._told(pull, seconds, expected, late)
        self._estimates.observe(pull.arm, accepted, expected, own)
        if seconds is not None and not pull.reads:
            bucket = self._buckets.index(batch)
            tally = self._tallies[bucket, pull.arm]
            tally[0] += 1
            tally[1] += seconds
            self._usual_s += self._estimates.usual(pull.arm, batch, pull.cached)
            self._explored_s += seconds if pull.charged else 0.0
            self._newest[bucket] = batch, pull.cached
            self._paper.settled(pull.arm, batch, 1 + sum(accepted) / len(accepted), seconds)
        if self._mode == "bandit":
            self._bandit.settled(pull, seconds, took, late)

    def foresee(self, lengths: Sequence[float]) -> None:
        """What history has for the present batch: accept lengths, by tokens drafted from one on."""
        self._estimates.foresee(lengths)

    def let_draft(self, on: bool) -> None:
        """Whether the drafter may draft: else its arms are left out, and those of history, and off, stay."""
        if on != self._drafted:
            self._drafted = on
            self._begin()

    def weights_changed(self) -> None:
        """Another target or drafter is active: what was accepted before says less. What a step costs stays."""
        self._estimates.weights_changed()
        self._bandit.weights_changed()

    def configure(self, update: schemas.StrategyUpdate) -> None:
        """Takes settings whole, for the next table; what was learned stays.

        Raises:
            ConfigError: they have faults, all of which are named, and nothing was changed.
        """
        if found := faults(update, self._captured, self._largest):
            raise ConfigError("; ".join(found))
        self._settings, self._mode = update, update.mode
        self._wished = self._own if update.buckets is None else Buckets(to_buckets(update.buckets), self._largest)
        self._begin()

    def learned(self) -> Learned:
        """What a restart needs in order to be warm."""
        return self._estimates.learned()

    def restore(self, learned: Learned) -> None:
        """Starts from what was learned before, here or on a server like this one."""
        self._estimates = Estimates(self._costs)
        self._estimates.restore(learned)
        self._begin()

    def step_times(self) -> schemas.StepTimes:
        """Of all steps whose time counts."""
        return schemas.StepTimes(sum(seconds for _, seconds in self._tallies.values()), self._usual_s)

    def report(self) -> schemas.Selection:
        """How things stand."""
        settings = self._settings
        self._estimates.learn()
        return schemas.Selection(
            mode=settings.mode,
            epsilon=settings.epsilon,
            window=settings.window,
            exploration=settings.exploration,
            explored_s=self._explored_s,
            explored_lost_s=self._bandit.spent,
            decoded_s=self.step_times().decoded_s,
            lost=self._under_way.lost,
            unmatched=self._under_way.unmatched,
            buckets=tuple(map(self._bucket_report, range(len(self._buckets.all)))),
        )

    def _bucket_report(self, index: int) -> schemas.BucketReport:
        """What is expected of its arms at its newest step; before the first, at its largest batch."""
        first, last = self._buckets.firsts[index], self._buckets.lasts[index]
        batch, cached = self._newest.get(index, (last, 0))
        arms = []
        for arm in self._wished.all[index].arms:
            pulls, seconds = self._tallies.get((index, arm), (0, 0.0))
            median = self._paper.median_reward(index, arm) if arm in self._buckets.all[index].arms else None
            length = self._estimates.length(arm)
            step_s = self._estimates.seconds(arm, batch, cached)
            rate = batch * length / step_s
            arms.append(schemas.ArmReport(to_client(arm), int(pulls), seconds, median, rate, length, 1000 * step_s))
        return schemas.BucketReport(first, last, to_client(self.table().arm(first)), tuple(arms))

    def _told(
        self, pull: Pull, seconds: float | None, expected: float, late: bool
    ) -> tuple[float | None, float | None]:
        """Seconds of a step with what the drafter read first, and those that were its arm's doing; None: unknown.

        The launch of a step that reads first waits for that, under overlap within the time of the step before: what
        that took more than expected is the reading's. A late step's time is the launch of the next one, an arm's own
        where that has the same.
        """
        over, self._over = self._over, None
        if seconds is None:
            return None, None
        if pull.reads:
            if over is None:
                return None, None
            self._estimates.read(pull.behind, seconds + over - expected)
            return seconds + over, None
        self._over = seconds - expected
        is_next_ones = self._under_way.waits_for_reading or (late and not self._under_way.followed_by(pull.arm))
        return seconds, None if is_next_ones else seconds

    def _begin(self) -> None:
        """With these settings, all but what is learned anew."""
        settings = self._settings
        self._buckets = self._wished if self._drafted else undrafted(self._wished)
        self._tallies: dict[tuple[int, Choice], list[float]] = defaultdict(lambda: [0, 0.0])
        self._newest: dict[int, tuple[int, int]] = {}
        self._explored_s = self._usual_s = 0.0
        self._paper = BegMab(self._buckets, self._random, settings.epsilon, settings.window)
        self._bandit = Bandit(self._buckets, self._estimates, settings.exploration)
        self._fixed: ArmTable | None = None
        if self._mode in ("pinned", "off"):
            arm = from_client(settings.pinned) if self._mode == "pinned" else None
            self._fixed = pinned_table(arm if self._drafted or (arm and arm.of_history) else None, self._captured)
