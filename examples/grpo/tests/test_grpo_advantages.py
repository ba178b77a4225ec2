"""Advantages against the formula, and the laws that it implies."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_grpo.learning.advantages import group_advantages

Rewards = st.integers(2, 8).flatmap(
    lambda group: st.tuples(
        st.just(group),
        st.integers(1, 5).flatmap(
            lambda groups: st.lists(st.floats(-5, 5), min_size=group * groups, max_size=group * groups)
        ),
    )
)


@given(Rewards)
def test_a_group_is_compared_with_itself(case: tuple[int, list[float]]) -> None:
    group, rewards = case
    rows = np.array(rewards).reshape(-1, group)
    from_mean = rows - rows.mean(1, keepdims=True)
    divided = from_mean / (rows.std(1, keepdims=True) + 1e-6)
    assert group_advantages(rewards, group, "none") == pytest.approx(from_mean.ravel().tolist(), abs=1e-9)
    assert group_advantages(rewards, group, "std") == pytest.approx(divided.ravel().tolist(), abs=1e-6)


@given(st.floats(-5, 5), st.integers(2, 8))
def test_equal_rewards_tell_nothing(reward: float, group: int) -> None:
    assert group_advantages([reward] * group, group, "std") == [0.0] * group


def test_one_right_answer_of_four() -> None:
    assert group_advantages([1, 0, 0, 0], 4, "std") == pytest.approx([3**0.5, *[-(3**-0.5)] * 3], abs=1e-5)
    assert group_advantages([1, 0, 0, 0], 4, "none") == [0.75, -0.25, -0.25, -0.25]
