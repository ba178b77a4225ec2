"""Penalties under speculation: a response with them is, token for token, what plain decoding samples."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from msgspec.structs import replace
from tlt_client import Client, Rollout, SamplingParams

from tests.server.conftest import DRAFTING, PROMPTS, Servers
from tests.server.test_arms import ANY_ARM
from tests.server.test_one_sample import TIE, divergences
from tests.server.test_seeds import cut
from tlt_server.demo.reference import Reference

pytestmark = pytest.mark.server

KINDS: Sequence[SamplingParams] = (
    SamplingParams(temperature=1.0, frequency_penalty=0.4),
    SamplingParams(temperature=0, frequency_penalty=0.1, presence_penalty=0.3),
    SamplingParams(temperature=0.8, presence_penalty=-0.7, top_p=0.9),
    SamplingParams(temperature=1.0),  # asks for none, among those that do
    SamplingParams(temperature=0.7, repetition_penalty=1.3, min_p=0.02),
    SamplingParams(temperature=0, repetition_penalty=1.1, frequency_penalty=-0.05),
    SamplingParams(temperature=1.0, repetition_penalty=1.2, min_new_tokens=20, stop_token_ids=[7]),
    SamplingParams(temperature=1.2, repetition_penalty=0.9, presence_penalty=0.5, frequency_penalty=0.2, top_k=20),
)


class Penalised:
    """A reference whose logits after each token of a response are penalised by all of the response before."""

    def __init__(self, reference: Reference, params: SamplingParams) -> None:
        self.tokens, self._reference, self._params = reference.tokens, reference, params

    def along(self, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
        logits = self._reference.along(tuple(prompt), tuple(response))
        held = [*(self._params.stop_token_ids or ()), self._reference.model.generation_config.eos_token_id]
        logits[: self._params.min_new_tokens or 0, held] = float("-inf")
        for place in range(len(response)):
            for token in set(response[:place]):
                logits[place, token] = self._of(float(logits[place, token]), response[:place].count(token))
        return logits

    def _of(self, logit: float, count: int) -> float:
        asked = self._params
        logit -= count * (asked.frequency_penalty or 0) + (asked.presence_penalty or 0)
        scaling = asked.repetition_penalty or 1
        return logit * scaling if logit < 0 else logit / scaling


def asked(count: int) -> tuple[list[str], list[SamplingParams]]:
    params = [
        replace(
            KINDS[i % len(KINDS)],
            max_new_tokens=120,
            sampling_seed=104_729 * i + 5,
            ignore_eos=i // len(KINDS) % 2 == 0,
        )
        for i in range(count)
    ]
    return [PROMPTS[i % len(PROMPTS)] for i in range(count)], params


def check(reference: Reference, prompts: list[str], params: list[SamplingParams], rollouts: list[Rollout]) -> None:
    for prompt, sampling, rollout in zip(prompts, params, rollouts, strict=True):
        found = divergences(Penalised(reference, sampling), prompt, sampling, rollout)  # type: ignore[arg-type]
        assert not [behind for behind in found if behind > TIE], sampling


@pytest.mark.parametrize("config", [*DRAFTING, "plain"])
def test_speculation_changes_no_token(client: Client, reference: Reference) -> None:
    prompts, params = asked(16)
    rollouts = client.generate_batch(prompts, params)
    check(reference, prompts, params, rollouts)
    assert sum(len(rollout.tokens) for rollout in rollouts) > 16 * 10


@pytest.mark.parametrize("config", ["eagle3-arms", "tight-arms", "two-ranks"])
def test_nor_does_another_arm_at_every_step(client: Client, reference: Reference) -> None:
    """Or off, under chunked prefills, retractions, or on two ranks."""
    client.set_strategy(ANY_ARM)
    prompts, params = asked(16)
    check(reference, prompts, params, client.generate_batch(prompts, params))


def test_without_a_drafter_a_response_goes_on_under_retractions_and_in_mixed_batches(
    servers: Servers, reference: Reference
) -> None:
    small = ["--enable-mixed-chunk", "--chunked-prefill-size", "16", "--max-total-tokens", "1000"]
    prompts, params = asked(16)
    with Client(servers.get(["--no-speculation", *small])) as client:
        rollouts = client.generate_batch(prompts, params)
        check(reference, prompts, params, rollouts)
        for place in range(8):
            rollout, prompt = rollouts[place], reference.tokens(prompts[place])
            on = client.continue_rollout(cut(rollout, len(rollout.tokens) // 2), prompt, params[place])
            assert on.tokens == rollout.tokens


@pytest.mark.server("eagle3-tree")
def test_nor_does_a_pause(client: Client, reference: Reference) -> None:
    """Requests are retracted, and go on by a prefill of all that they have."""
    prompts, params = asked(42)
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(client.generate_batch, prompts, params)
        pauses = 0
        while not under_way.done():
            client.pause_generation("retract")
            client.continue_generation()
            pauses += 1
            time.sleep(0.1)
    assert pauses > 4
    check(reference, prompts, params, under_way.result())
