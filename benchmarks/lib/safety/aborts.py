"""Aborts at random steps, of all kinds: what comes back is what would have been generated, up to there.

Requests of every shape and every kind of end go on in waves, greedily, while the arm changes at random in each step, in
pools so small that some wait, come in chunks or are retracted. Each wave is aborted in one way: by name, all at once,
by a pause, or by clients that hang up.
"""

import asyncio
import json
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tlt_client import Client, StrategyUpdate
from tlt_client.schemas import Arm, SelectionBucket
from transformers import AutoTokenizer

from benchmarks.lib.servers import KEPT
from tlt_server.demo import default_paths
from tlt_server.demo.task import problems
from tlt_server.engine.cpu.torchvision import mend_torchvision
from tlt_server.process import running_server
from tlt_server.results import Figures

TIGHT = ["--chunked-prefill-size", "16", "--max-total-tokens", "1000", "--max-running-requests", "12"]
ARMS = (Arm(3, 1, 4), Arm(3, 4, 8), Arm(5, 2, 8), Arm(1, 1, 2), Arm(5, 4, 16))
SEVERAL = [word for a in ARMS for word in ("--arm", f"{a.num_steps},{a.topk},{a.num_draft_tokens}")]
SERVERS = {"overlapped": [], "not-overlapped": ["--disable-overlap-schedule"]}
ANY_ARM = StrategyUpdate("paper", epsilon=1.0, buckets=(SelectionBucket(1, (*ARMS, None)),))
"""Drawn anew for every step, no speculation among them."""

WAVE = 20
WITHIN_S = 0.5
"""A wave's requests come within it, and aborts within it after that the first came."""

KINDS: list[dict[str, Any]] = [
    {"max_new_tokens": 90},
    {"max_new_tokens": 40, "ignore_eos": True},
    {"max_new_tokens": 7},
    {"max_new_tokens": 80, "stop": ["so", "= "]},
    {"max_new_tokens": 80, "stop": ["1"], "no_stop_trim": True},
    {"max_new_tokens": 80, "stop_regex": r"[0-9]\+"},
    {"max_new_tokens": 80, "stop_token_ids": [20, 25], "min_new_tokens": 5},
    {"max_new_tokens": 40, "regex": r"(ab|cd){2,5}[0-9]{3}"},
]
OPENAI = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
Answer = dict[str, Any]


@dataclass
class Case:
    """A prompt and what ends its response; what plain decoding answers."""

    prompt: list[int]
    params: dict[str, Any]
    whole: Answer = field(default_factory=dict)


@dataclass
class Judge:
    """Holds answers against those of plain decoding."""

    tokenizer: Any
    aborts: int = 0
    beyond_end: int = 0
    without_rollout: int = 0

    def rollout(self, case: Case, answer: Answer) -> None:
        """One of /generate, as far as it came."""
        if why := self._fault(case, answer):
            logging.warning("%s: %s %s", why, case.params, {**answer, "whole": case.whole["output_ids"]})
            self.beyond_end += 1

    def _fault(self, case: Case, answer: Answer) -> str | None:
        meta, tokens = answer["meta_info"], answer["output_ids"]
        whole, reason = case.whole["output_ids"], meta["finish_reason"]
        spans = meta.get("weight_versions") or [{"end": 0}]
        logged = [each[1] for each in meta["output_token_logprobs"]]
        if tokens != whole[: len(tokens)]:
            return "no prefix"
        if logged != tokens or not len(tokens) == meta["completion_tokens"] == spans[-1]["end"]:
            return "fields of unequal length"
        if reason is None or reason["type"] == "abort":
            read = self.tokenizer.decode(tokens, skip_special_tokens=True)
            kept = answer["text"] == read if reason else read.startswith(answer["text"])
            return "at its end" if reason and tokens == whole else None if kept else "another text"
        if (tokens, answer["text"], reason) != (whole, case.whole["text"], case.whole["meta_info"]["finish_reason"]):
            return "another end"
        return None

    def no_rollout(self, answer: str) -> None:
        """An answer without output, or no answer."""
        logging.warning("no rollout: %s", answer)
        self.without_rollout += 1

    def completion(self, case: Case, body: Answer) -> None:
        """One of /v1/completions, which has no tokens."""
        choice, used = body["choices"][0], body["usage"]["completion_tokens"]
        text, whole = choice["text"], self.tokenizer.decode(case.whole["output_ids"], skip_special_tokens=True)
        reason, length = case.whole["meta_info"]["finish_reason"]["type"], len(case.whole["output_ids"])
        ended = (choice["finish_reason"], text, used) == (reason, case.whole["text"], length)
        cut = choice["finish_reason"] == "abort" and whole.startswith(text) and used < length
        if not (ended or cut):
            logging.warning("neither whole nor cut: %s %s", case.params, body)
            self.beyond_end += 1


