"""Mode `bandit`: BEG-MAB, with what the paper leaves open decided for a server that pays for every experiment.

**The arm in force** of a bucket is the one with the highest expected reward (knowledge.py), given the batch and the
cached tokens of the bucket's last step. Another takes over only where it is expected to be better by a margin: by what
estimates scatter anyway, and while the arm in force is not well known, by a part of the doubt about it. So noise
switches little, and an arm that was just taken is measured before it is left.

**Cold start** needs no round of trials: timing and a guess at acceptance order the arms, and the arm in force corrects
the guess for all of them. An arm that was thought too good shows it by being pulled.

**Exploration** finds an arm that was thought too bad. It goes to the arm with the highest

    expected reward over that of the arm in force, plus BONUS times the root of the steps since it was pulled here

so that near rivals are looked at often, hopeless arms seldom, and each some time: any arm may become the best. For a
look, the sum must exceed the reward of the arm in force by a share of it, `WORTH`: many requests tell much at once, and
need no look again so soon. It waits until the budget (budget.py) affords that arm, whatever that takes: were it passed
over for a cheaper one, an arm that was slow once would stay so for ever. One step at a time, but at off and from off
(below): each result may change what is worth a look.

**What exploration costs** is the time that it loses: a step's seconds, less those in which the arm in force would have
made the same tokens. That is what a user pays, and it is what a near rival costs little of, so that it is looked at
often, which at batch 1 it must be: one verify scatters by half its mean. Were all of an explored step's time charged,
a rival 5 % better would not be told from one 5 % worse in 2,000 steps. A tenth of it is charged at least, for a rate is
an estimate: all explored steps together take ten times the budget's share at most, and that only where rivals are near.

**Off** is in force where no arm is expected to beat plain decoding. What it is left for is known from exploration: a
pull of one chain shows what each chain would bring. So it is left as it was entered, as often as load asks. A look from
off costs more than a step: the drafter first reads what it missed (engine/missed.py). That is charged as well, and so
is the step behind a look at off, which begins with reading too. A look either way takes several steps, for only one
between two others with its arm tells what that takes (`Selector._told`); from off so many that three tell, which in a
row are believed however far off (paces.py), for most of what it costs is the reading, once. Otherwise an arm that
seemed slow when off came would seem so for ever.

**Results may wait** while a bucket is calm: its arm has long been in force, and no look is under way that takes several
steps. What one more step tells would hardly change anything then, and to decide takes time too (selector.py).
"""

from math import sqrt
from typing import NamedTuple

from tlt_server.strategy.arms import ArmTable, Buckets, Choice
from tlt_server.strategy.budget import Budget
from tlt_server.strategy.knowledge import Knowledge
from tlt_server.strategy.paces import FAR, LONGEST_LOOK
from tlt_server.strategy.pulls import Pull

MARGIN = 0.02
"""By how much a rival must be expected to be better: two well known arms scatter by about so much."""
PATIENCE = 0.5
"""Of the standard deviation of what the arm in force is expected to have accepted: likewise."""
BONUS = 0.04
"""Share of the best reward, for the root of one step. After 1,000 steps it adds up to 1.3: enough for an arm that makes
next to nothing to be looked at before a near rival is again."""
WORTH = 0.2
"""For many requests; for few, in proportion to what they tell more than one does. A single request gets nearly all
the looks that the budget affords: one verify scatters by half its mean."""
LEAST = 0.1
"""Of an explored step's time, charged however good the arm: about what switching to it and back may cost, 0.2 ms each
way, and more; and what bounds how often that is done. Raised, it makes looks fewer, and a cold start slower to find
the best arm."""

CALM = 32
"""Steps of a bucket since its arm in force last changed, or the weights did."""

_LOOK_AT_OFF, _LOOK_FROM_OFF = 3, LONGEST_LOOK
"""Steps, of which all tell what they take but the first and the last."""


