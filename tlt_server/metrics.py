"""Every metric of tlt-server, in one table, and the function that counts a decode step.

The scheduler processes count; SGLang's HTTP process shows (api/scrape.py). They meet in prometheus_client's
multi-process files, as SGLang's own metrics do. Three counters are written in the decode loop; all else, vLLM's names
included, is derived from them when somebody scrapes, so that a metric more costs nothing per step.
"""

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:  # prometheus_client settles on one process or many when it is imported: not before SGLang has chosen
    from prometheus_client import Counter, Gauge, Histogram
    from prometheus_client.core import Metric
    from tlt_client.schemas import Event


class Named(NamedTuple):
    """A metric: its name, without Prometheus' `_total`, and the help that a scrape shows."""

    name: str
    help: str
    alias: str | None = None  # vLLM's name for the same count, which dashboards know


DRAFTS = Named(
    "tlt_spec_drafts", "Verify passes, counted once for each request in the batch", "vllm:spec_decode_num_drafts"
)
DRAFT_TOKENS = Named(
    "tlt_spec_draft_tokens", "Tokens that the drafter proposed for verification", "vllm:spec_decode_num_draft_tokens"
)
ACCEPTED_PER_POSITION = Named(
    "tlt_spec_accepted_tokens_per_position",
    "Proposed tokens that the target accepted, by depth in the draft (0 is the first)",
    "vllm:spec_decode_num_accepted_tokens_per_pos",
)
ACCEPTED_TOKENS = Named(
    "tlt_spec_accepted_tokens", "Proposed tokens that the target accepted", "vllm:spec_decode_num_accepted_tokens"
)
ACCEPT_LENGTH = Named(
    "tlt_spec_accept_length", "Tokens that one verify pass gave one request, the bonus token included"
)

ARM_STEPS = Named(
    "tlt_arm_steps", "Decode steps, by the arm that they were launched with: num_steps,topk,num_draft_tokens, or off"
)
TARGET_UPDATES = Named(
    "tlt_target_updates", "Calls that carried weights of the target, by route and outcome: written, or refused"
)
WEIGHT_EVENTS = Named("tlt_weight_events", "What happened to the weights, by kind, as GET /tlt/v1/events tells it")
TARGET_VERSION = Named("tlt_target_version", "Publications of the target that were completed since the server started")
DRAFTER_VERSION = Named("tlt_drafter_version", "The drafter in force, by its number")
DRAFTER_STALENESS = Named(
    "tlt_drafter_staleness", "Publications of the target since the one the drafter was trained on"
)
SWAP_SECONDS = Named(
    "tlt_drafter_swap_seconds",
    "Seconds of a swap, by stage: staging, beside the decode loop; flip, which decoding waits for",
)
SPECULATING = Named("tlt_speculating", "Whether the drafter drafts: 0 after speculation was turned off for want of one")
WATCHED_LENGTH = Named("tlt_watchdog_accept_length", "Accept length of late, as the watchdog sees it")
BASELINE_LENGTH = Named(
    "tlt_watchdog_baseline_accept_length", "Accept length that the watchdog holds the drafter against"
)
ALARMS = Named(
    "tlt_watchdog_alarms", "Collapses of accept length, by what was done: rolled_back, speculation_off, or none"
)
RECOVERY_SECONDS = Named(
    "tlt_drafter_recovery_seconds", "Seconds that a drafter was in force before it was rolled back"
)

FEATURES_SENT = Named("tlt_features_sent", "Tokens whose hidden states were sent to the drafter trainer")
FEATURES_SENT_BYTES = Named("tlt_features_sent_bytes", "Bytes of features sent to the drafter trainer")
FEATURES_DROPPED = Named(
    "tlt_features_dropped",
    "Tokens whose hidden states were not sent, by reason: no_room where they wait, no_trainer that reads them",
)

IGNORED_FIELDS = Named(
    "tlt_ignored_fields", "Requests with a field that was ignored, by its name; of names beyond the first 64: other"
)


class SpecCounts(NamedTuple):
    """What speculation has done since the server started.

    accepted_per_position[k] counts the verify passes whose draft was accepted beyond depth k.
    """

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


@cache
def _counters() -> "tuple[Counter, Counter, Counter]":
    """The written counters, made at first use."""
    from prometheus_client import Counter

    return (
        Counter(DRAFTS.name, DRAFTS.help),
        Counter(DRAFT_TOKENS.name, DRAFT_TOKENS.help),
        Counter(ACCEPTED_PER_POSITION.name, ACCEPTED_PER_POSITION.help, ["position"]),
    )


@cache
def _at(position: int) -> Any:
    """The counter of accepted drafts at a depth: finding one by its label is most of what counting costs a step."""
    return _counters()[2].labels(position)


def count_verified(reqs: Sequence[Any], result: Any) -> None:
    """Counts one verified batch.

    Args:
        reqs: the batch's requests. One that finished or was retracted a step earlier ran along under overlap; nothing
            of its result reaches a client, so it does not count.
        result: upstream's `GenerationBatchResult`, with each request's accepted drafts (the bonus token left out) and
            the number of tokens verified for each (the root, sampled before, included).
    """
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().attn_tp_rank != 0:
        return
    accepted = result.num_correct_drafts_per_req_cpu
    live = [n for req, n in zip(reqs, accepted, strict=True) if not (req.is_retracted or req.finished())]
    if not live or result.speculative_num_draft_tokens == 1:  # a step that did not speculate: engine/plain.py
        return
    drafts, draft_tokens, _ = _counters()
    drafts.inc(len(live))
    draft_tokens.inc(len(live) * (result.speculative_num_draft_tokens - 1))
    for position in range(max(live)):
        _at(position).inc(sum(n > position for n in live))


