"""Speculation changes no law: greedy output token for token, sampled output against the target's exact law."""

import re
from collections.abc import Callable, Sequence

import pytest
import torch
from tlt_client import Client, SamplingParams, StrategyUpdate

from tests.server.conftest import DRAFTING, PROMPTS, Servers, greedy
from tlt_server.demo.lossless import Tokens, enumerate_law, p_value
from tlt_server.demo.reference import Reference
from tlt_server.engine.sampling.filters import filter_probs

pytestmark = pytest.mark.server

GREEDY = SamplingParams(temperature=0, max_new_tokens=96)
EVERYWHERE = pytest.mark.parametrize("config", [*DRAFTING, "plain"])
SAMPLES, LENGTH = 400, 4
# With 10 p-values, one false alarm in 10,000 runs of this file, were the servers' seeds not fixed.
LEAST_P = 1e-5

CASES = {
    "temperature 1": {},
    "temperature 1.7": {"temperature": 1.7},
    "top_k": {"temperature": 1.5, "top_k": 3},
    "top_p": {"temperature": 1.5, "top_p": 0.8},
    "min_p": {"temperature": 1.5, "min_p": 0.2},
    "top_k and top_p": {"temperature": 2.0, "top_k": 4, "top_p": 0.7},
    "all filters": {"temperature": 2.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
    "logit_bias": {"temperature": 1.5, "logit_bias": {20: 2.5, 21: -3.0}},
    "neutral values": {"repetition_penalty": 1.0, "min_p": 0.0, "top_k": -1, "frequency_penalty": 0.0},
}


def law_of(reference: Reference, params: dict[str, object]) -> Callable[[Sequence[Tokens]], torch.Tensor]:
    """What follows each of n sequences under a request's parameters: [n, vocab]."""

    def one(name: str, neutral: float) -> torch.Tensor | None:
        value = params.get(name, neutral)
        return None if value == neutral else torch.tensor([value])

    def next_probs(sequences: Sequence[Tokens]) -> torch.Tensor:
        logits = reference.logits(sequences)
        for token, bias in params.get("logit_bias", {}).items():
            logits[:, token] += bias
        filters = [
            f if f is None else f.repeat(len(logits)) for f in (one("top_k", -1), one("top_p", 1), one("min_p", 0))
        ]
        return filter_probs((logits / params.get("temperature", 1.0)).softmax(-1), *filters)

    return next_probs


@pytest.fixture(scope="session")
def laws(reference: Reference) -> dict[str, dict[Tokens, float]]:
    """Of the first tokens after a prompt, by case."""
    prompt = reference.tokens(PROMPTS[1])
    return {case: enumerate_law(law_of(reference, CASES[case]), prompt, LENGTH, rarest=1e-4) for case in CASES}


@EVERYWHERE
def test_greedy_output_is_plain_decodings(client: Client, expected: list[Tokens]) -> None:
    """Alone and 16 at a time; `plain` among the configurations shows that transformers is the same yardstick."""
    together = client.generate_batch(PROMPTS, GREEDY)
    assert [rollout.tokens for rollout in together] == expected
    alone = [client.generate(prompt, GREEDY).tokens for prompt in PROMPTS[:3]]
    assert alone == expected[:3]


@EVERYWHERE
def test_a_limit_in_the_step_that_ends_a_response(client: Client, expected: list[Tokens]) -> None:
    """A step gives tokens after the end too; with a limit among them they were returned as if the end were none."""
    ended = [(prompt, tokens) for prompt, tokens in zip(PROMPTS, expected, strict=True) if len(tokens) < 96]
    assert len(ended) > 3
    asked = [(prompt, tokens, len(tokens) + more) for prompt, tokens in ended for more in (1, 2, 3)]
    limits = [SamplingParams(temperature=0, max_new_tokens=limit) for _, _, limit in asked]
    rollouts = client.generate_batch([prompt for prompt, _, _ in asked], limits)
    for rollout, (prompt, tokens, limit) in zip(rollouts, asked, strict=True):
        assert rollout.tokens == tokens, (prompt, limit)
        assert rollout.finish_reason.type == "stop"


@pytest.mark.server("plain")
def test_plain_decoding_samples_by_the_law(
    client: Client, reference: Reference, laws: dict[str, dict[Tokens, float]]
) -> None:
    """Whatever else is in the batch, greedy requests too. As do those with a drafter, whose tokens are the same by
    test_one_sample.py: it sees an error in one token of a thousand, where these frequencies show one of a fifth (at
    1e-5, every second time)."""
    prompt, kinds = PROMPTS[1], [*CASES.values(), {"temperature": 0}]
    params = [SamplingParams(max_new_tokens=LENGTH, ignore_eos=True, **kind) for kind in kinds] * SAMPLES
    rollouts = client.generate_batch([prompt] * len(params), params)
    for k, case in enumerate(CASES):
        assert p_value([rollout.tokens for rollout in rollouts[k :: len(kinds)]], laws[case]) > LEAST_P, case
    assert {rollout.tokens for rollout in rollouts[len(kinds) - 1 :: len(kinds)]} == {greedy(reference, prompt, LENGTH)}


@EVERYWHERE
def test_logprobs(client: Client, in_double: Reference) -> None:
    """Within 1e-5 of the target's own in float64, but where a context magnifies the rounding of float32.

    Of 60,000 sampled positions the server was beyond 1e-5 at one (1.04e-5), transformers in float32 at most 9.2e-6 off:
    which contexts are sampled, and which requests share a batch, differs between runs.
    """
    rollouts = client.generate_batch(PROMPTS, SamplingParams(max_new_tokens=64, temperature=0.8), logprobs=True)
    errors = []
    for prompt, rollout in zip(PROMPTS, rollouts, strict=True):
        tokens, sampled = in_double.tokens(prompt), torch.tensor(rollout.tokens)
        exact = (in_double.along(tokens, rollout.tokens) / 0.8).log_softmax(-1).gather(1, sampled[:, None])[:, 0]
        assert rollout.logprobs is not None
        errors.append((torch.tensor(rollout.logprobs, dtype=torch.float64) - exact).abs())
    error = torch.cat(errors)
    assert (error <= 1e-5).double().mean() >= 0.995, error.topk(8)
    assert error.max() <= 1e-4, error.topk(8)


@pytest.mark.server("plain")
def test_min_new_tokens(client: Client, reference: Reference) -> None:
    """A stop token is impossible before, and follows its own law from then on; with a drafter, test_penalties.py."""
    prompt = PROMPTS[2]
    tokens = reference.tokens(prompt)
    stop = int(reference.logits([tokens]).argmax())  # the likeliest first token: held back, then free
    params = SamplingParams(max_new_tokens=4, min_new_tokens=2, stop_token_ids=[stop], temperature=1.5)

    def next_probs(sequences: Sequence[Tokens]) -> torch.Tensor:
        logits = reference.logits(sequences) / 1.5
        done = len(sequences[0]) - len(tokens)
        held = [stop, reference.model.generation_config.eos_token_id]
        if done < 2:
            logits[:, held] = float("-inf")
        return logits.softmax(-1)

    law = enumerate_law(next_probs, tokens, 3, rarest=1e-4)
    starts = []
    for rollout in client.generate_batch([prompt] * SAMPLES, params):
        assert stop not in rollout.tokens[:2]
        starts.append(rollout.tokens[:3] if len(rollout.tokens) >= 3 else rollout.tokens)
    assert p_value(starts, law) > LEAST_P


@EVERYWHERE
def test_a_stop_string_ends_every_sample(client: Client) -> None:
    rollouts = client.generate_group(PROMPTS[3], 8, SamplingParams(max_new_tokens=200, stop=["so"]))
    assert len(rollouts) == 8
    for rollout in rollouts:
        assert "so" not in rollout.text
        assert rollout.finish_reason.type in ("stop", "length")


@EVERYWHERE
def test_grammar_is_obeyed(client: Client) -> None:
    pattern = r"(ab|cd){2}[0-9]{3}"
    params = SamplingParams(max_new_tokens=64, temperature=1.0, regex=pattern)
    for rollout in client.generate_batch(PROMPTS[:4], params):
        assert re.fullmatch(pattern, rollout.text), rollout.text


def test_a_wide_tree_near_the_context_limit(servers: Servers) -> None:
    """Upstream writes past the request's row here; greedy output must still be plain decoding's."""
    params = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
    flags = ["--arm", "7,8,8", "--context-length", "128", "--max-running-requests", "4"]
    outputs = []
    with Client(servers.get(flags)) as client:
        for mode in ("off", "pinned"):
            client.set_strategy(StrategyUpdate(mode))
            outputs.append([rollout.tokens for rollout in client.generate_batch(PROMPTS[:8], params)])
        assert client.status().counters.accepted_tokens > 0
    assert outputs[0] == outputs[1]


@EVERYWHERE
def test_every_configuration_speculates_or_not(client: Client, config: str) -> None:
    """Guards the tests above: with a drafter, drafts are accepted; without one there are none."""
    rollout = client.generate(PROMPTS[0], SamplingParams(max_new_tokens=48))
    assert (rollout.spec is None) == (config == "plain")
    status = client.status()
    assert status.speculation == (config != "plain")
    if config != "plain":
        assert status.counters.accepted_tokens > 0
