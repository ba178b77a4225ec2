"""Settings are judged as a whole, and taken as a whole."""

from typing import Any

import msgspec
import pytest
from tlt_client import schemas

from tests.strategy.kit import CAPTURED, DEEP, LARGEST, SHALLOW, TREE, selector
from tlt_server.errors import ConfigError
from tlt_server.strategy.estimates import Learned
from tlt_server.strategy.settings import faults, to_client

GOOD = schemas.StrategyUpdate(
    mode="paper",
    buckets=(
        schemas.SelectionBucket(1, (to_client(TREE), to_client(DEEP))),
        schemas.SelectionBucket(9, (to_client(SHALLOW), None)),
        schemas.SelectionBucket(65, (None,)),
    ),
)


def test_good_settings_have_no_fault() -> None:
    assert faults(GOOD, CAPTURED, LARGEST) == []
    assert faults(schemas.StrategyUpdate("bandit"), CAPTURED, LARGEST) == []
    assert faults(schemas.StrategyUpdate(mode="pinned", pinned=to_client(TREE)), CAPTURED, LARGEST) == []


def test_every_fault_is_named() -> None:
    bad = schemas.StrategyUpdate(
        mode="pinned",
        epsilon=2.0,
        window=0,
        exploration=-1.0,
        buckets=(
            schemas.SelectionBucket(2, (to_client(TREE), None, None)),
            schemas.SelectionBucket(20, (schemas.Arm(3, 1, 9),)),
            schemas.SelectionBucket(20, (schemas.Arm(9, 1, 10),)),
            schemas.SelectionBucket(500, ()),
        ),
    )
    found = faults(bad, CAPTURED, LARGEST)
    for fault in (
        "epsilon 2.0",
        "window 0",
        "exploration -1.0",
        "mode pinned needs an arm",
        "must begin at batch size 1",
        "bucket from 2: names an arm twice",
        "arm (3,2,6) was captured for batches up to 8, not 19",
        "a chain verifies num_steps + 1 = 4 tokens",
        "bucket from 20: must begin above",
        "arm (9,1,10) was not captured",
        "bucket from 500: this server runs batches up to 128",
        "bucket from 500: needs an arm",
    ):
        assert sum(fault in each for each in found) == 1, fault
    assert len(found) == 12


def test_a_mode_that_there_is_not() -> None:
    assert faults(schemas.StrategyUpdate(mode="best"), CAPTURED, LARGEST) == [
        "mode 'best': one of bandit, paper, pinned, off"
    ]


def test_what_has_a_fault_changes_nothing() -> None:
    chosen = selector()
    chosen.configure(GOOD)
    before = chosen.report()
    with pytest.raises(ConfigError, match=r"epsilon 2.0.*; pinned"):
        chosen.configure(schemas.StrategyUpdate(mode="pinned", epsilon=2.0))
    assert chosen.report() == before


def test_an_arm_is_pinned_as_far_as_it_was_captured() -> None:
    chosen = selector()
    chosen.configure(schemas.StrategyUpdate(mode="pinned", pinned=to_client(TREE)))
    assert [chosen.table().arm(batch) for batch in (1, 8, 9, 128)] == [TREE, TREE, None, None]
    chosen.configure(schemas.StrategyUpdate(mode="off"))
    assert chosen.table().arm(1) is None


def test_settings_cross_the_wire() -> None:
    body = msgspec.json.encode(GOOD)
    assert msgspec.json.decode(body, type=schemas.StrategyUpdate) == GOOD
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(b'{"modes": "off"}', type=schemas.StrategyUpdate)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("level", [0.0]),
        ("level", [0.0, 1e9]),
        ("depths", [0.0]),
        ("depths", [0.0, 0.0, 0.0, 1e9]),
        ("arms", [[None, 0.0]]),
        ("arms", [[None, 0.0, -1e3]]),
        ("arms", [[[3, 1, 9], 0.0, 1.0]]),
        ("reading", [1.0]),
        ("reading", [-1.0, 1.0, 1.0]),
        ("reading", [1.0, -1.0, 1.0]),
    ],
)
def test_what_cannot_have_been_learned_is_refused(field: str, value: Any) -> None:
    good = {"level": [0.5, 0.1], "depths": [0.0] * 4, "arms": [[[3, 1, 4], 0.8, 0.0], [None, 0.0, 0.1]]}
    good["reading"] = [1.0, 5.0, 0.01]
    msgspec.convert(good, Learned)
    with pytest.raises((msgspec.ValidationError, ConfigError)):
        msgspec.convert(good | {field: value}, Learned)


def test_what_an_older_server_learned_is_refused() -> None:
    old = {"level": [0.5, 0.1], "arms": [[[3, 1, 4], 0.8, 0.0], [None, 0.0, 0.1]], "reading": [5.0, 0.01]}
    with pytest.raises(msgspec.ValidationError, match=r"depths|reading"):
        msgspec.convert(old, Learned)
