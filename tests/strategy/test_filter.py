"""The filter against the textbook's formulas, in matrices."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tlt_server.strategy.filter import Sums

VARIANCES = st.floats(1e-4, 2.0)
PARTS = st.sets(st.integers(1, 3), min_size=1).map(lambda parts: (0, *sorted(parts)))
STEPS = st.tuples(PARTS, st.floats(-2.0, 2.0), st.floats(1e-2, 50.0), VARIANCES)


@given(st.tuples(VARIANCES, VARIANCES), st.lists(STEPS, max_size=30))
def test_learning_is_kalmans(
    variance: tuple[float, float], steps: list[tuple[tuple[int, ...], float, float, float]]
) -> None:
    first = [variance[0], *[variance[1]] * 3]
    ours = Sums([0.0, 1.0, 1.0, 1.0], first, [2.0] * 4)
    mean, covariance = np.array([0.0, 1.0, 1.0, 1.0]), np.diag(first)
    for parts, error, noise, drift in steps:
        of = np.zeros(4)
        of[[*parts]] = 1
        assert np.isclose(ours.of(parts), of @ ours.mean)
        assert np.isclose(ours.variance(parts), of @ covariance @ of)
        expected = of @ covariance @ of + noise
        gain = covariance @ of / expected
        mean, covariance = mean + gain * error, covariance - np.outer(gain, of @ covariance)
        assert np.isclose(ours.learn(parts, error, noise), error**2 / expected)
        np.testing.assert_allclose(ours.mean, mean, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(ours.covariance, covariance, rtol=1e-6, atol=1e-9)
        ours.drift(drift, drift / 2)
        known = np.diag(covariance)
        more = np.minimum(known + np.array([drift, *[drift / 2] * 3]), 2.0)
        np.fill_diagonal(covariance, np.maximum(known, more))
