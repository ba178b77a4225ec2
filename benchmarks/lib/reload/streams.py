"""Greedy streams while a server's weights change: rounds of the same requests, and whether any output differs."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from time import monotonic
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from benchmarks.lib.divergences import divergences, first_difference
from benchmarks.lib.reload.steps import Span
from benchmarks.lib.servers import Request, Server, tokens_of
from tlt_server.demo.lossless import Tokens
from tlt_server.demo.reference import Reference
from tlt_server.engine.decode.steplog import SettledStep, read_steps
from tlt_server.launch import has_gpu

T = TypeVar("T")


class Round(NamedTuple):
    """All streams once.

    name: begins their rids.
    since: bytes of the log before it.
    outputs: empty for a failed request.
    """

    name: str
    since: int
    span: Span
    outputs: Sequence[Tokens]


@dataclass
class Streams:
    """The same requests again and again, all at once, `tokens` tokens each, past every end.

    log: the server's log of settled steps.
    """

    server: Server
    prompts: Sequence[Tokens]
    tokens: int
    log: Path
    _rounds: int = field(default=0, init=False)

    def round(self, prompts: Sequence[Tokens] | None = None, tokens: int | None = None) -> Round:
        """One round, of these prompts or of others."""
        prompts, self._rounds = prompts or self.prompts, self._rounds + 1
        name = f"r{self._rounds}"
        params = {"temperature": 0, "max_new_tokens": tokens or self.tokens, "ignore_eos": True}
        requests: list[Request] = [(prompt, params) for prompt in prompts]
        rids = [f"{name}-{i}" for i in range(len(prompts))]
        since, began = self.log.stat().st_size, monotonic()
        answers = self.server.ask(requests, at_once=len(requests), together=len(requests), rid=rids)
        outputs = [tokens_of(answer) if answer else () for answer in answers]
        return Round(name, since, Span(began, monotonic()), outputs)

    def steps_of(self, round_: Round) -> list[SettledStep]:
        """A round's steps, with the number of a request for its rid."""
        begins = f"{round_.name}-"
        return [
            replace(
                step,
                tokens={rid.removeprefix(begins): n for rid, n in step.tokens.items() if rid.startswith(begins)},
            )
            for step in read_steps(self.log, round_.since)
        ]


def beside(stream: Callable[[], T], work: Callable[[], None]) -> list[T]:
    """What `stream` gave, again and again for as long as `work` takes, and the last time to its end."""
    over, given = Event(), []

    def go_on() -> None:
        while not over.is_set():
            given.append(stream())

    with ThreadPoolExecutor(1) as pool:
        streaming = pool.submit(go_on)
        try:
            work()
        finally:
            over.set()
        streaming.result()
    return given


class Verdict(NamedTuple):
    """On responses that should be those of an undisturbed server.

    mismatched: differ, and not by a tie (benchmarks/lib/divergences.py).
    tied: differ by a tie. On a CPU, in float32, none is: there every difference is a mismatch.
    """

    responses: int
    mismatched: int
    tied: int

    @property
    def tie_rate(self) -> float:
        return self.tied / self.responses


def judged(
    target: Callable[[], Reference],
    prompts: Sequence[Tokens],
    expected: Sequence[Tokens],
    rounds: Sequence[Sequence[Tokens]],
) -> Verdict:
    """Compares rounds of responses; failed requests, whose outputs are empty, are no responses.

    Args:
        target: in float32, its logits say what is a tie; called where there is a GPU and outputs differ.
        prompts, expected: the requests, and what they were answered undisturbed.
        rounds: what they were answered in each round.
    """
    given = [(p, e, g) for outputs in rounds for p, e, g in zip(prompts, expected, outputs, strict=True) if e and g]
    differ = [each for each in given if each[1] != each[2]]
    if not differ or not has_gpu():
        return Verdict(len(given), len(differ), 0)
    parted = [_up_to_difference(*each) for each in differ]
    kinds = list(dict.fromkeys(parted))  # many part at the same place
    found = dict(zip(kinds, divergences(target(), *zip(*kinds, strict=True)), strict=True))
    tied = sum(found[each].tie for each in parted)
    return Verdict(len(given), len(differ) - tied, tied)


def _up_to_difference(prompt: Tokens, one: Tokens, other: Tokens) -> tuple[Tokens, Tokens, Tokens]:
    """Two responses up to the first token in which they differ."""
    end = (first_difference(one, other) or 0) + 1
    return prompt, one[:end], other[:end]
