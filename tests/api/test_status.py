"""The one line of the status says what a user asks first."""

import time

import pytest
from msgspec.structs import replace
from tlt_client.schemas import Arm, Drafter, DrafterVersion, Speculation, Watch

from tlt_server.api.status import SpecCounts, _one_line

ARM = Arm(3, 1, 4)
COUNTS = SpecCounts(100, 300, (90, 80, 70))
WATCH = Watch("armed", "settled", "drafter", 0.0, 50, 3.4, 3.1, 3.4, None)


def drafter(watch: Watch | None) -> Drafter:
    return Drafter(DrafterVersion(7, "/d", None, None), None, None, 7, False, watch)


def changed(**fields: object) -> Watch:
    return Watch(**{name: getattr(WATCH, name) for name in WATCH.__struct_fields__} | fields)


@pytest.mark.parametrize(
    ("state", "line"),
    [
        (None, "a target pass gave 3.40 tokens on average, over 100 passes"),
        (drafter(None), "a target pass gave 3.40 tokens on average, over 100 passes"),
        (drafter(WATCH), "a target pass gives 3.40 tokens on average, 3.10 before; drafter 7, active for 5 min"),
        (
            drafter(changed(state="watching", event="target")),
            "a target pass gives 3.40 tokens on average, 3.10 before; "
            "drafter 7, for 5 min under another target: being watched",
        ),
        (
            drafter(changed(event="start", accept_length=1.1, before=None)),
            "a target pass gives 1.10 tokens on average; "
            "drafter 7, active since the start, for 5 min: it hardly helps; train it on this target",
        ),
        (
            drafter(changed(state="off", event="off", accept_length=None)),
            "speculation has been off for 5 min: accept length 1.02; the next drafter turns it on",
        ),
        (
            drafter(changed(state="off", event="off", accept_length=None, probe_time=0.0)),
            "speculation has been off for 5 min: accept length 1.02; "
            "it is tried again in 0 s, or when target or drafter changes",
        ),
        (
            drafter(changed(state="watching", event="probe", before=None)),
            "a target pass gives 3.40 tokens on average; drafter 7, tried again since 5 min: being watched",
        ),
        (drafter(changed(accept_length=None)), "a target pass gave 3.40 tokens on average, over 100 passes"),
    ],
)
def test_the_line(state: Drafter | None, line: str) -> None:
    if state is not None and state.watch is not None:
        state = replace(state, watch=replace(state.watch, event_time=time.time() - 300))
    held = "accept length 1.02" if state and state.watch and state.watch.state == "off" else None
    assert _one_line(Speculation("pinned", held is None, held, ARM), COUNTS, state) == line


def test_without_a_drafter_or_a_rollout() -> None:
    assert (
        _one_line(Speculation("off", False, None, None), COUNTS, None)
        == "speculation is off: the server was started without a drafter"
    )
    off = _one_line(Speculation("off", False, None, ARM), COUNTS, drafter(WATCH))
    assert off == "speculation is off: it was asked for"
    on = Speculation("pinned", True, None, ARM)
    assert "no rollout" in _one_line(on, SpecCounts(0, 0, ()), drafter(changed(accept_length=None)))
