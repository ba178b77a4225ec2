"""What `tlt-server top` shows at one time, for rich to draw. Names come from clients: they are text, never markup, and
no control character of theirs reaches the terminal."""

import time
from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from tlt_client.schemas import (
    Arm,
    ArmReport,
    BucketReport,
    Event,
    Fleet,
    FleetEvent,
    FleetMember,
    History,
    Selection,
    Speculation,
    Status,
)

from tlt_server.watch.rates import Rates
from tlt_server.watch.reads import Seen

NONE = "-"
EVENTS = 8
BARS = "▁▂▃▄▅▆▇█"
STATES = {"ready": "green", "joining": "yellow", "stale": "yellow", "suspect": "red", "quarantined": "red"}


def plain(said: object) -> str:
    """Without control characters, and on one line."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in str(said))


def of_server(seen: Seen, rates: Rates, history: Sequence[Rates]) -> RenderableType:
    """A single server. history: rates of the last reads, the newest last."""
    status, speculation, recent = seen
    parts: list[RenderableType] = [Text(plain(status.help)), *_alerts(held(status, speculation))]
    parts += [Text(), _figures(_of(status, speculation, rates)), _sparks(history)]
    if speculation.selection is not None:
        parts += [Text(), _rewards(speculation.selection, status.load.running if status.load else None)]
    return Group(*parts, Text(), _events([_told(event) for event in recent[-EVENTS:]]))


def of_fleet(fleet: Fleet, statuses: Mapping[str, Status | None], rates: Mapping[str, Rates]) -> RenderableType:
    """All replicas. statuses: None of one that does not answer."""
    sums = Rates.summed(rates.values())
    loads = [status.load for status in statuses.values() if status is not None and status.load is not None]
    figures = {
        "ready": f"{_ready(fleet)} of {len(fleet.replicas)}, at least {fleet.min_ready}",
        "weights": NONE if fleet.weight_version is None else plain(fleet.weight_version),
        "accept length": _length(sums.accept_length),
        "tokens/s": _rate(sums.tokens_per_s),
        "running": _count(sum(replica.running for replica in fleet.replicas)),
        "waiting": _count(sum(load.waiting for load in loads)),
    }
    histories = [status.history for status in statuses.values() if status is not None and status.history is not None]
    figures |= _of_history(histories, sums)
    table = Table("replica", "state", "weights", box=box.SIMPLE_HEAD)
    for name in ("running", "tokens/s", "accept length", "since"):
        table.add_column(name, justify="right")
    for replica in fleet.replicas:
        table.add_row(*_row(replica, rates[replica.name]))
    events = [_told_by_front(event) for event in fleet.events[-EVENTS:]]
    return Group(*_alerts(_held(fleet)), _figures(figures), table, _events(events))


def held(status: Status, speculation: Speculation) -> Iterator[str]:
    """Why a server does not do all that it could."""
    target = status.versions.target if status.versions else None
    drafter = status.versions.drafter if status.versions else None
    if status.paused:
        yield "generation is paused: requests wait until it is continued"
    if status.offloaded:
        yield f"memory is given to the trainer: {', '.join(status.offloaded)}"
    if target and target.partial:
        yield "a publication of the target is under way"
    if target and target.missing:
        yield f"the last publication lacked tensors: {', '.join(target.missing)}"
    if speculation.held:
        yield f"speculation is held: {speculation.held}"
    if drafter and drafter.frozen:
        yield "drafter updates are held back"
    if drafter and drafter.watch and drafter.watch.state == "worse":
        yield "the drafter is plainly worse than the one before"
    if status.trainer and not status.trainer.connected:
        yield f"the drafter trainer at {status.trainer.address} does not answer"


def _ready(fleet: Fleet) -> int:
    return sum(replica.state == "ready" for replica in fleet.replicas)


def _held(fleet: Fleet) -> Iterator[str]:
    if fleet.paused:
        yield "requests wait for the trainer: it has paused, or publishes"
    if (call := fleet.transaction) is not None:
        yield f"a control call is under way: {call.call}, {call.phase}, waiting for {', '.join(call.waiting_for)}"
    if fleet.held:
        yield f"{fleet.held} requests wait"
    if _ready(fleet) < fleet.min_ready:
        yield f"{_ready(fleet)} ready, of at least {fleet.min_ready}: requests wait"


def _alerts(lines: Iterator[str]) -> list[RenderableType]:
    return [Text(f"! {plain(line)}", style="yellow") for line in lines]


def _of(status: Status, speculation: Speculation, rates: Rates) -> dict[str, str]:
    versions, load = status.versions, status.load
    figures = {
        "accept length": _length(rates.accept_length),
        "tokens/s": _rate(rates.tokens_per_s),
        "running": _count(load.running if load else None),
        "waiting": _count(load.waiting if load else None),
        "arm": _active(speculation, load.running) if load else _arm(status.arm),
        "target": f'{versions.target.version} "{plain(versions.target.weight_version)}"' if versions else NONE,
    }
    figures |= {"drafter": str(versions.drafter.live.version) if versions and versions.drafter else "none"}
    return figures | _of_history([status.history] if status.history else [], rates)


def _of_history(histories: Sequence[History], rates: Rates) -> dict[str, str]:
    """Of all that keep one: tokens a pass now, which share of requests found something since the start, tokens kept."""
    if not histories:
        return {}
    lookups, found, tokens, capacity = (
        sum(values) for values in zip(*((h.lookups, h.found, h.tokens, h.capacity) for h in histories), strict=True)
    )
    share = f"{100 * found / lookups:.0f} % found" if lookups else "not asked yet"
    return {"of history": _length(rates.history_length), "history": f"{share}, {tokens:,} of {capacity:,} tokens"}


def _active(speculation: Speculation, running: int) -> str:
    buckets = speculation.selection.buckets if speculation.selection else ()
    bucket = next((each for each in buckets if each.first <= running <= each.last), None)
    return _arm(bucket.active if bucket else speculation.arm if speculation.on else None)


def _figures(figures: Mapping[str, str]) -> Table:
    table = Table(*figures, box=None, header_style="dim", pad_edge=False, padding=(0, 3, 0, 0))
    table.add_row(*(Text(value, style="bold") for value in figures.values()))
    return table


def _sparks(history: Sequence[Rates]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 3, 0, 0))
    for name, values in {
        "accept length": [rates.accept_length for rates in history],
        "tokens/s": [rates.tokens_per_s for rates in history],
    }.items():
        table.add_row(Text(name, style="dim"), Text(sparkline(values), style="blue"))
    return table


def sparkline(values: Sequence[float | None]) -> str:
    """A bar a value, from zero to the largest; a blank where there is none."""
    most = max((value for value in values if value is not None), default=0) or 1
    last = len(BARS) - 1
    return "".join(" " if value is None else BARS[round(last * max(value, 0) / most)] for value in values)


def _rewards(selection: Selection, running: int | None) -> Table:
    arms = {_arm(report.arm): report.arm for bucket in selection.buckets for report in bucket.arms}
    names = sorted(arms, key=lambda name: _size(arms[name]))
    table = Table("batch", box=box.SIMPLE_HEAD, title="tokens/s by batch size and arm", title_justify="left")
    for name in names:
        table.add_column(name, justify="right")
    for bucket in selection.buckets:
        now = running is not None and bucket.first <= running <= bucket.last
        size = str(bucket.first) if bucket.first == bucket.last else f"{bucket.first}-{bucket.last}"
        reports = {_arm(report.arm): report for report in bucket.arms}
        table.add_row(
            f"{'▸' if now else ' '} {size}", *(_cell(reports.get(name), bucket, selection.mode) for name in names)
        )
        if now:
            table.columns[0].footer = "tokens a pass"
            for column, name in zip(table.columns[1:], names, strict=True):
                column.footer = _length(reports[name].accept_length) if name in reports else NONE
                table.show_footer = True
    return table


def _cell(report: ArmReport | None, bucket: BucketReport, mode: str) -> Text:
    """The reward that the mode chooses by."""
    if report is None:
        return Text(NONE, style="dim")
    reward = report.median_reward if mode == "paper" else report.expected_reward
    style = "dim" if not report.pulls else ""
    return Text(f"[{_rate(reward)}]", style="bold") if report.arm == bucket.active else Text(_rate(reward), style)


def _row(replica: FleetMember, rates: Rates) -> list[Text]:
    state = plain(f"{replica.state}: {replica.why}" if replica.why else replica.state)
    since = _spoken(time.time() - replica.since)
    weights = NONE if replica.weight_version is None else plain(replica.weight_version)
    figures = [_count(replica.running), _rate(rates.tokens_per_s), _length(rates.accept_length), since]
    style = STATES.get(replica.state, "dim")
    return [Text(plain(replica.name)), Text(state, style), *map(Text, [weights, *figures])]


def _events(told: Sequence[tuple[float, str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for when, kind, detail in reversed(told):
        clock = time.strftime("%H:%M:%S", time.localtime(when))
        table.add_row(Text(clock, style="dim"), Text(plain(kind)), Text(detail, no_wrap=True, overflow="ellipsis"))
    return table


def _told(event: Event) -> tuple[float, str, str]:
    return event.time, event.kind, _listed(event.detail)


def _told_by_front(event: FleetEvent) -> tuple[float, str, str]:
    return event.time, event.kind, plain(": ".join(filter(None, (event.replica, event.detail))))


def _listed(told: Mapping[str, object]) -> str:
    values = ((name, f"{value:.3g}" if isinstance(value, float) else value) for name, value in told.items())
    return plain(", ".join(f"{name} {value}" for name, value in values if value is not None))


def _size(arm: Arm | None) -> tuple[int, int]:
    return (arm.num_steps, arm.num_draft_tokens) if arm else (0, 0)


def _arm(arm: Arm | None) -> str:
    return str(arm) if arm else "off"


def _count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


def _length(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def _rate(value: float | None) -> str:
    return NONE if value is None else f"{value:.1f}" if 0 < value < 10 else f"{value:,.0f}"


def _spoken(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
