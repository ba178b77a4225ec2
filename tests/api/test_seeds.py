"""The seed of each sample, on upstream's own requests; what leads them on is a stand-in for its tokenizer manager."""

import copy
import hashlib
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams
from starlette.datastructures import Headers
from tlt_client import sample_seed
from tlt_client.wire import PLACES, SEED

from tlt_server.api.rollouts.requests import settle_request
from tlt_server.api.rollouts.scope import PARSED, TOLD
from tlt_server.api.rollouts.seeds import FIRST_SAMPLE, seed_of, seed_sample
from tlt_server.engine.requests.continued import generated_tokens, prompt_length

SEEDS = st.integers(-(2**63), 2**64 - 1)
DRAWN = st.integers(0, 2**53 - 1)


def http(seed: str | None = None, places: str | None = None, **body: Any) -> Any:
    """An HTTP request, as far as it is read."""
    headers = {name: value for name, value in ((SEED, seed), (PLACES, places)) if value is not None}
    return SimpleNamespace(headers=Headers(headers), scope={PARSED: body, TOLD: {}})


def settled(raw: Any = None, **fields: Any) -> GenerateReqInput:
    request = GenerateReqInput(**fields)
    request.normalize_batch_and_arguments()
    settle_request(request, raw)
    return request


def sent(request: GenerateReqInput) -> list[SamplingParams]:
    """What a scheduler gets of each sample, in upstream's order; what is sent to fill the prefix cache is left out."""
    prompts = [request] if request.is_single else [request[i] for i in range(request.batch_size)]
    given = []
    for prompt in prompts:
        samples = request.parallel_sample_num
        for number in range(samples + (samples > 1)):
            state = SimpleNamespace(obj=copy.copy(prompt))
            tokenized = SimpleNamespace(sampling_params=SamplingParams(**prompt.sampling_params))
            seed_sample(state, tokenized)
            assert seed_of(state) == tokenized.sampling_params.sampling_seed
            if number or samples == 1:
                given.append(tokenized.sampling_params)
    return given


def seeds(request: GenerateReqInput) -> list[int]:
    return [params.sampling_seed for params in sent(request)]


def test_the_mix_is_that_of_the_documents() -> None:
    digest = hashlib.blake2b(bytes([7, 0, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0]), digest_size=8).digest()
    assert sample_seed(7, 258) == int.from_bytes(digest, "little") >> 11
    assert [sample_seed(-1, i) for i in range(3)] == [-1, 3671931429048082, 6706730321140404]


@given(SEEDS, st.integers(1, 2**40))
def test_a_mixed_seed_survives_json_readers(seed: int, index: int) -> None:
    assert 0 <= sample_seed(seed, index) < 2**53
    assert sample_seed(seed, index) == sample_seed(seed + 2**64, index)


@given(st.integers(0, 2**53 - 1))
def test_samples_of_neighbouring_seeds_do_not_coincide(seed: int) -> None:
    mixed = [sample_seed(seed + i, k) for i in range(16) for k in range(16)]
    assert len(set(mixed)) == len(mixed)


@given(DRAWN, st.integers(1, 3), st.lists(st.booleans(), min_size=2, max_size=6), st.booleans())
def test_a_part_of_a_batch_has_the_seeds_of_the_whole(
    drawn: int, samples: int, first: list[bool], shared: bool
) -> None:
    ids, own = [[5]] * len(first), {"n": samples} | ({"sampling_seed": 9} if drawn % 2 else {})
    whole = seeds(settled(http(str(drawn)), input_ids=ids, sampling_params=own if shared else [dict(own) for _ in ids]))
    for part in (True, False):
        if not (at := [place for place, in_first in enumerate(first) if in_first is part]):
            continue
        params = own if shared else [dict(own) for _ in at]
        told = ",".join(str(0 if not shared and "sampling_seed" in own else place) for place in at)
        request = settled(http(str(drawn), told), input_ids=[[5]] * len(at), sampling_params=params)
        expected = [whole[place * samples + k] for place in at for k in range(samples)]
        assert seeds(request) == expected


@pytest.mark.parametrize("told", ["", "1", "1,2,3", "a,b", "-1,2", "1,", "1,9999999999"])
def test_places_that_are_none_are_refused(told: str) -> None:
    with pytest.raises(ValueError, match="must be 2 decimal numbers"):
        settled(http("3", told), input_ids=[[5], [6]], sampling_params={})


@given(SEEDS, st.integers(1, 4), st.integers(1, 5))
def test_prompts_that_share_a_seed_share_no_samples(seed: int, prompts: int, samples: int) -> None:
    params = {"sampling_seed": seed, "n": samples}
    request = settled(input_ids=[[5]] * prompts, sampling_params=params)
    first = (seed + 2**63) % 2**64 - 2**63
    assert seeds(request) == [sample_seed(first, index) for index in range(prompts * samples)]
    assert params == {"sampling_seed": seed, "n": samples}


