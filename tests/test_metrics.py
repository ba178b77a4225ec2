"""What a scrape derives from the counters, against a plain count of passes."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import CounterMetricFamily

from tlt_server.api.scrape import derived
from tlt_server.api.status import SpecCounts
from tlt_server.metrics import ACCEPTED_PER_POSITION, DRAFT_TOKENS, DRAFTS


@given(st.lists(st.integers(0, 7), max_size=60))
def test_derived_families_are_a_plain_count(accepted: list[int]) -> None:
    positions = [sum(n > k for n in accepted) for k in range(max(accepted, default=0))]
    written = [CounterMetricFamily(DRAFTS.name, "", value=len(accepted))]
    written.append(CounterMetricFamily(DRAFT_TOKENS.name, "", value=7 * len(accepted)))
    written.append(CounterMetricFamily(ACCEPTED_PER_POSITION.name, "", labels=["position"]))
    for k, value in enumerate(positions):
        written[-1].add_metric([str(k)], value)
    counts = SpecCounts.read(written)
    assert counts == SpecCounts(len(accepted), 7 * len(accepted), tuple(positions))
    families = {family.name: family.samples for family in derived(counts)}
    assert families["tlt_spec_accepted_tokens"][0].value == sum(accepted)
    assert families["vllm:spec_decode_num_drafts"][0].value == len(accepted)
    assert [s.value for s in families["vllm:spec_decode_num_accepted_tokens_per_pos"]] == positions
    histogram = {s.labels.get("le", s.name): s.value for s in families["tlt_spec_accept_length"]}
    lengths = Counter(n + 1 for n in accepted)
    for k in range(len(positions)):
        assert histogram[f"{k + 1}.0"] == sum(count for length, count in lengths.items() if length <= k + 1)
    assert histogram["+Inf"] == histogram["tlt_spec_accept_length_count"] == len(accepted)
    assert histogram["tlt_spec_accept_length_sum"] == sum(accepted) + len(accepted)
    assert counts.accept_length == (1 + sum(accepted) / len(accepted) if accepted else None)
