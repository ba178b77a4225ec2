"""The strategy of a scheduler process: what is asked for, what speaks against it, and what ranks agree on."""

import time
from types import SimpleNamespace as Made
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tlt_client import schemas
from tlt_client.schemas import StrategyUpdate

from tlt_server.config import Arm
from tlt_server.engine.decode.speculation import COLD, Announcer, Speculation
from tlt_server.engine.events import EventLog
from tlt_server.engine.messages import Announce, Probe, pack, unpack_ask
from tlt_server.errors import ConfigError
from tlt_server.strategy.arms import ArmTable, pinned_table

CHAIN, TREE = Arm(3, 1, 4), Arm(5, 4, 16)
CALLS = st.sampled_from([("wish", "off"), ("wish", "pinned"), ("hold", "no drafter yet"), ("release", "one came")])
LOTTERY = StrategyUpdate("paper", epsilon=1.0)


def worker() -> Any:
    captured = {CHAIN: 64, TREE: 8}
    return Made(
        all_arms=(CHAIN, TREE),
        captured=captured,
        graphs=None,
        chooses=True,
        history=None,
        costs=None,
        table=pinned_table(CHAIN, captured),
    )


@given(st.lists(CALLS))
def test_on_is_what_was_asked_for_last_unless_it_is_held(calls: list[tuple[str, str]]) -> None:
    made, events = worker(), EventLog()
    speculation = Speculation(made, 64, events)
    wished, held, turned = "bandit", False, [True]
    for name, value in calls:
        getattr(speculation, name)(StrategyUpdate(value) if name == "wish" else value)
        wished = value if name == "wish" else wished
        held = name == "hold" or (held and name != "release")
        now = wished != "off" and not held
        assert speculation.on == now
        if not now:
            assert made.table.arm(1) is None
        elif wished == "pinned":
            assert [made.table.arm(batch) for batch in (1, 64, 65)] == [CHAIN, CHAIN, None]
        turned += [now] if now != turned[-1] else []
    told = ["speculation_on" if now else "speculation_off" for now in turned[1:]]
    assert [event.kind for event in events.after(0)] == told[-1000:]


@pytest.mark.parametrize("mode", ["bandit", "pinned"])
def test_history_drafts_on_while_the_drafter_is_held(mode: str) -> None:
    """From the next announcement on, or at once where ranks need none."""
    made, remembered = worker(), Arm.history(7)
    made.all_arms, made.captured = (CHAIN, remembered), {CHAIN: 64, remembered: 64}
    made.history = Made(foreseen=lambda: [1.9, 2.8, 3.6, 4.4, 5.2, 6.0, 6.8])
    speculation = Speculation(made, 64, EventLog())
    speculation.wish(StrategyUpdate(mode, pinned=schemas.Arm(7, 1, 8, "history")))
    speculation.hold("the drafter has learnt nothing yet")
    assert made.table.arm(1) in (None, remembered)
    for _ in range(60):
        if (table := speculation.announcement()) is not None:
            speculation.hear(table)
        arm = made.table.arm(8)
        assert arm != CHAIN
        speculation.launched(arm, 8, 100)
        speculation.settled(8, [5] * 8 if arm else [0] * 8)
    assert made.table.arm(8) == remembered
    assert not speculation.on
    speculation.release("one came")
    assert speculation.on


def test_without_a_drafter_it_is_off() -> None:
    described = Speculation(None, 64, EventLog()).describe()
    assert described == schemas.Speculation("off", False, None, None)


def test_settings_that_cannot_be_change_nothing() -> None:
    speculation = Speculation(worker(), 64, EventLog())
    before = speculation.describe()
    beyond = (schemas.SelectionBucket(1, (schemas.Arm(5, 4, 16),)),)
    with pytest.raises(ConfigError, match=r"epsilon 2\.0.*captured for batches up to 8"):
        speculation.wish(StrategyUpdate("paper", epsilon=2.0, buckets=beyond))
    assert speculation.describe() == before


RANK_CALLS = st.sampled_from(["launch", "lottery", "pinned", "off", "hold", "release"])


