"""Sums of parts that drift, from noisy observations of some of the sums: a Kalman (1960) filter, in a dozen lines."""

from collections.abc import Sequence


class Filter:
    """What is known of each part.

    mean: of each part.
    covariance: of each two; at the start they are independent.
    most: the variance that no part exceeds by drifting.
    """

    def __init__(self, mean: Sequence[float], variance: Sequence[float], most: Sequence[float]) -> None:
        self.mean = list(mean)
        self.covariance = [[v if i == j else 0.0 for j in range(len(mean))] for i, v in enumerate(variance)]
        self.most = most

    def learn(self, parts: Sequence[int], error: float, noise: float) -> float:
        """One observation of the sum of these parts.

        Args:
            parts: their indices.
            error: what it lies above the sum of their means.
            noise: the variance of what it is off by, for reasons of its own.

        Returns:
            The error squared, over its expectation.
        """
        first, *others = parts
        shared = self.covariance[first].copy()
        for part in others:
            for i, theirs in enumerate(self.covariance[part]):
                shared[i] += theirs
        total = noise + sum([shared[part] for part in parts])
        for i, (ours, row) in enumerate(zip(shared, self.covariance, strict=True)):
            gain = ours / total
            self.mean[i] += gain * error
            for j, theirs in enumerate(shared):  # a comprehension takes three times as long in so small a matrix
                row[j] -= gain * theirs
        return error * error / total

    def drift(self, first: float, others: float) -> None:
        """Time, or an event, makes the parts less certain: by so much variance the first, and each of the others."""
        more = first
        for i, most in enumerate(self.most):
            known = self.covariance[i][i]
            if known < most:
                self.covariance[i][i] = min(known + more, most)
            more = others
