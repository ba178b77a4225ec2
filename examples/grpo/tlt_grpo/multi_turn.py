"""Multi-turn rollouts with a tool: the model writes a product out, and a calculator says what each line comes to.

    347*6: 6*7=42 4*6=24+4=28 3*6+2=20 so 2082

A turn ends at ` so `, which calls the tool: it puts behind that what the line's head comes to, and the model goes on.
The context grows by both, so that each turn finds those before it in the prefix cache. By `/generate` it grows by the
tokens that were sampled, as a trainer needs it; by `/v1/chat/completions` by their text, which is tokenized anew.

    python -m tlt_grpo.multi_turn --url http://127.0.0.1:30000 --route chat
"""

import re
from enum import StrEnum
from typing import Annotated, Any, NamedTuple, Protocol

import httpx
import msgspec
import typer
from tlt_client import Client, SamplingParams, sample_seed
from tlt_server.demo.task import Problem, grade, problems

CALL = " so "
LINE = re.compile(r"^(\d+)([*+])(\d+): .*$")


class Turn(NamedTuple):
    """What one request gave."""

    text: str
    calls: bool
    """Whether it ended by calling the tool."""
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, those that were in the prefix cache."""
    ignored: tuple[str, ...]
    """Fields that the server does not honour."""


class Route(Protocol):
    """A conversation with the server about one problem; `max_new_tokens` are of a turn."""

    def turn(self, sampling: SamplingParams) -> Turn: ...
    def add(self, answer: str) -> None:
        """The tool's, to what was sampled."""


class Tokens:
    """By token ids. `context` is all of them; `sampled` says which are the policy's own: the others bear no loss."""

    def __init__(self, client: Client, http: httpx.Client, problem: Problem) -> None:
        self._client, self._http = client, http
        self.context = self._tokens(problem.prompt)
        self.sampled = [False] * len(self.context)

    def turn(self, sampling: SamplingParams) -> Turn:
        rollout = self._client.generate(self.context, sampling)
        self._grow(rollout.tokens, sampled=True)
        calls = rollout.finish_reason.matched == CALL
        return Turn(rollout.text, calls, rollout.prompt_tokens, rollout.cached_tokens, rollout.ignored)

    def add(self, answer: str) -> None:
        self._grow(self._tokens(answer), sampled=False)

    def _grow(self, tokens: Any, *, sampled: bool) -> None:
        self.context = [*self.context, *tokens]
        self.sampled += [sampled] * len(tokens)

    def _tokens(self, text: str) -> list[int]:
        answer = self._http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
        tokens: list[int] = answer.raise_for_status().json()["tokens"]
        return tokens


class Chat:
    """By messages: the assistant's last one is continued."""

    def __init__(self, http: httpx.Client, problem: Problem) -> None:
        self._http = http
        self._question, self._said = problem.prompt.removesuffix("\n"), ""

    def turn(self, sampling: SamplingParams) -> Turn:
        said = [{"role": "assistant", "content": self._said}] if self._said else []
        asked = {
            "model": "default",
            "messages": [{"role": "user", "content": self._question}, *said],
            "continue_final_message": bool(said),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.sampling_seed,
            "stop": sampling.stop,
            "no_stop_trim": True,
            "return_meta_info": True,
        }
        answer = self._http.post("/v1/chat/completions", json=asked).raise_for_status().json()
        (choice,) = answer["choices"]
        text, meta = choice["message"]["content"] or "", choice["meta_info"]
        self._said += text
        ignored = tuple(answer.get("meta_info", {}).get("ignored", ()))
        return Turn(text, choice["matched_stop"] == CALL, meta["prompt_tokens"], meta["cached_tokens"], ignored)

    def add(self, answer: str) -> None:
        self._said += answer


def calculated(line: str) -> str | None:
    """What a line asks for; None where it asks for nothing that the tool knows."""
    if (asked := LINE.match(line)) is None:
        return None
    left, sign, right = int(asked[1]), asked[2], int(asked[3])
    return str(left * right if sign == "*" else left + right)


def converse(route: Route, sampling: SamplingParams, most_turns: int) -> tuple[str, list[Turn]]:
    """The whole response, the tool's part of it too, and its turns; of one seed, each begins where the last ended."""
    text, turns = "", list[Turn]()
    while len(turns) < most_turns:
        turns.append(route.turn(sampling))
        text += turns[-1].text
        answer = calculated(text.rpartition("\n")[2]) if turns[-1].calls else None
        if answer is None:
            break
        route.add(answer)
        text += answer
    return text, turns


class By(StrEnum):
    TOKENS = "tokens"
    CHAT = "chat"


def main(
    url: Annotated[str, typer.Option(help="Of the rollout server.")],
    route: Annotated[By, typer.Option(help="/generate, or /v1/chat/completions.")] = By.TOKENS,
    count: Annotated[int, typer.Option(help="Problems.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the problems, and of sampling.")] = 0,
) -> None:
    """Answer problems with a calculator's help; a line of JSON for each."""
    sampling = SamplingParams(temperature=1.0, max_new_tokens=256, stop=CALL, no_stop_trim=True)
    with Client(url) as client, httpx.Client(base_url=url, timeout=60) as http:
        for number, problem in enumerate(problems(count, seed)):
            begun = Tokens(client, http, problem) if route is By.TOKENS else Chat(http, problem)
            seeded = msgspec.structs.replace(sampling, sampling_seed=sample_seed(seed, number))
            text, turns = converse(begun, seeded, most_turns=32)
            found = {"text": text, "right": grade(problem, text), "turns": [turn._asdict() for turn in turns]}
            typer.echo(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    typer.run(main)
