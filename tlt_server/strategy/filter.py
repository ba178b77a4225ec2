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
        shared = [sum(row[part] for part in parts) for row in self.covariance]
        total = noise + sum(shared[part] for part in parts)
        for i, ours in enumerate(shared):
            gain = ours / total
            self.mean[i] += gain * error
            row = self.covariance[i]
            self.covariance[i] = [known - gain * theirs for known, theirs in zip(row, shared, strict=True)]
        return error * error / total

    def drift(self, variance: Sequence[float]) -> None:
        """Time, or an event, makes the parts less certain."""
        for i, (more, most) in enumerate(zip(variance, self.most, strict=True)):
            known = self.covariance[i][i]
            self.covariance[i][i] = max(known, min(known + more, most))
