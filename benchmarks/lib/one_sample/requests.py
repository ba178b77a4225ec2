"""Requests of every kind that a response's tokens may depend on, each with a seed of its own, or none."""

from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace
from tlt_client import SamplingParams

from benchmarks.lib.command import Models
from tlt_server.demo.lossless import Tokens

LONGEST = 160
SEED = 7919
KINDS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.6": {"temperature": 0.6},
    "temperature 1.3": {"temperature": 1.3},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "top_k": {"temperature": 1.3, "top_k": 8},
    "min_p": {"temperature": 1.3, "min_p": 0.05},
    "all three": {"temperature": 1.3, "top_k": 12, "top_p": 0.95, "min_p": 0.02},
    "logit_bias": {"temperature": 1.0, "logit_bias": {18: 2.0, 19: -3.0, 28: 1.0}},
    "grammar": {"temperature": 1.0, "regex": r"([0-9]{1,3}[+*=-]){4,24}[0-9]{2}"},
    "frequency_penalty": {"temperature": 1.0, "frequency_penalty": 0.4},
    "presence_penalty": {"temperature": 1.0, "presence_penalty": 0.8, "top_p": 0.9},
    "repetition_penalty": {"temperature": 1.3, "repetition_penalty": 1.3, "top_k": 20},
    # not with repetition_penalty: which of them comes first varies from process to process in upstream's plain decoding
    "two penalties": {
        "temperature": 0.8,
        "frequency_penalty": -0.2,
        "presence_penalty": 0.5,
        "logit_bias": {28: 0.5},
    },
    "stop": {"temperature": 1.0, "stop": ["7", "so"]},
    "stop_token_ids": {"temperature": 1.3, "stop_token_ids": [22, 25]},
    "min_new_tokens": {"temperature": 1.0, "min_new_tokens": 60, "stop_token_ids": [22]},
}
"""Tokens 18, 19, 22 and 25 of the embedded target are the digits 1, 2, 5 and 8, 28 is the semicolon. What forbids
tokens other than by their probability, a grammar and `min_new_tokens`, stands without a filter, whose border would move
with it: see `judging`."""


@dataclass(frozen=True)
class Request:
    """kind: of `KINDS`. prompt: in tokens. params: with the seed; without one the server draws it, and tells it."""

    kind: str
    prompt: Tokens
    params: SamplingParams

    def seeded(self, seed: int | None) -> "Request":
        """With the seed that a rollout of it tells."""
        return Request(self.kind, self.prompt, replace(self.params, sampling_seed=seed))


def requests(models: Models, count: int) -> list[Request]:
    """So many, the kinds in turn; the first of each kind has a seed, the next one none, and so on."""
    kinds, found = list(KINDS), list[Request]()
    for i, prompt in enumerate(models.prompts(count)):
        kind, seed = kinds[i % len(kinds)], SEED * i + 3 if i // len(kinds) % 2 == 0 else None
        params = SamplingParams(max_new_tokens=LONGEST, sampling_seed=seed, **KINDS[kind])
        found.append(Request(kind, prompt, params))
    return found
