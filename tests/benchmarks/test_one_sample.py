"""The judge of one sample: what rounding explains and what it does not; and what is asked."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tlt_client import FinishReason, Rollout, SamplingParams
from tlt_client.schemas import SelectionBucket

from benchmarks.lib.command import Models
from benchmarks.lib.one_sample import batches, law
from benchmarks.lib.one_sample.judging import (
    TIE,
    TIE_STEPS,
    Compared,
    Parting,
    at_border,
    bfloat16_step,
    compare,
    scaled,
)
from benchmarks.lib.one_sample.requests import KINDS, Request, requests
from benchmarks.lib.one_sample.servers import SERVERS
from benchmarks.lib.strategies import any_arm
from tests.definitions import undefined
from tlt_server.config import Arm
from tlt_server.demo import default_paths
from tlt_server.demo.lossless import Tokens
from tlt_server.engine.sampling.filters import filter_probs
from tlt_server.engine.sampling.noise import gumbel
from tlt_server.strategy.arms import Choice
from tlt_server.strategy.settings import from_client

VOCAB, PROMPT, SEED = 40, (3, 1, 4), 9
LOGITS = 3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 9


def rollout(*tokens: int, reason: str = "length") -> Rollout:
    finish = FinishReason(reason)
    return Rollout(
        rid="", tokens=tokens, text="", logprobs=None, finish_reason=finish, prompt_tokens=3, completion_tokens=2
    )


def noisy(at: int, **params: float) -> torch.Tensor:
    scores = LOGITS / params.get("temperature", 1.0)
    return scores + gumbel(torch.tensor([SEED]), torch.tensor([len(PROMPT) + at]), VOCAB)[0]


def found(
    one: Rollout, other: Rollout, gap: float | None = None, *, bfloat16: bool = False, **params: float
) -> Compared:
    """Where every prefix has the same logits; gap: to which the first pair of tokens that differ is brought."""
    logits = LOGITS.clone()
    if gap is not None:
        at = next(i for i, pair in enumerate(zip(one.tokens, other.tokens, strict=True)) if len({*pair}) > 1)
        scores, a, b = noisy(at, **params), one.tokens[at], other.tokens[at]
        logits[a] += (scores[b] - scores[a] + gap) * params.get("temperature", 1.0)

    def along(sequence: Tokens, response: Tokens) -> torch.Tensor:
        assert sequence[: len(PROMPT)] == PROMPT
        return logits.expand(len(response), -1)

    sampling = SamplingParams(**{"temperature": 1.0, **params}, sampling_seed=SEED)
    return compare(along, [Request("", PROMPT, sampling)], [one], [other], bfloat16)


def test_the_same_response_has_no_parting() -> None:
    same = found(rollout(5, 6), rollout(5, 6))
    assert (same.responses, same.tokens, same.parted) == (1, 2, ())
    assert same.figures()["responses_equal_share"] == 1


@pytest.mark.parametrize(
    "other", [rollout(5, 6, reason="stop"), rollout(5, 6, 7), rollout(5)], ids=["why", "on", "early"]
)
def test_another_end_is_no_tie(other: Rollout) -> None:
    figures = found(rollout(5, 6), other).figures()
    assert (figures["tie_divergences"], figures["non_tie_divergences"]) == (0, 1)


@pytest.mark.parametrize("temperature", [0.6, 1.3])
@pytest.mark.parametrize(("gap", "tie"), [(0.9 * TIE, True), (-0.9 * TIE, True), (1.2 * TIE, False), (-0.1, False)])
def test_a_tie_is_as_near_as_rounding_reaches(gap: float, tie: bool, temperature: float) -> None:
    compared = found(rollout(5, 6, 7), rollout(5, 8, 9), gap, temperature=temperature)
    [(place, parting)] = compared.parted
    assert (place, parting.prefix, parting.pair, parting.tie) == (0, (5,), (6, 8), tie)
    assert parting.gap == pytest.approx(abs(gap), abs=1e-6)
    assert compared.tokens == 2


@pytest.mark.parametrize(("steps", "tie"), [(0.9 * TIE_STEPS, True), (1.2 * TIE_STEPS, False)])
def test_a_server_in_bfloat16_may_lack_steps_of_it(steps: float, tie: bool) -> None:
    [(_, level)] = found(rollout(6), rollout(8), 0, bfloat16=True).parted
    [(_, parting)] = found(rollout(6), rollout(8), steps * level.step, bfloat16=True).parted
    assert (parting.step, parting.tie) == (level.step, tie)
    assert parting.in_steps == pytest.approx(steps, rel=1e-3)


@given(st.floats(1e-3, 300))
def test_steps_are_those_of_bfloat16(value: float) -> None:
    exact = torch.tensor(value).bfloat16()
    following = (exact.view(torch.int16) + 1).view(torch.bfloat16)
    assert bfloat16_step(float(exact)) == float(following) - float(exact)


FILTERS = st.fixed_dictionaries(
    {}, optional={"top_k": st.integers(1, 12), "top_p": st.floats(0.3, 1), "min_p": st.floats(0, 0.3)}
)


@given(st.integers(0, 10_000), st.integers(0, 9), FILTERS)
def test_what_a_nudge_takes_across_a_border_is_at_it(seed: int, token: int, params: dict[str, float]) -> None:
    scores = torch.randn(10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    kept = []
    for nudge in (-TIE / 3, TIE / 3):
        nudged = scores.clone()
        nudged[token] += nudge
        filters = (torch.tensor([params[name]]) if name in params else None for name in ("top_k", "top_p", "min_p"))
        kept.append(bool(filter_probs(nudged.softmax(-1)[None], *filters)[0, token] > 0))
    if kept[0] != kept[1]:
        assert at_border(scores, token, SamplingParams(**params))


BORDERS = {
    "top_k": ({"top_k": 3}, [5, 4, 3, 3 - TIE / 2], [5, 4, 3, 2]),
    "top_p": ({"top_p": 0.2}, [1, 1 - TIE / 2, 0.5, 0.2], [2, 1, 0.5, 0.2]),
    "min_p": ({"min_p": 0.1}, [3, 2, 2, 3 + torch.tensor(0.1).log().item()], [3, 2, 2, 1]),
    "none": ({}, None, [3, 2, 2, 1]),
}


@pytest.mark.parametrize(("params", "near", "far"), BORDERS.values(), ids=BORDERS)
def test_borders_are_found_where_they_are(params: dict[str, float], near: list[float] | None, far: list[float]) -> None:
    sampling = SamplingParams(**params)
    assert not any(at_border(torch.tensor(far, dtype=torch.float64), token, sampling) for token in range(4))
    if near:
        assert any(at_border(torch.tensor(near, dtype=torch.float64), token, sampling) for token in range(4))


def test_a_token_that_a_filter_may_have_refused_is_a_tie() -> None:
    order = LOGITS.argsort(descending=True).tolist()
    ranked = [int(token) for token in order[:4]]
    pair = max(ranked[:2], key=lambda token: float(noisy(0)[token])), ranked[3]
    assert not found(rollout(pair[0]), rollout(pair[1]), top_k=3).parted[0][1].tie


def test_requests_are_of_every_kind_with_seeds_of_their_own() -> None:
    asked = requests(Models(*default_paths()), 5 * len(KINDS))
    assert Counter(each.kind for each in asked) == dict.fromkeys(KINDS, 5)
    given = [each.params.sampling_seed for each in asked if each.params.sampling_seed is not None]
    assert len({*given}) == len(given) == 3 * len(KINDS)
    assert all(each.seeded(4).params.sampling_seed == 4 for each in asked)


def test_what_masks_tokens_stands_without_filters() -> None:
    masking, filtering = {"regex", "min_new_tokens"}, {"top_k", "top_p", "min_p"}
    assert not [kind for kind, params in KINDS.items() if masking & {*params} and filtering & {*params}]


def test_phases_take_all_kinds() -> None:
    for _, phases in SERVERS.values():
        for phase in phases:
            assert phase.count(20 * len(KINDS)) == 20 * len(KINDS) * phase.share
            assert phase.count(len(KINDS)) == len(KINDS)
            assert phase.count(2) == 2


def test_each_step_draws_among_arms_that_have_graphs() -> None:
    chain, tree = Arm(3, 1, 4), Arm(5, 4, 16)

    def drawn(bucket: SelectionBucket) -> list[Choice]:
        return [from_client(arm) for arm in bucket.arms]

    update = any_arm({chain: 128, tree: 32}, 256)
    assert update.epsilon == 1
    assert {each.first: drawn(each) for each in update.buckets or ()} == {
        1: [chain, tree, None],
        33: [chain, None],
        129: [None],
    }


def test_the_control_stands_apart() -> None:
    tie, error = Parting((1,), (2, 3), gap=0.1, allowed=0.2, step=0.05), Parting((1,))
    of_arms = Compared(4, 100, ((0, error),)) + Compared(4, 60, ((2, tie),))
    figures = batches.summary({False: of_arms, True: Compared(2, 10)})
    assert figures["equal_responses_share"] == 0.75
    assert (figures["tie_divergences"], figures["non_tie_divergences"]) == (1, 1)
    assert figures["tokens_per_divergence"] == 80
    assert figures["equal_responses_share_control"] == 1
    assert not undefined({**figures, **of_arms.figures(), **of_arms.figures("_arms")})


@pytest.mark.slow
def test_draws_of_the_noise_pass() -> None:
    figures = law.measured(2000, 5000, vocab=200)
    assert figures["chi_squared_p"] > 1e-3
    assert figures["independence_p"] > 1e-3
    assert not undefined(figures)


PENALTIES = {"frequency_penalty": 0.5, "presence_penalty": -0.25, "repetition_penalty": 1.5}


@pytest.mark.parametrize("names", [[name] for name in PENALTIES] + [list(PENALTIES)], ids="+".join)
def test_penalties_look_at_the_response(names: list[str]) -> None:
    given = {name: PENALTIES[name] for name in names}
    logits = torch.tensor([2.0, -2.0, 1.0, -1.0], dtype=torch.float64)
    frequency, presence, repetition = (
        given.get(name, neutral) for name, neutral in zip(PENALTIES, (0, 0, 1), strict=True)
    )
    wanted = logits.tolist()
    for token, count in ((0, 1), (1, 3)):
        less = wanted[token] - count * frequency - presence
        wanted[token] = less * repetition if less < 0 else less / repetition
    found = scaled(logits, SamplingParams(temperature=0.5, logit_bias={2: 1.0}, **given), (0, 1, 1, 1))
    assert found.tolist() == pytest.approx([2 * wanted[0], 2 * wanted[1], 4.0, -2.0])
