"""One sample: a response is a function of its prompt, its seed and the target, token for token, whatever drafts."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from tlt_client import Client, Rollout, SamplingParams

from tests.server.conftest import DRAFTING, PROMPTS
from tests.server.test_arms import ANY_ARM
from tlt_server.demo.reference import Reference
from tlt_server.engine.sampling.filters import filter_probs
from tlt_server.engine.sampling.noise import gumbel

pytestmark = pytest.mark.server

KINDS: Sequence[dict[str, Any]] = (
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.3},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 8},
    {"temperature": 1.5, "min_p": 0.1, "top_p": 0.95},
    {"temperature": 0},
    {"temperature": 1.3, "top_k": 1},
    {"temperature": 1.7},
    {"temperature": 2.0, "top_k": 4, "top_p": 0.7},
    {"temperature": 2.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 1.5, "logit_bias": {20: 2.5, 21: -3.0}},
)
TIE = 1e-4
"""Between the two best noisy scores, or a filter's border and a token: float32's rounding decides there."""


def asked(count: int, first: int = 0) -> tuple[list[str], list[SamplingParams]]:
    places = range(first, first + count)
    params = [SamplingParams(max_new_tokens=200, sampling_seed=7919 * i + 3, **KINDS[i % len(KINDS)]) for i in places]
    return [PROMPTS[i % len(PROMPTS)] for i in places], params


def divergences(reference: Reference, prompt: str, params: SamplingParams, rollout: Rollout) -> list[float]:
    """By how much each token that is not the noise's choice lies behind it; of sampled requests."""
    before = reference.tokens(prompt)
    logits = reference.along(before, rollout.tokens)
    for token, bias in (params.logit_bias or {}).items():
        logits[:, token] += bias
    scaled = logits / params.temperature if params.temperature else logits
    filters = [
        None if value is None else torch.full((len(logits),), value)
        for value in (params.top_k, params.top_p, params.min_p)
    ]
    kept = filter_probs(scaled.softmax(-1), *filters)
    positions = torch.arange(len(before), len(before) + len(logits))
    noise = gumbel(torch.full_like(positions, params.sampling_seed or 0), positions, logits.shape[1])
    scores = scaled.masked_fill(kept == 0, float("-inf")) + (noise if params.temperature else 0)
    behind = scores.max(-1).values - scores.gather(1, torch.tensor(rollout.tokens)[:, None])[:, 0]
    return [float(each) for each in behind if each > 0]


def check(reference: Reference, prompts: list[str], params: list[SamplingParams], rollouts: list[Rollout]) -> None:
    found = [divergences(reference, *each) for each in zip(prompts, params, rollouts, strict=True)]
    assert not [each for each in found if any(behind > TIE for behind in each)]


@pytest.mark.parametrize("config", [*DRAFTING, "plain"])
def test_speculation_changes_no_token(client: Client, reference: Reference) -> None:
    prompts, params = asked(48)
    check(reference, prompts, params, client.generate_batch(prompts, params))


@pytest.mark.parametrize("config", ["eagle3-arms", "tight-arms", "two-ranks"])
def test_nor_does_another_arm_at_every_step(client: Client, reference: Reference, config: str) -> None:
    """Or off, under chunked prefills, retractions, or on two ranks."""
    client.set_strategy(ANY_ARM)
    prompts, params = asked(24, first=48)
    if config == "eagle3-arms":
        hot = SamplingParams(temperature=1.5, max_new_tokens=200, ignore_eos=True)  # so that drafts are often refused
        prompts += PROMPTS[:8]
        params += [replace(hot, sampling_seed=place) for place in range(8)]
    check(reference, prompts, params, client.generate_batch(prompts, params))


@pytest.mark.parametrize("config", ["eagle3-tree", "eagle-arms"])
def test_a_response_that_is_broken_off_goes_on_as_it_would_have(client: Client, reference: Reference) -> None:
    prompts, params = asked(14)
    whole = client.generate_batch(prompts, params)
    for place, rollout in enumerate(whole):
        if len(rollout.tokens) < 4:
            continue
        kept = rollout.tokens[: len(rollout.tokens) // 2]
        rest = replace(params[place], max_new_tokens=200 - len(kept))
        prompt = (*reference.tokens(prompts[place]), *kept)
        assert client.generate(prompt, rest).tokens == rollout.tokens[len(kept) :]