class Bandit:
    """Decides on rank 0, and learns from what came of it.

    share: of decoding time that exploration may lose, 0 to 1.
    """

    def __init__(self, buckets: Buckets, knowledge: Knowledge, share: float) -> None:
        self._buckets = buckets
        self._knowledge, self._reading = knowledge, knowledge.reading
        self._budget = Budget(share)
        self._steps = [0] * len(buckets.all)
        self._changed = [0] * len(buckets.all)  # the step at which an arm came into force, or other weights
        self._pulled: list[dict[Choice, int]] = [dict.fromkeys(bucket.arms, 0) for bucket in buckets.all]
        lasts = map(buckets.last, range(len(buckets.all)))
        self._in_force = [_best(knowledge.rates(b.arms, last, 0)) for b, last in zip(buckets.all, lasts, strict=True)]
        self._exploring: tuple[int, Choice] | None = None
        self._behind = 0  # tokens that the drafter has missed
        self._look: _Look | None = None
        self._new_weights = True  # since the last look

    @property
    def lost_s(self) -> float:
        """Seconds that exploration lost."""
        return self._budget.spent

    def table(self) -> ArmTable:
        """What each bucket does next."""
        arms = list(self._in_force)
        if self._exploring is not None:
            bucket, arm = self._exploring
            arms[bucket] = arm
        return self._buckets.table(arms)

    def calm(self, batch: int) -> bool:
        """Whether what comes of the next steps may wait: nothing depends on one of them."""
        bucket, exploring = self._buckets.index(batch), self._exploring
        if self._look or (exploring and self._steps_of_look(exploring[1], self._in_force[exploring[0]]) > 1):
            return False
        return self._steps[bucket] - self._changed[bucket] >= CALM

    def begins(self) -> None:
        """A step begins, with what the table said. A look goes on only where that is decided anew."""
        self._exploring = None

    def launched(self, arm: Choice, batch: int, cached: int, behind: int) -> float:
        """A step has begun; `behind`: tokens that the drafter had missed.

        Returns:
            Seconds of the budget that are held for it: 0 unless it explores, or reads what a look at off left unread.
        """
        bucket = self._buckets.index(batch)
        in_force, before = self._in_force[bucket], self._look
        self._look = None
        self._behind = 0 if arm else behind + batch
        self._steps[bucket] += 1
        self._pulled[bucket][arm] = self._steps[bucket]
        returns = before is not None and before.arm is None and arm is not None and behind > 0
        if arm != in_force:
            steps = before.steps if before and (before.bucket, before.arm) == (bucket, arm) else 0
            self._look = _Look(bucket, arm, steps + 1)
            best = self._knowledge.rate(in_force, batch, cached)
            charge = self._lost(arm, batch, self._seconds(arm, batch, cached, behind), best)
        else:
            charge = self._reading.seconds(behind) if returns else 0.0
        self._budget.hold(charge)
        return charge

    def settled(self, pull: Pull, seconds: float | None, took: float | None) -> None:
        """A step's result has been learned from: pays for what it explored.

        Args:
            seconds: that passed since the result before.
            took: the step, with what the drafter read first. None, both: not known.
        """
        if seconds is not None:
            self._budget.earn(seconds)
        if pull.reads and took is not None:
            self._reading.observe(pull.behind, took - self._knowledge.seconds(pull.arm, pull.batch, pull.cached))
        bucket = self._buckets.index(pull.batch)
        if pull.charged and pull.arm == self._in_force[bucket]:
            self._returned(pull, seconds)
        elif pull.charged:
            self._explored(pull, took)

    def decide(self, batch: int, cached: int) -> None:
        """What the bucket of this batch size does next."""
        bucket = self._buckets.index(batch)
        rates = self._knowledge.rates(self._buckets.all[bucket].arms, batch, cached)
        best, before = _best(rates), self._in_force[bucket]
        margin = max(MARGIN, PATIENCE * self._knowledge.acceptance.doubt(before))
        if rates[best] > (1 + margin) * rates[before]:
            self._in_force[bucket] = before = best
            self._changed[bucket] = self._steps[bucket]
        self._exploring = None
        look = self._look
        if look and look.bucket == bucket and look.arm != before and look.steps < self._steps_of_look(look.arm, before):
            if self._budget.left >= 0:
                self._exploring = bucket, look.arm
        elif rival := self._rival(bucket, rates, before, batch):
            steps = self._steps_of_look(rival[0], before)
            lost = steps * self._lost(rival[0], batch, self._knowledge.seconds(rival[0], batch, cached), rates[before])
            lost += self._reading.seconds(self._behind if rival[0] else steps * batch)
            if self._budget.affords(lost):
                self._exploring = bucket, rival[0]

    def weights_changed(self) -> None:
        """Another target or drafter is in force: explores with what was laid by for that."""
        self._budget.release()
        self._new_weights = True
        self._changed = self._steps.copy()

    def _returned(self, pull: Pull, seconds: float | None) -> None:
        """From a look at off: pays for reading, at most what that was expected to take.

        More is the arm's doing, which is in force. What showed in the step before, that step was charged with. A look
        whose arm has come into force before its result did is paid for likewise.
        """
        expected = self._knowledge.seconds(pull.arm, pull.batch, pull.cached)
        lost = pull.charged if seconds is None else min(pull.charged, max(0.0, seconds - expected))
        self._budget.pay(pull.charged, lost)

    def _explored(self, pull: Pull, seconds: float | None) -> None:
        if seconds is None:
            self._budget.pay(pull.charged, pull.charged)
            return
        self._new_weights = False
        bucket = self._buckets.index(pull.batch)
        best = self._knowledge.rate(self._in_force[bucket], pull.batch, pull.cached)
        self._budget.pay(pull.charged, self._lost(pull.arm, pull.batch, seconds, best))
        if FAR * seconds < self._knowledge.seconds(pull.arm, pull.batch, pull.cached):
            # far faster than known: looked at again at once, for it takes a few in a row to be believed
            self._pulled[bucket][pull.arm] = 0

    def _steps_of_look(self, arm: Choice, in_force: Choice) -> int:
        """Of new weights it is in question what is accepted, of which one step tells, and not what a step takes."""
        if arm is None:
            return _LOOK_AT_OFF
        return _LOOK_FROM_OFF if in_force is None and not self._new_weights else 1

    def _seconds(self, arm: Choice, batch: int, cached: int, behind: int) -> float:
        """Expected of a step, with what the drafter reads first: off reads nothing."""
        return self._knowledge.seconds(arm, batch, cached) + (self._reading.seconds(behind) if arm else 0.0)

    def _lost(self, arm: Choice, batch: int, seconds: float, best: float) -> float:
        """Of a step's seconds, those in which the arm in force, which makes `best`, would not have made its tokens."""
        return max(LEAST * seconds, seconds - batch * self._knowledge.acceptance.length(arm) / best)

    def _rival(self, bucket: int, rates: dict[Choice, float], in_force: Choice, batch: int) -> tuple[Choice] | None:
        """The arm that is most worth a look; None where none is."""
        step, pulled, best = self._steps[bucket], self._pulled[bucket], rates[in_force]
        worth = {arm: rate / best + BONUS * sqrt(step - pulled[arm]) for arm, rate in rates.items() if arm != in_force}
        if not worth:
            return None
        rival = _best(worth)
        return (rival,) if worth[rival] > 1 + WORTH * (1 - 1 / batch) else None


class _Look(NamedTuple):
    """Steps in a row with an arm that is not in force; so many were launched."""

    bucket: int
    arm: Choice
    steps: int


def _best(worth: dict[Choice, float]) -> Choice:
    """The first of equals."""
    return max(worth, key=worth.__getitem__)
