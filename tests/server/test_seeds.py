"""Seeds of requests: which one each sample has, on every route, and that it gives the sample again."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from tlt_client import Client, FinishReason, Rollout, SamplingParams, sample_seed

from tests.server.conftest import PROMPTS

LENGTH, VOCABULARY = 24, 295
SHORT = {"max_new_tokens": LENGTH, "ignore_eos": True}
Ask = Callable[..., Any]

pytestmark = pytest.mark.server
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


@pytest.mark.parametrize("config", ["eagle-chain", "two-replicas"])
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


CUT: dict[str, dict[str, Any]] = {
    "a minimum": {"min_new_tokens": 60, "max_new_tokens": 120},
    "a grammar": {"regex": r"([0-9]{3}[a-z]{2}\.){6}", "max_new_tokens": 40},
    "a stop string": {"stop": "", "max_new_tokens": 60, "ignore_eos": True},
    "a drawn seed": {"sampling_seed": None, "max_new_tokens": 60, "temperature": 1.3, "ignore_eos": True},
}


@chains
@pytest.mark.parametrize("kind", CUT)
def test_a_rollout_that_was_cut_goes_on_as_it_would_have(client: Client, kind: str) -> None:
    asked = {"sampling_seed": 21} | CUT[kind]
    prompt = client.generate(PROMPTS[2], SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=0)).tokens
    if "stop" in asked:
        text = client.generate(prompt, SamplingParams(**asked | {"stop": None})).text
        asked["stop"] = text[20:26]
    params = SamplingParams(**asked)
    whole = client.generate(prompt, params)
    assert len(whole.tokens) > 4
    for at in (1, 3, len(whole.tokens) - 2, len(whole.tokens) - 1):
        on = client.continue_rollout(cut(whole, at), prompt, params)
        assert (on.tokens, on.finish_reason, on.seed) == (whole.tokens, whole.finish_reason, whole.seed)


def cut(rollout: Rollout, at: int) -> Rollout:
    """As an abort leaves it."""
    less = {"tokens": rollout.tokens[:at], "completion_tokens": at, "weight_versions": (), "drafter_versions": ()}
    return replace(rollout, finish_reason=FinishReason("abort"), **less)


@chains
def test_what_a_grammar_does_not_allow_cannot_go_on_under_it(ask: Ask) -> None:
    params = {"regex": "[0-9]{4}", "max_new_tokens": 4}
    letters = ask("/tokenize", prompt="ab")["tokens"]
    said = ask("/generate", status=400, input_ids=[5, *letters], generated_tokens=2, sampling_params=params)
    assert said["error"]["message"].startswith("generated_tokens: the request's grammar does not allow these 2: ")


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