def test_a_request_can_be_dumped() -> None:
    """As --crash-dump-folder does."""
    request = settled(input_ids=[[5], [6]], sampling_params={"n": 2, "sampling_seed": 3})
    assert seeds(pickle.loads(pickle.dumps(request))) == seeds(request)


@given(st.lists(SEEDS, min_size=1, max_size=4), st.integers(1, 3))
def test_a_prompt_with_a_seed_of_its_own_counts_its_own_samples(given_: list[int], samples: int) -> None:
    params = [{"sampling_seed": seed, "n": samples} for seed in given_]
    request = settled(text=["a"] * len(given_), sampling_params=params)
    firsts = [(seed + 2**63) % 2**64 - 2**63 for seed in given_]
    assert seeds(request) == [sample_seed(first, k) for first in firsts for k in range(samples)]


@given(DRAWN, SEEDS, st.integers(1, 3))
def test_prompts_without_a_seed_share_the_drawn_one(drawn: int, own: int, samples: int) -> None:
    params = [{"n": samples}, {"n": samples, "sampling_seed": own}, {"n": samples, "sampling_seed": None}]
    request = settled(http(str(drawn)), text=["a"] * 3, sampling_params=params)
    found = seeds(request)
    assert found[:samples] == [sample_seed(drawn, k) for k in range(samples)]
    assert found[2 * samples :] == [sample_seed(drawn, 2 * samples + k) for k in range(samples)]


@given(DRAWN, st.integers(1, 3), st.integers(1, 3))
def test_rounds_of_single_samples_have_the_seeds_of_the_whole(drawn: int, prompts: int, samples: int) -> None:
    """As vLLM's dialect sends them."""
    params = [{"n": 1, FIRST_SAMPLE: j * samples + k} for k in range(samples) for j in range(prompts)]
    rounds = settled(http(str(drawn)), input_ids=[[5]] * len(params), sampling_params=params)
    whole = settled(http(str(drawn)), input_ids=[[5]] * prompts, sampling_params={"n": samples})
    found = seeds(rounds)
    assert [found[k * prompts + j] for j in range(prompts) for k in range(samples)] == seeds(whole)


@pytest.mark.parametrize("fields", [{"text": "a"}, {"text": ["a"]}, {"text": "a", "sampling_params": {"n": 3}}])
def test_a_drawn_seed_is_new_each_time_and_told(fields: dict[str, Any]) -> None:
    told = set()
    for _ in range(20):
        raw = http()
        request = settled(raw, **fields)
        assert seeds(request)[0] == raw.scope[TOLD]["seed"]
        told.add(raw.scope[TOLD]["seed"])
    assert len(told) == 20
    assert all(0 <= seed < 2**53 for seed in told)


def test_several_seeds_are_not_told_as_one() -> None:
    raw = http()
    settled(raw, text=["a", "b"], sampling_params=[{"sampling_seed": 1}, {"sampling_seed": 2}])
    assert raw.scope[TOLD] == {}


@pytest.mark.parametrize("header", ["-1", "1.0", str(2**53), "x", "1" * 400, "\uff11"])
def test_a_header_that_is_no_seed(header: str) -> None:
    raw = SimpleNamespace(headers={SEED: header}, scope={})
    with pytest.raises(ValueError, match=rf"^{SEED}: [^\n]{{1,99}}$"):
        settled(raw, text="a")


def test_embeddings_and_requests_of_the_server_itself_have_one_too() -> None:
    assert len(seeds(settled(text="a"))) == 1
    request = EmbeddingReqInput(text=["a", "b"])
    request.normalize_batch_and_arguments()
    settle_request(request, None)
    assert all(0 <= request[i].sampling_params["sampling_seed"] < 2**53 for i in range(2))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=3), st.integers(0, 6), st.integers(1, 3))
def test_what_was_generated_before_counts_for_the_minimum(counts: list[int], least: int, samples: int) -> None:
    ids = [[5] * 5] * len(counts)
    params = {"min_new_tokens": least, "n": samples, "custom_params": {"mine": 1}}
    request = settled(http(generated_tokens=counts), input_ids=ids, sampling_params=params)
    of_samples = [count for count in counts for _ in range(samples)]
    for count, given_ in zip(of_samples, sent(request), strict=True):
        assert given_.min_new_tokens == max(least - count, 0)
        assert (generated_tokens(given_), given_.custom_params["mine"]) == (count, 1)
        assert prompt_length(SimpleNamespace(origin_input_ids=[5] * 5, sampling_params=given_)) == 5 - count


def test_one_count_is_for_all_prompts() -> None:
    request = settled(http(generated_tokens=2), input_ids=[[5] * 3, [5] * 4])
    assert [generated_tokens(params) for params in sent(request)] == [2, 2]
    single = settled(http(generated_tokens=2), input_ids=[5] * 3)
    assert [generated_tokens(params) for params in sent(single)] == [2]
    assert generated_tokens(sent(settled(http(), input_ids=[5]))[0]) == 0
