"""`/metrics`: SGLang's metrics, ours, and what follows from ours, vLLM's names included."""

from collections.abc import Iterator

from prometheus_client import multiprocess
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from tlt_server.api.status import SpecCounts
from tlt_server.metrics import ACCEPT_LENGTH, ACCEPTED_PER_POSITION, ACCEPTED_TOKENS, DRAFT_TOKENS, DRAFTS


class ServerCollector(multiprocess.MultiProcessCollector):
    """The metrics of all processes of this server, read afresh at every scrape."""

    def collect(self) -> Iterator[Metric]:
        families = list(super().collect())  # type: ignore[no-untyped-call]
        yield from families
        counted = {family.name for family in families}
        for metric in (DRAFTS, DRAFT_TOKENS):
            if metric.name not in counted:  # else it would lack the first draft's minute in a rate
                yield CounterMetricFamily(metric.name, metric.help, value=0)
        yield from derived(SpecCounts.read(families))


def derived(counts: SpecCounts) -> Iterator[Metric]:
    """The families that follow from the written counters: the total, the histogram, and vLLM's names."""
    values = {DRAFTS: counts.drafts, DRAFT_TOKENS: counts.draft_tokens, ACCEPTED_TOKENS: counts.accepted_tokens}
    yield CounterMetricFamily(ACCEPTED_TOKENS.name, ACCEPTED_TOKENS.help, value=counts.accepted_tokens)
    for metric, value in values.items():
        yield CounterMetricFamily(str(metric.alias), metric.help, value=value)
    by_position = CounterMetricFamily(str(ACCEPTED_PER_POSITION.alias), ACCEPTED_PER_POSITION.help, labels=["position"])
    for position, value in enumerate(counts.accepted_per_position):
        by_position.add_metric([str(position)], value)
    yield by_position
    # a pass gave at most k + 1 tokens unless its draft was accepted beyond depth k
    buckets = [(str(k + 1.0), counts.drafts - n) for k, n in enumerate(counts.accepted_per_position)]
    buckets.append(("+Inf", counts.drafts))
    yield HistogramMetricFamily(
        ACCEPT_LENGTH.name, ACCEPT_LENGTH.help, buckets=buckets, sum_value=counts.drafts + counts.accepted_tokens
    )