@cache
def _arm_steps() -> "Counter":
    from prometheus_client import Counter

    return Counter(ARM_STEPS.name, ARM_STEPS.help, ["arm"])


@cache
def _of_arm(arm: Any) -> Any:
    """The counter of an arm's steps."""
    return _arm_steps().labels("off" if arm is None else str(arm).strip("()"))


def count_step(arm: Any) -> None:
    """Counts a decode step that begins, with an `Arm`, or with None: off."""
    _of_arm(arm).inc()


@cache
def _target_updates() -> "Counter":
    from prometheus_client import Counter

    return Counter(TARGET_UPDATES.name, TARGET_UPDATES.help, ["route", "outcome"])


def count_target_update(route: str, success: bool) -> None:
    """Counts one call of an update route."""
    _target_updates().labels(route, "written" if success else "refused").inc()


@cache
def _weight_metrics() -> "tuple[Counter, dict[str, Gauge], Histogram]":
    """Events by kind; the gauges by name; seconds of a swap."""
    from prometheus_client import Counter, Gauge, Histogram

    shown = (TARGET_VERSION, DRAFTER_VERSION, DRAFTER_STALENESS, SPECULATING, WATCHED_LENGTH, BASELINE_LENGTH)
    gauges = {each.name: Gauge(each.name, each.help, multiprocess_mode="mostrecent") for each in shown}
    seconds = Histogram(SWAP_SECONDS.name, SWAP_SECONDS.help, ["stage"], buckets=SWAP_BUCKETS)
    return Counter(WEIGHT_EVENTS.name, WEIGHT_EVENTS.help, ["kind"]), gauges, seconds


@cache
def _alarm_metrics() -> "tuple[Counter, Histogram]":
    """Zeros before the first alarm: a counter that appears only then shows no increase."""
    from prometheus_client import Counter, Histogram

    alarms = Counter(ALARMS.name, ALARMS.help, ["action"])
    for action in ("rolled_back", "speculation_off", "none"):
        alarms.labels(action)
    return alarms, Histogram(RECOVERY_SECONDS.name, RECOVERY_SECONDS.help, buckets=RECOVERY_BUCKETS)


RECOVERY_BUCKETS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 500)
SWAP_BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


def show_event(event: "Event") -> None:
    """Shows what an event changes."""
    events, gauges, seconds = _weight_metrics()
    events.labels(event.kind).inc()
    if event.kind == "target_published":
        gauges[TARGET_VERSION.name].set(_number(event, "version"))
    elif event.kind in ("drafter_swapped", "drafter_rolled_back"):
        gauges[DRAFTER_VERSION.name].set(_number(event, "version"))
    alarms, recovery = _alarm_metrics()
    if event.kind == "accept_length_collapsed":
        alarms.labels(event.detail["action"]).inc()
    elif event.kind == "drafter_rolled_back":
        recovery.observe(_number(event, "recovery_s"))
    elif event.kind == "drafter_swapped":
        for stage in ("staging", "flip"):
            seconds.labels(stage).observe(_number(event, f"{stage}_s"))


def _number(event: "Event", name: str) -> float:
    value = event.detail[name]
    assert isinstance(value, int | float)
    return value


def show_staleness(publications: int | None) -> None:
    """Shows how many publications of the target the drafter in force has not seen; NaN where nobody knows."""
    _, gauges, _ = _weight_metrics()
    gauges[DRAFTER_STALENESS.name].set(math.nan if publications is None else publications)


def show_watch(accept_length: float | None, baseline: float | None, speculating: bool) -> None:
    """Shows what the watchdog sees; NaN for what it does not know."""
    _alarm_metrics()
    _, gauges, _ = _weight_metrics()
    gauges[SPECULATING.name].set(speculating)
    gauges[WATCHED_LENGTH.name].set(math.nan if accept_length is None else accept_length)
    gauges[BASELINE_LENGTH.name].set(math.nan if baseline is None else baseline)


@cache
def _feature_counters() -> "tuple[Counter, Counter, Counter]":
    """Tokens sent, their bytes, tokens dropped; zeros before the first one is."""
    from prometheus_client import Counter

    dropped = Counter(FEATURES_DROPPED.name, FEATURES_DROPPED.help, ["reason"])
    for reason in ("no_room", "no_trainer"):
        dropped.labels(reason)
    sent = Counter(FEATURES_SENT.name, FEATURES_SENT.help)
    return sent, Counter(FEATURES_SENT_BYTES.name, FEATURES_SENT_BYTES.help), dropped


def count_features_sent(tokens: int, nbytes: int) -> None:
    """Counts one message of features."""
    sent, sent_bytes, _ = _feature_counters()
    sent.inc(tokens)
    sent_bytes.inc(nbytes)


def count_features_dropped(tokens: int, reason: Literal["no_room", "no_trainer"]) -> None:
    """Counts tokens whose features are lost."""
    _feature_counters()[2].labels(reason).inc(tokens)


@cache
def _ignored_fields() -> "tuple[Counter, dict[str, Any]]":
    """The counter, and its children by name: names are the clients' own, and each is kept for ever."""
    from prometheus_client import Counter

    return Counter(IGNORED_FIELDS.name, IGNORED_FIELDS.help, ["name"]), {}


def count_ignored(name: str) -> None:
    """Counts a request with a field that was ignored."""
    counter, of_names = _ignored_fields()
    if name not in of_names:
        name = name if len(of_names) < MAX_NAMES else "other"
        of_names[name] = counter.labels(name)
    of_names[name].inc()


MAX_NAMES = 64
