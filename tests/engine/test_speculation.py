"""The switch of speculation: what is asked for, and what speaks against it."""

from types import SimpleNamespace as Made

from hypothesis import given
from hypothesis import strategies as st
from tlt_client.schemas import Arm

from tlt_server.engine.events import EventLog
from tlt_server.engine.speculation import Speculation

CALLS = st.sampled_from([("wish", "off"), ("wish", "pinned"), ("hold", "no drafter yet"), ("release", "one came")])


@given(st.lists(CALLS))
def test_on_is_what_was_asked_for_last_unless_it_is_held(calls: list[tuple[str, str]]) -> None:
    worker, events = Made(speculating=True), EventLog()
    speculation = Speculation(worker, Arm(3, 1, 4), events)
    wished, held, turned = "pinned", False, [True]
    for name, value in calls:
        getattr(speculation, name)(value)
        wished = value if name == "wish" else wished
        held = name == "hold" or (held and name != "release")
        now = wished != "off" and not held
        assert worker.speculating == speculation.on == now
        turned += [now] if now != turned[-1] else []
    told = ["speculation_on" if now else "speculation_off" for now in turned[1:]]
    assert [event.kind for event in events.after(0)] == told[-1000:]


def test_without_a_drafter_it_is_off() -> None:
    described = Speculation(None, None, EventLog()).describe()
    assert (described.mode, described.on, described.held, described.arm) == ("off", False, None, None)
