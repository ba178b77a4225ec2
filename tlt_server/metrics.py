"""Every metric of tlt-server, in one table, and the function that counts a decode step.

The scheduler processes count; SGLang's HTTP process shows (api/scrape.py). They meet in prometheus_client's
multi-process files, as SGLang's own metrics do. Three counters are written in the decode loop; all else, vLLM's names
included, is derived from them when somebody scrapes, so that a metric more costs nothing per step.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # prometheus_client settles on one process or many when it is imported: not before SGLang has chosen
    from prometheus_client import Counter, Gauge
    from prometheus_client.core import Metric


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

TARGET_UPDATES = Named(
    "tlt_target_updates", "Calls that carried weights of the target, by route and outcome: written, or refused"
)
TARGET_VERSION = Named("tlt_target_version", "Publications of the target that were completed since the server started")


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
    if not live:
        return
    drafts, draft_tokens, _ = _counters()
    drafts.inc(len(live))
    draft_tokens.inc(len(live) * (result.speculative_num_draft_tokens - 1))
    for position in range(max(live)):
        _at(position).inc(sum(n > position for n in live))


@cache
def _target_updates() -> "Counter":
    from prometheus_client import Counter

    return Counter(TARGET_UPDATES.name, TARGET_UPDATES.help, ["route", "outcome"])


def count_target_update(route: str, success: bool) -> None:
    """Counts one call of an update route."""
    _target_updates().labels(route, "written" if success else "refused").inc()


@cache
def _target_version() -> "Gauge":
    from prometheus_client import Gauge

    return Gauge(TARGET_VERSION.name, TARGET_VERSION.help, multiprocess_mode="mostrecent")


def show_target_version(version: int) -> None:
    """Shows the version that is in force from now on."""
    _target_version().set(version)
