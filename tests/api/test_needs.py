"""What a request may need of the target, held against what is in force."""

import pytest
from tlt_client.schemas import TargetVersion
from tlt_client.wire import TARGET_VERSION, WEIGHT_VERSION

from tlt_server.api.rollouts.needs import conflict

IN_FORCE = TargetVersion(6, "step 6", partial=False)


@pytest.mark.parametrize(
    ("needs", "why"),
    [
        ({WEIGHT_VERSION: "step 6"}, None),
        ({TARGET_VERSION: "6"}, None),
        ({TARGET_VERSION: "06", WEIGHT_VERSION: "step 6"}, None),
        ({WEIGHT_VERSION: "step 7"}, "weight_version 'step 7' is not active: 'step 6' is, target_version 6"),
        ({TARGET_VERSION: "5"}, "target_version 5 is not active: 'step 6' is, target_version 6"),
        ({TARGET_VERSION: "6", WEIGHT_VERSION: "step 7"}, "weight_version 'step 7' is not active"),
    ],
)
def test_what_is_in_force_is_what_is_needed(needs: dict[str, str], why: str | None) -> None:
    found = conflict(needs, [IN_FORCE])
    assert found == why or (found and why and found.startswith(why))


def test_no_version_is_in_force_while_it_is_published() -> None:
    for needs in ({WEIGHT_VERSION: "step 6"}, {TARGET_VERSION: "6"}, {TARGET_VERSION: "7"}):
        assert "a publication is under way" in str(conflict(needs, [TargetVersion(6, "step 6", partial=True)]))


def test_an_incomplete_target_is_none_that_has_a_name() -> None:
    lacks = TargetVersion(6, "step 6", partial=False, missing=("lm_head.weight",))
    for needs in ({WEIGHT_VERSION: "step 6"}, {TARGET_VERSION: "6"}):
        assert "lacks lm_head.weight" in str(conflict(needs, [IN_FORCE, lacks]))


def test_every_replica_must_have_it() -> None:
    behind = TargetVersion(5, "step 5", partial=False)
    assert conflict({TARGET_VERSION: "6"}, [IN_FORCE, IN_FORCE]) is None
    assert "'step 5' is" in str(conflict({TARGET_VERSION: "6"}, [IN_FORCE, behind]))