@given(st.lists(RANK_CALLS, max_size=60))
def test_ranks_decode_by_one_table(calls: list[str]) -> None:
    """Rank 0 alone draws; whatever is asked for and whatever it announces reaches both between the same two steps."""
    ranks = [Speculation(worker(), 64, EventLog(), leads=rank == 0) for rank in range(2)]
    for call in calls:
        announced = ranks[0].announcement()
        assert ranks[1].announcement() is None
        for rank in ranks:
            if call in ("hold", "release"):
                getattr(rank, call)("so it was")
            elif call != "launch":
                rank.wish(LOTTERY if call == "lottery" else StrategyUpdate(call))
            if announced is not None:  # SGLang handles what rank 0 appended after what it had received
                rank.hear(announced)
        tables = [rank._worker.table for rank in ranks]
        assert tables[0] == tables[1]
        for rank in ranks:
            rank.launched(tables[0].arm(4), 4, 100)


def test_what_was_decided_is_appended_once() -> None:
    made = worker()
    speculation = Speculation(made, 64, EventLog())
    due = ["the target is now version 3"]
    state = Made(speculation=speculation, probe_due=lambda: due.pop() if due else None)
    announcer = Announcer(Made(input_blocker=None, weight_updater=Made(state=state)))
    speculation.wish(LOTTERY)
    made.table = ArmTable((1,), (None,))
    assert announcer.handle(None) is None, "a rank that receives nothing"
    assert unpack_ask(pack(Probe("x"))) == Probe("x")
    table = speculation.announcement()
    assert table is not None
    ask = unpack_ask(pack(Announce(table)))
    assert isinstance(ask, Announce)
    speculation.hear(ask.table)
    assert speculation.announcement() is None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(table), type=ArmTable) == made.table


def selecting_us(speculation: Speculation) -> float | None:
    selection = speculation.describe().selection
    assert selection is not None
    return selection.selecting_us


def slow(speculation: Speculation, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """From now on a call of the selector's takes 20 ms more."""
    quick = getattr(speculation._selector, call)

    def slowly(*arguments: object) -> object:
        time.sleep(0.02)
        return quick(*arguments)

    monkeypatch.setattr(speculation._selector, call, slowly)


def step(speculation: Speculation) -> None:
    speculation.announcement()
    speculation.launched(CHAIN, 4, 100)
    speculation.settled(4, [3, 0, 1, 2])


def warm() -> Speculation:
    """One that has its first steps behind it."""
    speculation = Speculation(worker(), 64, EventLog())
    for _ in range(COLD):
        step(speculation)
    return speculation


def test_the_first_steps_teach_nothing() -> None:
    """Results come a step late, as under overlap; a learned state that is put in meanwhile is what is gone on from."""
    speculation = Speculation(worker(), 64, EventLog())
    before = speculation.learned()
    for number in range(COLD + 1):
        speculation.launched(CHAIN, 1, 10)
        if number:
            speculation.settled(1, [0])
    assert speculation.learned() == before
    speculation.settled(1, [0])
    speculation.launched(CHAIN, 1, 10)
    speculation.settled(1, [0])
    assert speculation.learned() != before


@pytest.mark.parametrize("call", ["table", "launched", "settled"])
def test_what_choosing_takes_is_counted_by_step(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Of steps with the settings in force."""
    speculation = warm()
    assert selecting_us(speculation) is None
    slow(speculation, monkeypatch, call)
    for _ in range(3):
        step(speculation)
    assert selecting_us(speculation) == pytest.approx(20e3, rel=0.5)
    speculation.wish(LOTTERY)
    assert selecting_us(speculation) is None


def test_a_scheduler_that_waits_for_requests_does_not_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at the table all the time."""
    speculation = warm()
    slow(speculation, monkeypatch, "table")
    for _ in range(10):
        speculation.announcement()
    step(speculation)
    assert selecting_us(speculation) == pytest.approx(20e3, rel=0.5)


def test_what_is_learned_before_a_prefill_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    speculation = warm()
    slow(speculation, monkeypatch, "interrupted")
    speculation.launched(CHAIN, 4, 100)
    speculation.interrupted()
    speculation.settled(4, [3, 0, 1, 2])
    assert selecting_us(speculation) == pytest.approx(20e3, rel=0.5)
