"""Learning numbers of which only sums are seen."""

from collections.abc import Sequence


class Sums:
    """Numbers of whose sums results tell (Kalman, 1960). The first, a level, is in all sums.

    mean, variance: of each, at first. most: variance that each drifts to. told: `mean` at some time, for `jump`.
    """

    def __init__(self, mean: Sequence[float], variance: Sequence[float], most: Sequence[float]) -> None:
        self.mean, self.told, self._most = [*mean], [*mean], most
        self.covariance = [[v if i == j else 0.0 for j in range(len(mean))] for i, v in enumerate(variance)]

    def of(self, parts: Sequence[int]) -> float:
        """The sum of these."""
        return sum([self.mean[i] for i in parts])

    def variance(self, parts: Sequence[int]) -> float:
        """Of their sum."""
        return sum(self.covariance[i][j] for i in parts for j in parts)

    def drift(self, level: float, own: float) -> None:
        """Time, or an event, adds so much variance to the level, and to each of the others."""
        for i, most in enumerate(self._most):
            known = self.covariance[i][i]
            if known < most:
                self.covariance[i][i] = min(known + (own if i else level), most)

    def jump(self, part: int, by: float, *, both: bool) -> None:
        """The sum with the level is another by so much: the part itself, or as likely the level. Beyond `told` it moves
        by half of the last jump at most: those of a noisy machine would add up.
        """
        for i in (0, part) if both else (part,):
            self.covariance[i][i] += by * by
        if both:
            surplus = self.mean[part] + by / 2 - self.told[part]
            surplus -= max(-abs(by) / 2, min(abs(by) / 2, surplus))
            self.mean[part] -= surplus
            self.mean[0] += surplus

    def learn(self, parts: Sequence[int], error: float, noise: float) -> float:
        """Their sum was off by so much, with so much variance. Returns the error squared over its mean."""
        covariance = self.covariance
        shared = [*covariance[parts[0]]]
        for part in parts[1:]:
            shared = [ours + theirs for ours, theirs in zip(shared, covariance[part], strict=True)]
        known = sum([shared[i] for i in parts])
        total = known + noise
        move = max(-2.5, min(2.5, error * known / total)) / known  # farther out, the line is not straight
        for i, row in enumerate(covariance):
            gain = shared[i] / total
            self.mean[i] += shared[i] * move
            for j, theirs in enumerate(shared):  # a comprehension takes three times as long in so small a matrix
                row[j] -= gain * theirs
        return error * error / total
