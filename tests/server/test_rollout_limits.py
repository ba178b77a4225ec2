"""A rollout that has no token left to sample, as one that is aborted at its limit and sent again, ends by length."""

from typing import Any

import httpx
import pytest

CONTEXT = 2048
FULL = 2042
"""Of a prompt: upstream keeps five tokens for a response, and the last position."""
pytestmark = [pytest.mark.server, pytest.mark.parametrize("config", ["eagle-chain", "plain"])]


def generate(url: str, prompt: list[int] | list[list[int]], most: int, **fields: Any) -> httpx.Response:
    sampling = {"temperature": 1, "max_new_tokens": most, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    return httpx.post(f"{url}/generate", json=body | fields, timeout=60)


def ids(count: int) -> list[int]:
    return [5 + i % 40 for i in range(count)]


@pytest.mark.parametrize(
    ("prompt", "most", "sampled"),
    [
        (20, 0, 0),
        (CONTEXT - 10, 10, 8),  # the whole context, of which upstream leaves two positions
        (FULL - 1, 7, 5),
        (FULL - 1, 0, 0),
        (FULL, 6, 0),
        (FULL, 0, 0),
        (CONTEXT - 2, 2, 0),
    ],
)
def test_it_ends_by_length(url: str, prompt: int, most: int, sampled: int) -> None:
    answer = generate(url, ids(prompt), most).raise_for_status().json()
    meta = answer["meta_info"]
    assert meta["finish_reason"]["type"] == "length"
    assert len(answer["output_ids"]) == meta["completion_tokens"] == sampled
    assert meta["prompt_tokens"] == prompt
    assert len(meta["output_token_logprobs"]) == sampled


def test_of_a_batch_the_others_are_sampled(url: str) -> None:
    answers = generate(url, [ids(FULL), ids(20)], 6).raise_for_status().json()
    assert [len(answer["output_ids"]) for answer in answers] == [0, 6]


def test_a_group_shares_its_prompt(url: str) -> None:
    """Which upstream sends ahead of it, for no token."""
    prompt = [7, *ids(200)]
    sampling = {"temperature": 1, "max_new_tokens": 4, "n": 3}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    answers = httpx.post(f"{url}/generate", json=body, timeout=60).raise_for_status().json()
    cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
    assert min(cached) >= 199, "all but the last, and where it drafts the cache knows pairs of tokens"


@pytest.mark.parametrize(("prompt", "most"), [(CONTEXT, 0), (CONTEXT + 1, 1), (20, CONTEXT)])
def test_what_never_fitted_is_refused(url: str, prompt: int, most: int) -> None:
    assert generate(url, ids(prompt), most).status_code == 400


def test_logprobs_of_a_prompt_that_is_too_long_are_refused(url: str) -> None:
    """An answer without them would be taken for one with."""
    answer = generate(url, ids(FULL), 1, logprob_start_len=0)
    assert answer.status_code == 400
    assert "exceeds the maximum allowed length" in answer.text


def test_a_stream_of_it_ends(url: str) -> None:
    events = [line for line in generate(url, ids(FULL), 4, stream=True).text.splitlines() if line]
    assert len(events) == 2
    assert '"type":"length"' in events[0].replace(" ", "")
    assert events[1] == "data: [DONE]"
