"""A server's own word on a parting: the logprobs of the two tokens after their common prefix, by one more pass."""

from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import torch

from benchmarks.lib.one_sample.judging import TIE_STEPS, Compared
from benchmarks.lib.one_sample.requests import Request
from tlt_server.engine.sampling.noise import gumbel

TOGETHER = 64
"""Prefixes of a call."""


@dataclass(frozen=True)
class Asked:
    """in_steps: the gap between the noisy scores, over the step of bfloat16 at the larger logit.

    Of two logprobs the logits' own difference is left, in which the law's normaliser cancels; their size is not told,
    and is taken from the judge.
    """

    in_steps: float

    @property
    def tie(self) -> bool:
        return self.in_steps <= TIE_STEPS


def ask_again(url: str, requests: Sequence[Request], compared: Compared) -> list[Asked]:
    """Of all partings in which two tokens stand against each other."""
    places = [(place, each) for place, each in compared.parted if each.pair]
    found = []
    for first in range(0, len(places), TOGETHER):
        part = places[first : first + TOGETHER]
        body = {
            "input_ids": [[*requests[place].prompt, *each.prefix] for place, each in part],
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
            "return_logprob": True,
            "token_ids_logprob": [list(each.pair) for _, each in part],
        }
        answers = httpx.post(f"{url}/generate", json=body, timeout=300).raise_for_status().json()
        for (place, each), answer in zip(part, answers, strict=True):
            logprobs = {token: logprob for logprob, token, _ in answer["meta_info"]["output_token_ids_logprobs"][0]}
            seed, at = requests[place].params.sampling_seed, len(requests[place].prompt) + len(each.prefix)
            noise = gumbel(torch.tensor([seed]), torch.tensor([at]), max(each.pair) + 1)[0]
            one, other = (logprobs[token] + float(noise[token]) for token in each.pair)
            found.append(Asked(abs(one - other) / each.step))
    return found
