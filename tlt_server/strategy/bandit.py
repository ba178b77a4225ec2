"""Mode `bandit`: BEG-MAB, with what the paper leaves open decided for a server that pays for every experiment.

The active arm of a bucket is the one of the highest expected reward; another takes over where it is expected to be
better by a margin. Exploration steps go to the arm of the highest expected reward plus a bonus that grows with the
steps since it was pulled (an upper confidence bound), where a budget affords them: a share of decoding time, of which
an exploration step is charged what it loses, its seconds less those in which the active arm would have made as many
tokens. So near rivals are tried often, hopeless arms seldom, and each some time, for any may become the best.
"""

from math import sqrt

from tlt_server.strategy.arms import ArmTable, Buckets, Choice
from tlt_server.strategy.estimates import FAR, Estimates
from tlt_server.strategy.pulls import Pull

MARGIN = 0.02
"""How much better a rival must be: two well known arms scatter by about so much."""
BONUS, WORTH = 0.04, 0.2
"""Share of the best reward for the root of one step; and what must be gained to explore, for many requests. One request
gets all that the budget affords: one verify scatters by half its mean."""
LEAST = 0.1
"""Of an exploration step's time, charged however good the arm: what bounds how often it is done."""
SAVED_S, RESERVED_S, LAID_BY = 10.0, 3.0, 0.15
"""Decoding whose share may be saved up; and laid by, of so much of what is earned, for when other weights come."""
EVERY = 4
"""Results of a bucket between two decisions: none of them matters alone."""


class Bandit:
    """Decides on rank 0. share: of decoding time that exploration may lose, 0 to 1.

    table: what each bucket does next. spent: seconds that exploration lost.
    """

    def __init__(self, buckets: Buckets, estimates: Estimates, share: float) -> None:
        self._buckets, self._estimates, self._share = buckets, estimates, share
        self.spent = self._left = self._same_weights_s = 0.0
        self._step = self._due = 0
        self._new_weights = True  # since the last exploration
        self._pulled: dict[Choice, int] = {}  # the newest step of each arm
        self._unread = False  # whether the newest step was an exploration of off, after which the drafter reads
        self._bucket = -1  # of the newest decision
        self._looks: list[Choice] = []  # exploration steps that are to come there
        sizes = zip(buckets.all, buckets.lasts, strict=True)
        self._active = [_best({arm: estimates.rate(arm, last, 0) for arm in each.arms}) for each, last in sizes]
        self._show()

    def launched(self, arm: Choice, batch: int, cached: int, behind: int) -> float:
        """A step begins. Returns seconds of the budget that are held for it, 0 where it explores nothing."""
        bucket = self._buckets.index(batch)
        active, unread = self._active[bucket], self._unread
        self._step += 1
        self._pulled[arm] = self._step
        if self._looks:
            self._looks = self._looks[1:] if (bucket, arm) == (self._bucket, self._looks[0]) else []
            self._show()
        self._unread = arm is None and active is not None
        if arm == active and not (arm and unread):
            return 0.0
        reading = self._estimates.reading(behind) if arm else 0.0
        charge = self._lost(arm, batch, cached, self._estimates.seconds(arm, batch, cached) + reading)
        self._left -= charge
        return charge

    def settled(self, pull: Pull, seconds: float | None, took: float | None, late: bool) -> None:
        """A step's result has been learned from, and its bucket may do something else next.

        Args:
            seconds: since the result before. took: the step, with what the drafter read first. None: not known.
            late: its time was the launch of the next one.
        """
        if seconds is not None:
            self._same_weights_s += seconds
            self._left = min(self._left + self._share * seconds, self._share * SAVED_S)
        if pull.charged:
            lost = pull.charged if took is None else self._lost(pull.arm, pull.batch, pull.cached, took)
            if pull.arm == self._active[self._buckets.index(pull.batch)]:
                lost = min(lost, pull.charged)  # what was read alone
            else:
                self._new_weights = False
            self._left += pull.charged - lost
            self.spent += lost
            if took is not None and took < self._estimates.seconds(pull.arm, pull.batch, pull.cached) / FAR:
                self._pulled[pull.arm] = 0  # explored again at once: it takes two to be believed
        bucket = self._buckets.index(pull.batch)
        if bucket != self._bucket or self._step >= self._due:
            self._bucket, self._due, self._looks = bucket, self._step + EVERY, []
            self._decide(pull.batch, pull.cached, late)
            self._show()

    def weights_changed(self) -> None:
        """Another target or drafter: explores with what was laid by for that."""
        self._same_weights_s, self._new_weights = 0.0, True

    def _decide(self, batch: int, cached: int, late: bool) -> None:
        arms, active = self._buckets.all[self._bucket].arms, self._active[self._bucket]
        if len(arms) == 1:
            return
        rates = {arm: self._estimates.rate(arm, batch, cached) for arm in arms}
        best = _best(rates)
        if rates[best] > (1 + MARGIN) * rates[active]:
            self._active[self._bucket] = active = best
        worth = {
            arm: rate / rates[active] + self._bonus(arm)
            for arm, rate in rates.items()
            if arm != active and (arm is None or self._estimates.length(arm) > 1)  # history may know of nothing to try
        }
        if not worth:
            return
        arm = _best(worth)
        if worth[arm] > 1 + WORTH * (1 - 1 / batch):
            # beside off a step begins with reading, or the next one does, and a late one takes what the launch of the
            # next one takes: of two, one tells what it takes. Of new weights it is in question what is accepted, of
            # which one tells
            steps = 2 if arm is None or late or (active is None and not self._new_weights) else 1
            lost = steps * self._lost(arm, batch, cached, self._estimates.seconds(arm, batch, cached))
            laid_by = self._share * min(LAID_BY * self._same_weights_s, RESERVED_S)
            if arm is None:
                lost += self._estimates.reading(batch * steps)
            # what is saved up is enough for any arm, or one that was thought very slow once would never be tried again
            lost = min(lost, self._share * SAVED_S - laid_by)
            if self._left - laid_by >= lost > 0:
                self._looks = [arm] * steps

    def _bonus(self, arm: Choice) -> float:
        """What history gives is foreseen, whether it drafts or not: once pulled, it has told what a step takes."""
        pulled = self._pulled.get(arm, 0)
        return 0.0 if pulled and arm and arm.of_history else BONUS * sqrt(self._step - pulled)

    def _lost(self, arm: Choice, batch: int, cached: int, seconds: float) -> float:
        """Of a step's seconds, those in which the active arm would not have made its tokens."""
        active = self._active[self._buckets.index(batch)]
        made = batch * self._estimates.length(arm) / self._estimates.rate(active, batch, cached)
        return max(0.0 if arm == active else LEAST * seconds, seconds - made)

    def _show(self) -> None:
        arms = self._active.copy()
        if self._looks:
            arms[self._bucket] = self._looks[0]
        self.table = ArmTable(self._buckets.firsts, tuple(arms))


def _best(worth: dict[Choice, float]) -> Choice:
    """The first of equals."""
    return max(worth, key=worth.__getitem__)
