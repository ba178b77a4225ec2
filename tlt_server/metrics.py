"""Every metric of tlt-server, in one table, and the functions that count.

The scheduler processes count; SGLang's HTTP process shows (api/scrape.py). They meet in prometheus_client's
multi-process files, as SGLang's own metrics do. Three counters are written in the decode loop; what follows from them,
vLLM's names included, is derived when somebody scrapes, so that a metric more costs nothing per step.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from tlt_client.schemas import Event


class Named(NamedTuple):
    """A metric, without Prometheus' `_total` in its name.

    alias: another name for the same count: vLLM's, which dashboards know. known: values of its one label that are shown
    from the start: a counter that appears later shows no increase. buckets: of a histogram.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()
    alias: str | None = None
    kind: Literal["Counter", "Gauge", "Histogram"] = "Counter"
    known: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


VLLM = "vllm:spec_decode_num"
RECOVERY = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 500)
SWAP = (0.0001, 0.0005, 0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
DRAFTS = Named("tlt_spec_drafts", "Verify passes, counted once for each request in the batch", (), f"{VLLM}_drafts")
DRAFT_TOKENS = Named("tlt_spec_draft_tokens", "Tokens that were proposed for verification", (), f"{VLLM}_draft_tokens")
ACCEPTED_PER_POSITION = Named(
    "tlt_spec_accepted_tokens_per_position",
    "Proposed tokens that the target accepted, by depth in the draft (0 is the first)",
    ("position",),
    f"{VLLM}_accepted_tokens_per_pos",
)
ACCEPTED_TOKENS = Named(
    "tlt_spec_accepted_tokens", "Proposed tokens that the target accepted", (), f"{VLLM}_accepted_tokens"
)
ACCEPT_LENGTH = Named(
    "tlt_spec_accept_length", "Tokens that one verify pass gave one request, the bonus token included", kind="Histogram"
)
ARM_STEPS = Named(
    "tlt_arm_steps",
    "Decode steps, by the arm that they were launched with: num_steps,topk,num_draft_tokens, or off",
    ("arm",),
)
TARGET_UPDATES = Named(
    "tlt_target_updates",
    "Calls that carried weights of the target, by route and outcome: written, or refused",
    ("route", "outcome"),
)
WEIGHT_EVENTS = Named(
    "tlt_weight_events", "What happened to the weights, by kind, as GET /tlt/v1/events tells it", ("kind",)
)
TARGET_VERSION = Named(
    "tlt_target_version", "Publications of the target that were completed since the server started", kind="Gauge"
)
DRAFTER_VERSION = Named("tlt_drafter_version", "The active drafter, by its number", kind="Gauge")
DRAFTER_STALENESS = Named(
    "tlt_drafter_staleness", "Publications of the target since the one the drafter was trained on", kind="Gauge"
)
SWAP_SECONDS = Named(
    "tlt_drafter_swap_seconds",
    "Seconds of a swap, by stage: staging, beside the decode loop; flip, which decoding waits for",
    ("stage",),
    kind="Histogram",
    buckets=SWAP,
)
SPECULATING = Named(
    "tlt_speculating", "Whether the drafter drafts: 0 after speculation was turned off for want of one", kind="Gauge"
)
WATCHED_LENGTH = Named("tlt_watchdog_accept_length", "Accept length of late, as the watchdog sees it", kind="Gauge")
BASELINE_LENGTH = Named(
    "tlt_watchdog_baseline_accept_length", "Accept length that the watchdog holds the drafter against", kind="Gauge"
)
ALARMS = Named(
    "tlt_watchdog_alarms",
    "Collapses of accept length, by what was done: rolled_back, speculation_off, or none",
    ("action",),
    known=("rolled_back", "speculation_off", "none"),
)
RECOVERY_SECONDS = Named(
    "tlt_drafter_recovery_seconds",
    "Seconds that a drafter was active before it was rolled back",
    kind="Histogram",
    buckets=RECOVERY,
)
FEATURES_SENT = Named("tlt_features_sent", "Tokens whose hidden states were sent to the drafter trainer")
FEATURES_SENT_BYTES = Named("tlt_features_sent_bytes", "Bytes of features sent to the drafter trainer")
FEATURES_DROPPED = Named(
    "tlt_features_dropped",
    "Tokens whose hidden states were not sent, by reason: no_room where they wait, no_trainer that reads them",
    ("reason",),
    known=("no_room", "no_trainer"),
)
DRAFT_VOCAB = tuple(
    Named(f"tlt_draft_vocab_{name}", f"{said}, where a drafter proposes of a part of the target's vocabulary")
    for name, said in (
        ("seen", "Tokens that steps gave"),
        ("missed", "Tokens that it could not have proposed"),
    )
)
HISTORY_TOKENS = Named("tlt_history_tokens", "Tokens of responses that are kept to draft from", kind="Gauge")
HISTORY = tuple(
    Named(f"tlt_history_{name}", f"{said}, where history drafts")
    for name, said in (
        ("written", "Tokens of responses that were taken in"),
        ("lookups", "Requests that a step asked drafts for"),
        ("found", "Requests that a step found drafts for"),
        ("drafted", "Tokens that were drafted"),
        ("accepted", "Drafted tokens that the target accepted"),
    )
)
IGNORED_FIELDS = Named(
    "tlt_ignored_fields",
    "Requests with a field that was ignored, by its name; of names beyond the first 64: other",
    ("name",),
)
MAX_NAMES = 64
"""Of ignored fields: they are the clients' own, and each is kept for ever."""

SPEC = (DRAFTS, DRAFT_TOKENS, ACCEPTED_PER_POSITION)
GAUGES = (TARGET_VERSION, DRAFTER_VERSION, DRAFTER_STALENESS, SPECULATING, WATCHED_LENGTH, BASELINE_LENGTH)
WEIGHTS = (WEIGHT_EVENTS, SWAP_SECONDS, *GAUGES)
WATCH = (ALARMS, RECOVERY_SECONDS)
FEATURES = (FEATURES_SENT, FEATURES_SENT_BYTES, FEATURES_DROPPED)
GROUPS = (SPEC, WEIGHTS, WATCH, FEATURES, DRAFT_VOCAB, (HISTORY_TOKENS, *HISTORY))
"""What is shown together, from the first that is written."""


@cache
def _made(metric: Named) -> Any:
    """A `Counter`, `Gauge` or `Histogram` of this process, at first use."""
    import prometheus_client  # it settles on one process or many when it is imported: not before SGLang has chosen

    more: dict[str, Any] = {"Counter": {}, "Gauge": {"multiprocess_mode": "mostrecent"}}.get(
        metric.kind, {"buckets": metric.buckets}
    )
    made = getattr(prometheus_client, metric.kind)(metric.name, metric.help, metric.labels, **more)
    for value in metric.known:
        made.labels(value)
    return made


@cache
def _at(metric: Named, *labels: str) -> Any:
    """What is written to: finding one by its labels is most of what counting costs a step."""
    for group in GROUPS:
        for each in group if metric in group else ():
            _made(each)
    return _made(metric).labels(*labels) if labels else _made(metric)


def count_verified(reqs: Sequence[Any], result: Any) -> None:
    """Counts one verified batch.

    reqs: the batch's requests. One that finished or was retracted a step earlier ran along under overlap; nothing of
        its result reaches a client, so it does not count.
    result: upstream's `GenerationBatchResult`, with each request's accepted drafts (the bonus token left out) and the
        number of tokens verified for each (the root, sampled before, included).
    """
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().attn_tp_rank != 0:
        return
    accepted = result.num_correct_drafts_per_req_cpu
    drafted = drafted_of(result, len(reqs))
    steps = zip(reqs, accepted, drafted, strict=True)
    both = [(n, tokens) for req, n, tokens in steps if not (req.is_retracted or req.finished())]
    live = [n for n, _ in both]
    if not live or result.speculative_num_draft_tokens == 1:  # a step that did not speculate: engine/decode/plain.py
        return
    _at(DRAFTS).inc(len(live))
    _at(DRAFT_TOKENS).inc(sum(tokens for _, tokens in both))
    for position in range(max(live)):
        _at(ACCEPTED_PER_POSITION, str(position)).inc(sum(n > position for n in live))


def drafted_of(result: Any, count: int) -> list[int]:
    """Tokens that were drafted for each of `count` requests of a verified batch: history may have had fewer."""
    drafted: list[int] | None = getattr(result, "drafted", None)
    return [result.speculative_num_draft_tokens - 1] * count if drafted is None else drafted


@cache
def _of_arm(arm: Any) -> Any:
    return _at(ARM_STEPS, "off" if arm is None else str(arm).strip("()"))


def count_step(arm: Any) -> None:
    """Counts a decode step that begins, with an `Arm`, or with None: off."""
    _of_arm(arm).inc()


def count_target_update(route: str, success: bool) -> None:
    """Counts one call of an update route."""
    _at(TARGET_UPDATES, route, "written" if success else "refused").inc()


def show_event(event: "Event") -> None:
    """Shows what an event changes."""
    _at(WEIGHT_EVENTS, event.kind).inc()
    _at(ALARMS, "none")
    match event.kind:
        case "target_published":
            _at(TARGET_VERSION).set(_number(event, "version"))
        case "accept_length_collapsed":
            _at(ALARMS, str(event.detail["action"])).inc()
        case "drafter_rolled_back":
            _at(DRAFTER_VERSION).set(_number(event, "version"))
            _at(RECOVERY_SECONDS).observe(_number(event, "recovery_s"))
        case "drafter_swapped":
            _at(DRAFTER_VERSION).set(_number(event, "version"))
            for stage in ("staging", "flip"):
                _at(SWAP_SECONDS, stage).observe(_number(event, f"{stage}_s"))


def _number(event: "Event", name: str) -> float:
    value = event.detail[name]
    assert isinstance(value, int | float)
    return value


def show_staleness(publications: int | None) -> None:
    """Shows how many publications of the target the active drafter has not seen; NaN where nobody knows."""
    _at(DRAFTER_STALENESS).set(math.nan if publications is None else publications)


def show_watch(accept_length: float | None, baseline: float | None, speculating: bool) -> None:
    """Shows what the watchdog sees; NaN for what it does not know."""
    _at(ALARMS, "none")
    _at(SPECULATING).set(speculating)
    _at(WATCHED_LENGTH).set(math.nan if accept_length is None else accept_length)
    _at(BASELINE_LENGTH).set(math.nan if baseline is None else baseline)


def count_features_sent(tokens: int, nbytes: int) -> None:
    """Counts one message of features."""
    _at(FEATURES_SENT).inc(tokens)
    _at(FEATURES_SENT_BYTES).inc(nbytes)


def count_features_dropped(tokens: int, reason: Literal["no_room", "no_trainer"]) -> None:
    """Counts tokens whose features are lost."""
    _at(FEATURES_DROPPED, reason).inc(tokens)


def count_history(tokens: int, counts: Mapping[str, int]) -> None:
    """Counts what came of the history since the last time; tokens: that it has."""
    _at(HISTORY_TOKENS).set(tokens)
    count_each(HISTORY, counts)


def count_each(metrics: Sequence[Named], counts: Mapping[str, int]) -> None:
    """Counts what came since the last time, by the last words of these metrics' names."""
    for metric in metrics:
        if count := counts.get(metric.name.rpartition("_")[2]):
            _at(metric).inc(count)


def count_ignored(name: str) -> None:
    """Counts a request with a field that was ignored."""
    name = name if name in _ignored or len(_ignored) < MAX_NAMES else "other"
    _ignored.add(name)
    _at(IGNORED_FIELDS, name).inc()


_ignored: set[str] = set()
