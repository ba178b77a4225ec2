"""What a request's first tokens should be, exactly: the law of each sampling case, worked out from the target's logits.

Written from the words of the API, in float64, and apart from the server's own filters, which it judges.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tlt_server.demo.lossless import REST, Tokens, enumerate_law, p_value
from tlt_server.engine.sampling.filters import filter_probs

Logits = Callable[[Sequence[Tokens]], torch.Tensor]
"""From n equally long token sequences to the logits of what follows each, [n, vocab] float32."""
Law = dict[Tokens, float]

LENGTHS = (3, 7)
"""Tokens whose law is tested: few, where every continuation has many samples; and enough to end a tree five deep."""


@dataclass(frozen=True)
class Case:
    """Sampling parameters; `stop` is a token that ends the response, held back for `min_new_tokens`."""

    name: str
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_new_tokens: int = 0
    stop: int | None = None

    def params(self, length: int) -> dict[str, Any]:
        """As a request's `sampling_params`; only what is not neutral is sent."""
        sent: dict[str, Any] = {"max_new_tokens": length, "temperature": self.temperature}
        sent |= {"top_k": self.top_k} if self.top_k > 0 else {}
        sent |= {"top_p": self.top_p} if self.top_p < 1 else {}
        sent |= {"min_p": self.min_p} if self.min_p > 0 else {}
        sent |= {"logit_bias": {str(token): bias for token, bias in self.logit_bias.items()}} if self.logit_bias else {}
        if self.stop is None:
            return sent | {"ignore_eos": True}
        return sent | {"min_new_tokens": self.min_new_tokens, "stop_token_ids": [self.stop]}

    def probs(self, logits: torch.Tensor, place: int) -> torch.Tensor:
        """The law of token number `place`, from zero, of a response: [n, vocab] float64."""
        logits = logits.double()
        for token, bias in self.logit_bias.items():
            logits[:, token] += bias
        if self.stop is not None and place < self.min_new_tokens:
            logits[:, self.stop] = -math.inf
        return self._filtered((logits / self.temperature).softmax(-1))

    def _filtered(self, probs: torch.Tensor) -> torch.Tensor:
        """All three filters look at the same row; equals stay or go together."""
        floor = probs.max(-1, keepdim=True).values * self.min_p
        if self.top_k > 0:
            floor = floor.maximum(probs.topk(self.top_k).values[:, -1:])
        if self.top_p < 1:
            ordered = probs.sort(-1, descending=True).values
            last = (ordered.cumsum(-1) - ordered < self.top_p).sum(-1, keepdim=True) - 1
            floor = floor.maximum(ordered.gather(1, last))
        kept = probs.masked_fill(probs < floor, 0.0)
        return kept / kept.sum(-1, keepdim=True)

    def whole(self, response: Tokens, length: int) -> Tokens:
        """A response that the stop token ended early, filled up with it; so every outcome has `length` tokens."""
        return response if self.stop is None else response + (self.stop,) * (length - len(response))


def cases(likely: Sequence[int]) -> tuple[Case, ...]:
    """The cases to test after a prompt; `likely` are its likely first tokens, most likely first."""
    bias = {likely[0]: -1.5, likely[40]: 5.0}
    return (
        Case("temperature 1"),
        Case("temperature 0.7", temperature=0.7),
        Case("top_k 5", top_k=5),
        Case("top_p 0.8", top_p=0.8),
        Case("min_p 0.1", min_p=0.1),
        Case("all three", temperature=1.3, top_k=4, top_p=0.9, min_p=0.02),
        Case("logit_bias", logit_bias=bias),
        Case("min_new_tokens", stop=likely[1], min_new_tokens=3),
    )


def law(case: Case, prompt: Tokens, logits: Logits, length: int, rarest: float) -> Law:
    """The law of a response's first `length` tokens; continuations rarer than `rarest` stand under `REST`."""

    def next_probs(sequences: Sequence[Tokens]) -> torch.Tensor:
        place = len(sequences[0]) - len(prompt)
        probs = case.probs(logits(sequences), place)
        if case.stop is not None:
            ended = torch.tensor([case.stop in each[len(prompt) :] for each in sequences], device=probs.device)
            probs[ended] = 0.0
            probs[ended, case.stop] = 1.0
        return probs

    return enumerate_law(next_probs, prompt, length, rarest)


def rounding_shift(used: Law, finer: Law, samples: int) -> float:
    """How far a target's rounding moves the chi-squared statistic, in the statistic's own standard deviations.

    `finer` is the law of the same weights in a finer dtype. Samples that follow it, tested against `used`, raise the
    statistic by about samples * sum((finer - used)^2 / used), over the outcomes that the test looks at.
    """
    common = [each for each, p in used.items() if each != REST and p * samples >= 5]
    added = samples * sum((finer.get(each, 0.0) - used[each]) ** 2 / used[each] for each in common)
    return added / math.sqrt(2 * max(1, len(common)))


def p_values(case: Case, responses: Iterable[Tokens], laws: Mapping[int, Law]) -> dict[int, float]:
    """By length: the p-value of responses' first tokens under the law of that many."""
    longest = max(laws)
    whole = [case.whole(response, longest) for response in responses]
    return {length: p_value([each[:length] for each in whole], laws[length]) for length in laws}


def moved_mass(vocab: int, device: str, rows: int = 64) -> float:
    """How much probability the filters on `device` keep and the CPU's do not, or the reverse: the worst of `rows` rows.

    Rows as bfloat16 logits give them, with many equals, under top_k, top_p and min_p of all sizes.
    """
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab, generator=random) * torch.linspace(1, 6, rows)[:, None]
    probs = logits.bfloat16().float().softmax(-1)
    top_ks = torch.randint(1, 100, (rows,), generator=random, dtype=torch.int32)
    top_ks[::4] = 1 << 30
    filters = (top_ks, torch.rand(rows, generator=random) * 0.6 + 0.4, torch.rand(rows, generator=random) * 0.05)
    filters[1][1::4] = 1.0
    here = filter_probs(probs, *filters) > 0
    there = filter_probs(probs.to(device), *(each.to(device) for each in filters)).cpu() > 0
    return float((probs * (here != there)).sum(-1).max())
