"""The filter against the textbook's formulas, in matrices."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tlt_server.config import Arm
from tlt_server.strategy.estimates import Sums

VARIANCES = st.floats(1e-4, 2.0)
STEPS = st.tuples(st.integers(1, 3), st.floats(-2.0, 2.0), st.floats(1e-2, 50.0), VARIANCES)


@given(st.tuples(VARIANCES, VARIANCES), st.lists(STEPS, max_size=30))
def test_learning_is_kalmans(variance: tuple[float, float], steps: list[tuple[int, float, float, float]]) -> None:
    arms = [Arm(each, 1, each + 1) for each in (1, 2, 3)]
    ours = Sums(dict.fromkeys(arms, 1.0), variance, (2.0, 2.0))
    mean, covariance = np.array([0.0, 1.0, 1.0, 1.0]), np.diag([variance[0], *[variance[1]] * 3])
    for part, error, noise, drift in steps:
        of = np.zeros(4)
        of[[0, part]] = 1
        expected = of @ covariance @ of + noise
        gain = covariance @ of / expected
        mean, covariance = mean + gain * error, covariance - np.outer(gain, of @ covariance)
        assert np.isclose(ours.learn(arms[part - 1], error, noise), error**2 / expected)
        np.testing.assert_allclose(ours.mean, mean, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(ours.covariance, covariance, rtol=1e-6, atol=1e-9)
        ours.drift(drift, drift / 2)
        known = np.diag(covariance)
        more = np.minimum(known + np.array([drift, *[drift / 2] * 3]), 2.0)
        np.fill_diagonal(covariance, np.maximum(known, more))
