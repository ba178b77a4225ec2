"""Seeds of requests: which one each sample has, on every route, and that it gives the sample again."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from tlt_client import Client, Rollout, SamplingParams, sample_seed

from tests.server.conftest import PROMPTS

LENGTH, VOCABULARY = 24, 295
SHORT = {"max_new_tokens": LENGTH, "ignore_eos": True}
Ask = Callable[..., Any]

chains = pytest.mark.server("eagle-chain")
of_vllm = pytest.mark.server("vllm")


@pytest.fixture
def ask(url: str) -> Iterator[Ask]:
    with httpx.Client(base_url=url, timeout=120) as http:

        def post(path: str, *, status: int = 200, header: str | None = None, **body: Any) -> Any:
            answer = http.post(path, json=body, headers={"X-TLT-Seed": header} if header else {})
            assert answer.status_code == status, answer.text
            return answer.json()

        yield post


@pytest.fixture
def again(client: Client) -> Callable[[int, str], tuple[int, ...]]:
    """What a request of its own, with this seed, samples."""

    def sample(seed: int, prompt: str) -> tuple[int, ...]:
        return client.generate(prompt, SamplingParams(sampling_seed=seed, **SHORT)).tokens

    return sample


@chains
def test_every_sample_has_the_seed_that_is_documented(ask: Ask, again: Any) -> None:
    answers = ask("/generate", text=PROMPTS[:2], sampling_params=SHORT | {"n": 3, "sampling_seed": -5})
    seeds = [answer["meta_info"]["seed"] for answer in answers]
    assert seeds == [sample_seed(-5, index) for index in range(6)]
    samples = [tuple(answer["output_ids"]) for answer in answers]
    assert samples == [again(seed, PROMPTS[index // 3]) for index, seed in enumerate(seeds)]
    assert len(set(samples)) == 6


@chains
def test_a_prompt_with_parameters_of_its_own_counts_its_own_samples(ask: Ask) -> None:
    params = [SHORT | {"n": 2, "sampling_seed": 2**64 - 1}, SHORT | {"n": 2}]
    answers = ask("/generate", text=PROMPTS[:2], sampling_params=params, header="77")
    seeds = [answer["meta_info"]["seed"] for answer in answers]
    assert seeds == [-1, sample_seed(-1, 1), sample_seed(77, 2), sample_seed(77, 3)]


@chains
def test_a_drawn_seed_gives_the_sample_again(client: Client, again: Any) -> None:
    first, second = client.generate_batch([PROMPTS[0]] * 2, SamplingParams(**SHORT))
    assert first.seed != second.seed
    assert [again(each.seed, PROMPTS[0]) for each in (first, second)] == [first.tokens, second.tokens]
    *_, last = client.stream(PROMPTS[1], SamplingParams(**SHORT))
    assert isinstance(last.rollout, Rollout)
    assert again(last.rollout.seed, PROMPTS[1]) == last.rollout.tokens


@chains
def test_openais_routes_tell_it_at_the_top(ask: Ask, again: Any) -> None:
    asked = {"max_tokens": LENGTH, "ignore_eos": True, "return_token_ids": True}
    answer = ask("/v1/completions", prompt=PROMPTS[:2], n=2, **asked)
    seed = answer["meta_info"]["seed"]
    texts = [
        ask("/v1/completions", prompt=PROMPTS[i // 2], seed=sample_seed(seed, i), **asked)["choices"][0]["text"]
        for i in range(4)
    ]
    assert [choice["text"] for choice in answer["choices"]] == texts
    said = [{"role": "user", "content": "3*4"}]
    chat = ask("/v1/chat/completions", messages=said, max_tokens=8, seed=3, return_meta_info=True)
    assert chat["meta_info"]["seed"] == chat["choices"][0]["meta_info"]["seed"] == 3
    assert "ignored" not in chat["meta_info"]


@chains
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_header_that_is_no_seed_is_refused(ask: Ask, path: str) -> None:
    body = {"text" if path == "/generate" else "prompt": "3"}
    said = ask(path, status=400, header="-1", **body)
    assert said.get("error", said)["message"] == "X-TLT-Seed: '-1' must be a decimal number below 2**53"


@chains
def test_what_is_answered_without_a_scheduler_tells_it_too(client: Client) -> None:
    none = client.generate(PROMPTS[0], SamplingParams(max_new_tokens=0, sampling_seed=9), logprobs=True)
    assert (none.seed, none.tokens) == (9, ())


@chains
def test_a_minimum_counts_what_was_generated_before(ask: Ask) -> None:
    """Every token but one is a stop token, and that one is never sampled unless it has to be."""
    params = {"max_new_tokens": 5, "min_new_tokens": 4, "logit_bias": {"8": -1000}}
    params["stop_token_ids"] = [token for token in range(VOCABULARY) if token != 8]
    asked = {"input_ids": [5, 6, 7], "sampling_params": params}
    given = [ask("/generate", **asked, generated_tokens=count)["output_ids"] for count in range(3)]
    assert [tokens[:-1] for tokens in given] == [[8] * 4, [8] * 3, [8] * 2]


@chains
def test_a_rollout_that_was_cut_goes_on_as_it_would_have(client: Client) -> None:
    params = SamplingParams(sampling_seed=21, max_new_tokens=120, min_new_tokens=60)
    prompt = [int(token) for token in client.generate(PROMPTS[2], params).tokens[:20]]
    whole = client.generate(prompt, params)
    for at in (1, 7, len(whole.tokens) - 1):
        cut = replace_tokens(whole, at)
        assert client.continue_rollout(cut, prompt, params).tokens == whole.tokens


def replace_tokens(rollout: Rollout, at: int) -> Rollout:
    """As an abort leaves it."""
    from msgspec.structs import replace
    from tlt_client import FinishReason

    return replace(
        rollout,
        tokens=rollout.tokens[:at],
        completion_tokens=at,
        finish_reason=FinishReason("abort"),
        weight_versions=(),
    )


@of_vllm
def test_vllms_routes(ask: Ask) -> None:
    asked = {"max_tokens": LENGTH, "ignore_eos": True, "return_token_ids": True}
    answer = ask("/v1/completions", prompt=PROMPTS[:2], n=2, **asked)
    seed = answer["meta_info"]["seed"]
    alone = [
        ask("/v1/completions", prompt=PROMPTS[i // 2], seed=sample_seed(seed, i), **asked)["choices"][0]["text"]
        for i in range(4)
    ]
    assert [choice["text"] for choice in answer["choices"]] == alone
    params = {"max_tokens": LENGTH, "ignore_eos": True, "seed": 4, "n": 2}
    first = ask("/inference/v1/generate", token_ids=[5, 6, 7], sampling_params=params)
    assert first["meta_info"]["seed"] == 4
    one = params | {"n": 1, "seed": sample_seed(4, 1)}
    second = ask("/inference/v1/generate", token_ids=[5, 6, 7], sampling_params=one)
    assert second["choices"][0]["token_ids"] == first["choices"][1]["token_ids"]
    kept = first["choices"][0]["token_ids"][:9]
    rest = params | {"n": 1, "max_tokens": LENGTH - 9}
    third = ask("/inference/v1/generate", token_ids=[5, 6, 7, *kept], sampling_params=rest, generated_tokens=9)
    assert third["choices"][0]["token_ids"] == first["choices"][0]["token_ids"][9:]