class Traffic:
    """Requests to one server, in waves."""

    def __init__(self, http: httpx.AsyncClient, judge: Judge, draw: random.Random, cases: Sequence[Case]) -> None:
        self._http, self._judge, self._draw, self._cases = http, judge, draw, cases
        self._sent = 0
        self._open: dict[asyncio.Task[None], list[str]] = {}
        """The requests without an answer: the names of what they have asked for."""

    async def wave(self) -> None:
        """Requests of all shapes, then aborts of one way."""
        begun = [self._begin() for _ in range(WAVE)]
        await asyncio.sleep(self._draw.uniform(0.05, WITHIN_S))
        await self._draw.choice([self._by_name, self._all_at_once, self._by_a_pause, self._hang_up])()
        await asyncio.gather(*begun, return_exceptions=True)
        for request in begun:
            if not request.cancelled():
                request.result()

    async def _by_name(self) -> None:
        for request in self._half():
            await asyncio.sleep(self._draw.uniform(0, 2 * WITHIN_S / WAVE))
            if names := self._open.get(request):
                self._judge.aborts += 1
                await self._order("abort_request", rid=self._draw.choice(names))

    async def _all_at_once(self) -> None:
        self._judge.aborts += sum(map(len, self._open.values()))
        await self._order("abort_request", abort_all=True)

    async def _by_a_pause(self) -> None:
        self._judge.aborts += sum(map(len, self._open.values()))
        await self._order("pause_generation")
        await self._order("continue_generation")

    async def _hang_up(self) -> None:
        for request in self._half():
            await asyncio.sleep(self._draw.uniform(0, 2 * WITHIN_S / WAVE))
            self._judge.aborts += len(self._open.get(request, ()))
            request.cancel()

    def _half(self) -> list[asyncio.Task[None]]:
        return self._draw.sample(list(self._open), len(self._open) // 2)

    async def _order(self, route: str, **fields: Any) -> None:
        (await self._http.post(f"/{route}", json=fields)).raise_for_status()

    def _begin(self) -> asyncio.Task[None]:
        rid, self._sent = f"r{self._sent:06}.", self._sent + 1
        shape = self._draw.choice([self._alone, self._streamed, self._batch, self._group, self._completion])
        members = 3 if shape == self._batch else 2 if shape == self._group else 1
        cases = self._draw.sample(self._cases, members) if shape == self._batch else [self._draw.choice(self._cases)]
        request = asyncio.create_task(self._send(shape, rid, cases))
        self._open[request] = [f"{rid}{member}" for member in range(3)] if shape == self._batch else [rid]
        request.add_done_callback(self._open.pop)
        return request

    async def _send(self, shape: Any, rid: str, cases: list[Case]) -> None:
        await asyncio.sleep(self._draw.uniform(0, WITHIN_S))
        await shape(rid, cases)

    async def _ask(self, route: str, body: Answer) -> Any:
        """An answer, or None where there is none."""
        response = await self._http.post(route, json=body)
        if response.status_code == 200:
            return response.json()
        self._judge.no_rollout(response.text)
        return None

    async def _alone(self, rid: str, cases: list[Case]) -> None:
        if answer := await self._ask("/generate", asked(rid, cases[0])):
            self._judge.rollout(cases[0], answer)

    async def _batch(self, rid: str, cases: list[Case]) -> None:
        bodies = [asked(f"{rid}{number}", case) for number, case in enumerate(cases)]
        body = {name: [each[name] for each in bodies] for name in ("rid", "input_ids", "sampling_params")}
        for case, answer in zip(
            cases, await self._ask("/generate", body | {"return_logprob": True}) or [], strict=False
        ):
            self._judge.rollout(case, answer)

    async def _group(self, rid: str, cases: list[Case]) -> None:
        body = asked(rid, cases[0])
        for answer in await self._ask("/generate", body | {"sampling_params": cases[0].params | {"n": 2}}) or []:
            self._judge.rollout(cases[0], answer)

    async def _streamed(self, rid: str, cases: list[Case]) -> None:
        body = asked(rid, cases[0]) | {"stream": True}
        answer: Answer = {}
        async with self._http.stream("POST", "/generate", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    answer = json.loads(line.removeprefix("data: "))
                    if "meta_info" in answer:
                        self._judge.rollout(cases[0], answer)
        if not answer.get("meta_info", {}).get("finish_reason"):
            self._judge.no_rollout(str(answer))

    async def _completion(self, rid: str, cases: list[Case]) -> None:
        params = {OPENAI.get(name, name): value for name, value in cases[0].params.items()}
        body = {"model": "default", "prompt": cases[0].prompt, "rid": rid, **params}
        if answer := await self._ask("/v1/completions", body):
            self._judge.completion(cases[0], answer)


def asked(rid: str, case: Case) -> Answer:
    return {"rid": rid, "input_ids": case.prompt, "sampling_params": case.params, "return_logprob": True}


def cases(url: str, draw: random.Random, tokenizer: Any) -> list[Case]:
    """A prompt for each kind of end, four times, with what the server answers without speculation."""
    with Client(url) as client, httpx.Client(base_url=url, timeout=120) as http:
        client.set_strategy(StrategyUpdate("off"))
        found = []
        for problem, kind in zip(problems(4 * len(KINDS), seed=draw.randrange(1000)), 4 * KINDS, strict=True):
            case = Case(tokenizer.encode(problem.prompt), {"temperature": 0, **kind})
            case.whole = http.post("/generate", json=asked("whole", case)).raise_for_status().json()
            found.append(case)
        client.set_strategy(ANY_ARM)
    return found


async def disturb(url: str, judge: Judge, draw: random.Random, count: int) -> None:
    """Waves until so many aborts were made."""
    known = await asyncio.to_thread(cases, url, draw, judge.tokenizer)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=KEPT) as http:
        traffic = Traffic(http, judge, draw, known)
        while judge.aborts < count:
            await traffic.wave()


def measure(count: int, seed: int, logs: Path) -> Figures:
    """Figures of `count` aborts, half of them with the scheduler's overlap."""
    draw = random.Random(seed)
    mend_torchvision()  # transformers imports it
    judge = Judge(AutoTokenizer.from_pretrained(default_paths()[0]))
    for number, (name, flags) in enumerate(SERVERS.items(), start=1):
        arguments = [*SEVERAL, *TIGHT, *flags, "--random-seed", str(seed)]
        with running_server(arguments, logs / f"aborts-{name}.log") as url:
            asyncio.run(disturb(url, judge, draw, count * number // len(SERVERS)))
    return {
        "aborts": judge.aborts,
        "aborts_beyond_end": judge.beyond_end,
        "aborted_without_rollout": judge.without_rollout,
    }
