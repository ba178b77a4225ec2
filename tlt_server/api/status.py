"""What `GET /tlt/v1/status` says, from the server's settings and its metrics."""

import time
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

from tlt_client.schemas import (
    AcceptLength,
    Counters,
    Drafter,
    Load,
    Models,
    Speculation,
    Status,
    Watch,
)

from tlt_server import __version__
from tlt_server.engine.messages import Answer
from tlt_server.metrics import ACCEPTED_PER_POSITION, DRAFT_TOKENS, DRAFTS

if TYPE_CHECKING:  # prometheus_client settles on one process or many when it is imported: not before SGLang has chosen
    from prometheus_client.core import Metric

_started = time.monotonic()


class SpecCounts(NamedTuple):
    """What speculation has done since the server started. accepted_per_position[k] counts the verify passes whose draft
    was accepted beyond depth k."""

    drafts: int
    draft_tokens: int
    accepted_per_position: tuple[int, ...]

    @property
    def accepted_tokens(self) -> int:
        return sum(self.accepted_per_position)

    @property
    def accept_length(self) -> float | None:
        """Mean tokens of a verify pass, the bonus token included; None before the first pass."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None

    @classmethod
    def read(cls, families: "Iterable[Metric]") -> "SpecCounts":
        """The counts among scraped metric families; zero where nothing has been counted."""
        totals = {DRAFTS.name: 0, DRAFT_TOKENS.name: 0}
        positions: dict[int, int] = {}
        for family in families:
            for sample in family.samples if family.name.startswith("tlt_spec_") else ():
                if family.name == ACCEPTED_PER_POSITION.name:
                    positions[int(sample.labels["position"])] = int(sample.value)
                elif family.name in totals and sample.name.endswith("_total"):
                    totals[family.name] = int(sample.value)
        per_position = tuple(positions.get(k, 0) for k in range(max(positions, default=-1) + 1))
        return cls(totals[DRAFTS.name], totals[DRAFT_TOKENS.name], per_position)


def describe(
    server_args: Any, families: "Sequence[Metric]", answers: list[Answer], load: Load, *, paused: bool
) -> Status:
    """The status of a server, whose metrics are `families`, of one scrape. answers: of all replicas; what is not of all
    of them is the first one's. paused: whether this process holds requests back."""
    counts = SpecCounts.read(families)
    first, speculation = answers[0], answers[0].speculation
    assert speculation is not None
    return Status(
        version=__version__,
        sglang_version=version("sglang"),
        models=Models(server_args.model_path, server_args.speculative_draft_model_path),
        speculation=speculation.arm is not None,
        arm=speculation.arm if speculation.on else None,
        accept_length=AcceptLength(recent=_recent(families), total=counts.accept_length),
        counters=Counters(counts.drafts, counts.draft_tokens, counts.accepted_tokens, counts.accepted_per_position),
        versions=first.versions,
        trainer=first.trainer,
        devices=sorted({device for answer in answers for device in answer.devices}),
        graphs=speculation.graphs,
        history=first.history,
        load=load,
        generated_tokens=generated_tokens(families),
        time=time.time(),
        paused=paused or any(answer.held for answer in answers),
        offloaded=sorted({tag for answer in answers for tag in answer.offloaded}),
        uptime_s=time.monotonic() - _started,
        help=_one_line(speculation, counts, first.versions.drafter if first.versions else None),
    )


def _recent(families: "Sequence[Metric]") -> float | None:
    lengths = (family.samples for family in families if family.name == "sglang:spec_accept_length")
    return max((sample.value for samples in lengths for sample in samples), default=None) or None


def generated_tokens(families: "Sequence[Metric]") -> int:
    """Tokens of decode steps, as SGLang counts them at each."""
    counted = (family.samples for family in families if family.name == "sglang:realtime_tokens")
    totals = (sample for samples in counted for sample in samples if sample.name.endswith("_total"))
    return int(sum(sample.value for sample in totals if sample.labels["mode"] == "decode"))


def _one_line(speculation: Speculation, counts: SpecCounts, drafter: Drafter | None) -> str:
    """What a user asks first: does speculation help, by how much, since when? And where it is off: why?"""
    if speculation.arm is None:
        return "speculation is off: the server was started without a drafter"
    watch = drafter.watch if drafter else None
    if speculation.held and watch:
        what = "the drafter" if any(arm.source == "history" for arm in speculation.arms) else "speculation"
        return f"{what} has been off for {_since(watch)}: {speculation.held}; {_until(watch)}"
    if not speculation.on:
        return f"speculation is off: {speculation.held or 'it was asked for'}"
    if drafter is None or watch is None or watch.accept_length is None:
        return _in_all(counts)
    said = f"a target pass gives {watch.accept_length:.2f} tokens on average"
    said += f", {watch.before:.2f} before" if watch.before is not None else ""
    said += f"; drafter {drafter.live.version}, {SINCE[watch.event].format(_since(watch))}"
    if watch.state in SAYS:
        return f"{said}: {SAYS[watch.state]}"
    return said if watch.accept_length >= 1.2 else f"{said}: it hardly helps; train it on this target"


def _in_all(counts: SpecCounts) -> str:
    """Where nothing was seen of late."""
    if counts.accept_length is None:
        return "speculation is on; no rollout has been verified yet"
    return f"a target pass gave {counts.accept_length:.2f} tokens on average, over {counts.drafts} passes"


SINCE = {
    "start": "active since the start, for {}",
    "drafter": "active for {}",
    "target": "for {} under another target",
    "memory": "for {} back in memory",
    "rollback": "gone back to {} ago",
    "probe": "tried again since {}",
}
SAYS = {
    "watching": "being watched",
    "worse": "plainly worse than the one before; roll it back, or arm the watchdog",
}


def _until(watch: Watch) -> str:
    if watch.probe_time is None:
        return "the next drafter turns it on"
    wait = _spoken(max(0.0, watch.probe_time - time.time()))
    return f"it is tried again in {wait}, or when target or drafter changes"


def _since(watch: Watch) -> str:
    return _spoken(time.time() - watch.event_time)


def _spoken(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
