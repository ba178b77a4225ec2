"""Are greedy answers with speculation those without? Where they part, the server itself says whether it was undecided.

No reference in float32 is at hand of a target in fp8, whose rounding is coarser than bfloat16's: so plain decoding in
smaller batches is held against plain decoding too, as a control.
"""

from collections.abc import Callable, Sequence

from benchmarks.lib.divergences import first_difference
from benchmarks.lib.servers import Request, Server, tokens_of
from benchmarks.lib.strategies import OFF, strategy
from tlt_server.demo.lossless import Tokens
from tlt_server.errors import ServerFailed
from tlt_server.results import Figures

TOKENS = 128
TIE = 0.5
"""Nats: eight steps of bfloat16 at a logit of 8 to 16, where the embedded model's likeliest tokens lie, twice what is a
tie in bfloat16 alone (divergences.py)."""
LIKELIEST = 20
"""Tokens whose logprobs a server is asked for; one that is not among them is no tie."""


def compare(server: Server, prompts: Sequence[Tokens], between: Callable[[], Figures]) -> Figures:
    """Plain decoding; in batches of an eighth; then, after what happens between, the arm of a server that has one."""
    expected = _answers(server, prompts, len(prompts), mode=OFF)
    control = _answers(server, prompts, max(1, len(prompts) // 8), mode=OFF)
    figures = between()
    given = _answers(server, prompts, len(prompts), mode="pinned")
    strategy(server, mode=OFF)
    figures |= {"greedy_responses": len(prompts)}
    for name, answers in (("", given), ("_control", control)):
        gaps = _gaps(server, prompts, expected, answers)
        figures |= {
            f"greedy_divergences{name}": len(gaps),
            f"greedy_non_ties{name}": sum(gap > TIE for gap in gaps),
            f"greedy_largest_gap{name}": max(gaps, default=0.0),
        }
    return figures


def requests_of(prompts: Sequence[Tokens]) -> list[Request]:
    """Greedy, past every end."""
    return [(prompt, {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}) for prompt in prompts]


def _answers(server: Server, prompts: Sequence[Tokens], at_once: int, *, mode: str) -> list[Tokens]:
    strategy(server, mode=mode)
    answers = server.ask(requests_of(prompts), at_once=at_once)
    if None in answers:
        raise ServerFailed(f"{answers.count(None)} greedy requests failed with strategy {mode}")
    return [tokens_of(answer) for answer in answers if answer]


def _gaps(
    server: Server, prompts: Sequence[Tokens], expected: Sequence[Tokens], given: Sequence[Tokens]
) -> list[float]:
    """Of each pair of answers that parts, how far the two tokens' logprobs lie apart after what both have before."""
    gaps = []
    for prompt, one, other in zip(prompts, expected, given, strict=True):
        if (at := first_difference(one, other)) is None:
            continue
        params = {"temperature": 0, "max_new_tokens": 1}
        [answer] = server.ask(
            [((*prompt, *one[:at]), params)], at_once=1, return_logprob=True, top_logprobs_num=LIKELIEST
        )
        likeliest = answer["meta_info"]["output_top_logprobs"][0] if answer else []
        found = {token: logprob for logprob, token, *_ in likeliest}
        pair = [found.get(each[at], float("-inf")) for each in (one, other)]
        gaps.append(abs(pair[0] - pair[1]) if min(pair) > float("-inf") else float("inf"))
    return gaps
