"""Two responses of one request: where they part, and whether rounding decided there.

Both took a token after the same prefix, with the same noise. Exact arithmetic takes one of the two: the one of the
higher noisy score, unless a filter forbids it. The other is taken where rounding turns their order, or moves the higher
one across a filter's border: that is a tie, and what follows it is another response. Anything else is an error.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tlt_client import Rollout, SamplingParams

from benchmarks.lib.divergences import TIE_ULPS, first_difference
from benchmarks.lib.one_sample.requests import Request
from tlt_server.demo.lossless import Tokens
from tlt_server.engine.sampling.noise import gumbel
from tlt_server.results import Figures

Along = Callable[[Tokens, Tokens], torch.Tensor]
"""As `Reference.along`."""
TIE = 1e-4
"""Nats, and shares of probability: what a server's float32 may lack. Rounding moves a score of the embedded target by
some 1e-5 (`logit_difference_max_shape_float32` of fidelity: 4e-5)."""
TIE_STEPS = TIE_ULPS
"""Steps of bfloat16 at the larger logit: what a server's bfloat16 may lack, as of greedy decoding's divergences."""


@dataclass(frozen=True)
class Parting:
    """The first place where two responses of one request differ.

    prefix: what both have before it. pair: the two tokens; none where one response ends and the other goes on, or the
        same tokens end otherwise, which no rounding does.
    gap: between their noisy scores, nats. allowed: the largest gap that rounding explains.
    step: of bfloat16 at the larger of their logits.
    bordering: whether the one of the higher score lies at a filter's border.
    """

    prefix: Tokens
    pair: tuple[int, ...] = ()
    gap: float = float("inf")
    allowed: float = TIE
    step: float = 1.0
    bordering: bool = False

    @property
    def tie(self) -> bool:
        return self.gap <= self.allowed or self.bordering

    @property
    def in_steps(self) -> float:
        return self.gap / self.step


def parting(target: Along, request: Request, one: Rollout, other: Rollout, bfloat16: bool) -> Parting | None:
    """None where the responses are the same, and end for the same reason.

    target: in a finer dtype than the server's. bfloat16: what the server computes in; else it is float32.
    """
    at = first_difference(one.tokens, other.tokens)
    if at is None:
        return None if one.finish_reason == other.finish_reason else Parting(one.tokens)
    prefix, params = one.tokens[:at], request.params
    if at in (len(one.tokens), len(other.tokens)):
        return Parting(prefix)
    logits = target((*request.prompt, *prefix), (0,))[0]
    scores = scaled(logits, params, prefix)
    noise = gumbel(torch.tensor([params.sampling_seed]), torch.tensor([len(request.prompt) + at]), len(logits))[0]
    pair = (one.tokens[at], other.tokens[at])
    noisy = (scores + noise)[list(pair)]
    step = bfloat16_step(float(logits[list(pair)].abs().max()))
    return Parting(
        prefix,
        pair,
        gap=float((noisy[0] - noisy[1]).abs()),
        allowed=TIE_STEPS * step if bfloat16 else TIE,
        step=step,
        bordering=at_border(scores, pair[int(noisy.argmax())], params),
    )


def bfloat16_step(value: float) -> float:
    """Between a positive number and the next one that bfloat16 has."""
    return float(2.0 ** (torch.tensor(value).log2().floor() - 7))


def scaled(logits: torch.Tensor, params: SamplingParams, response: Tokens) -> torch.Tensor:
    """What the noise is added to after a response, [vocab] float64. What is forbidden, by a grammar or an early end, is
    left in."""
    counts = torch.bincount(torch.tensor(response, dtype=torch.int64), minlength=len(logits))
    logits = logits.double() - counts * (params.frequency_penalty or 0) - (counts > 0) * (params.presence_penalty or 0)
    repeated = torch.where(counts > 0, params.repetition_penalty or 1.0, 1.0)
    logits = torch.where(logits < 0, logits * repeated, logits / repeated)
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    return logits / params.temperature


def at_border(scores: torch.Tensor, token: int, params: SamplingParams) -> bool:
    """Whether a change of `TIE` in scores, or in the mass before a token, decides if a filter keeps it."""
    mine, probs = scores[token], scores.softmax(-1)
    surely, maybe = scores > mine + TIE, scores > mine - TIE  # more probable
    maybe[token] = False
    top_k, top_p, min_p = params.top_k or -1, params.top_p or 1.0, params.min_p or 0.0
    by_rank = top_k > 0 and int(surely.sum()) < top_k <= int(maybe.sum())
    by_mass = top_p < 1 and float(probs[surely].sum()) - TIE < top_p <= float(probs[maybe].sum()) + TIE
    by_share = min_p > 0 and abs(float(mine - scores.max() - torch.tensor(min_p).log())) <= TIE
    return by_rank or by_mass or by_share


@dataclass(frozen=True)
class Compared:
    """Responses against those that they should be. tokens: that were found the same, or parted. parted: which."""

    responses: int = 0
    tokens: int = 0
    parted: tuple[tuple[int, Parting], ...] = ()

    def __add__(self, other: "Compared") -> "Compared":
        return Compared(self.responses + other.responses, self.tokens + other.tokens, (*self.parted, *other.parted))

    @property
    def equal_share(self) -> float:
        return 1 - len(self.parted) / self.responses

    def figures(self, of: str = "") -> Figures:
        """of: ends their names."""
        ties = sum(each.tie for _, each in self.parted)
        return {
            f"responses{of}": self.responses,
            f"responses_equal_share{of}": self.equal_share,
            f"compared_tokens{of}": self.tokens,
            f"tie_divergences{of}": ties,
            f"non_tie_divergences{of}": len(self.parted) - ties,
        }


def compare(
    target: Along,
    asked: Sequence[Request],
    expected: Sequence[Rollout],
    given: Sequence[Rollout],
    bfloat16: bool = False,
) -> Compared:
    """Each request's two responses; as `parting`. What is no tie is told."""
    pairs = zip(asked, expected, given, strict=True)
    found = [parting(target, *each, bfloat16) for each in pairs]
    for request, each in zip(asked, found, strict=True):
        if each is not None and not each.tie:
            seed, after = request.params.sampling_seed, len(each.prefix)
            logging.warning("%s, seed %s: parts after %d tokens, by %.3g nats", request.kind, seed, after, each.gap)
    tokens = (len(e.tokens) if p is None else len(p.prefix) + 1 for e, p in zip(expected, found, strict=True))
    return Compared(len(found), sum(tokens), tuple((i, each) for i, each in enumerate(found) if each is not None))
