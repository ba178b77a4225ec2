"""What the server counts is what the clients received."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tlt_client import Client, SamplingParams

from tests.server.trainer import Trainer, until_under_way
from tlt_server.api.status import SpecCounts

pytestmark = pytest.mark.server("eagle3-tree")

VERIFIED = 16  # tokens that this arm verifies in one pass


def scrape(url: str) -> dict[tuple[str, str], float]:
    text = httpx.get(f"{url}/metrics").text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {(s.name, s.labels.get("position", s.labels.get("le", ""))): s.value for s in samples}


def test_counters_equal_what_clients_received(url: str) -> None:
    before = scrape(url)
    prompts = [f"What is {n}*{n + 3}?\n" for n in range(12, 24)]
    with Client(url) as client:
        rollouts = client.generate_batch(prompts, SamplingParams(max_new_tokens=64))
        counters = client.status().counters
    after = scrape(url)

    def grown(metric: str, label: str = "") -> float:
        return after.get((metric, label), 0) - before.get((metric, label), 0)

    received = [rollout.spec for rollout in rollouts if rollout.spec]
    calls, accepted = sum(r.verify_calls for r in received), sum(r.accepted_drafts for r in received)
    assert calls > 0
    assert grown("tlt_spec_drafts_total") == grown("vllm:spec_decode_num_drafts_total") == calls
    assert grown("tlt_spec_draft_tokens_total") == calls * (VERIFIED - 1)
    assert grown("tlt_spec_draft_tokens_total") == sum(r.proposed_drafts for r in received)
    assert grown("tlt_spec_accepted_tokens_total") == grown("vllm:spec_decode_num_accepted_tokens_total") == accepted
    positions = [key for key in after if key[0] == "vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert sum(grown(*key) for key in positions) == accepted
    assert grown("tlt_spec_accept_length_count") == calls
    assert grown("tlt_spec_accept_length_sum") == calls + accepted
    assert grown("tlt_spec_accept_length_bucket", "+Inf") == calls
    assert counters.accepted_tokens == after["tlt_spec_accepted_tokens_total", ""]


def test_what_the_http_process_counts_is_scraped_too(url: str) -> None:
    """prometheus_client must not be imported before SGLang has chosen where the processes' metrics meet."""
    with Client(url) as client:
        client.generate("What is 3*4?\n", SamplingParams(max_new_tokens=8))
    names = {name for name, _ in scrape(url)}
    assert {"sglang:e2e_request_latency_seconds_count", "sglang:generation_tokens_total"} <= names


def test_meta_info_has_old_and_new_names(url: str) -> None:
    asked = {"text": "What is 34*56?\n", "sampling_params": {"max_new_tokens": 64}}
    info = httpx.post(f"{url}/generate", json=asked, timeout=60).json()["meta_info"]
    assert info["spec_accept_token_num"] == info["spec_num_correct_drafts"] > 0
    assert info["spec_draft_token_num"] == info["spec_num_proposed_drafts"] == (VERIFIED - 1) * info["spec_verify_ct"]
    assert 0 < info["spec_accept_rate"] <= 1
    assert 1 < info["spec_accept_length"] <= 6


def test_counts_before_the_first_pass() -> None:
    empty = SpecCounts.read([])
    assert empty == SpecCounts(0, 0, ())
    assert empty.accept_length is None


def test_an_arrival_waits_for_others_while_many_decode(trainer: Trainer) -> None:
    """The first to come, for whole steps where they would stop for its prefill; else next to nothing."""
    with ThreadPoolExecutor(20) as pool:

        def ask(tokens: int) -> dict[str, Any]:
            params = {"max_new_tokens": tokens, "ignore_eos": True}
            answer = trainer.post("/generate", text="What is 34*56?\n", sampling_params=params).raise_for_status()
            told: dict[str, Any] = answer.json()["meta_info"]
            return told

        alone = min(ask(1)["queue_time"] for _ in range(3))
        decoding = [pool.submit(ask, 400) for _ in range(16)]
        until_under_way(trainer, 16)
        late = list(pool.map(ask, [1] * 4))
        assert not any(each.done() for each in decoding), "nothing ran that could be stopped"
        step = min(told["e2e_latency"] / told["spec_verify_ct"] for told in (each.result() for each in decoding))
        assert max(each["queue_time"] for each in late) > step > 4 * alone
