"""A scheduler that a tap is tested with: launches, settles, ends, retracts and aborts requests at random.

A state is a number that says which position of which request it is of; nodes that were not accepted have -1.
"""

import random
from array import array
from collections import defaultdict, deque
from types import SimpleNamespace as Made
from typing import Any

import torch

from tlt_server.engine.features.pinned import Rows, States
from tlt_server.engine.features.quota import Follow
from tlt_server.engine.features.tap import Tap, send_features
from tlt_server.engine.weights.state import Stamp

MOST = 4


class Everybody:
    """A quota that follows all requests whose rid is not odd, and notes what it is told."""

    def __init__(self) -> None:
        self.ended_on: list[Follow] = []

    def admit(self, rid: str) -> Follow:
        return Follow(over=True) if rid.endswith("odd") else Follow(on=True)

    def ended(self, follow: Follow) -> None:
        self.ended_on.append(follow)

    def prompts(self, nbytes: int) -> None:
        assert nbytes >= 0

    def step(self, nbytes: int, requests: int) -> bool:
        assert requests or not nbytes
        return True

    def weigh(self, running: list[tuple[Follow, int]]) -> None:
        assert all(isinstance(follow, Follow) and length > 0 for follow, length in running)


class Receiver:
    """PinnedMemory and sender in one: states by rid and position, as they would be read at the other end."""

    def __init__(self) -> None:
        self.found: dict[str, dict[int, list[tuple[int, float, int]]]] = defaultdict(lambda: defaultdict(list))
        self.rows: list[Rows] = []

    def ship(self, rows: list[Rows], states: States) -> list[Rows]:
        self.rows += rows
        for each in rows:
            assert each.partial == (each.target_version % 2 == 1)
            assert each.prompt > 0
            for offset, token in enumerate(each.tokens):
                state = float(states.hidden[each.row + offset, 0])
                self.found[each.rid][each.start + offset].append((token, state, each.target_version))
        return rows

    def take(self, batch: list[Rows]) -> None:
        pass


class Engine:
    """Upstream's scheduler, as far as tokens go: launches, settles so many steps later, ends, retracts, aborts."""

    def __init__(self, draw: random.Random, lag: int, nodes: int = 6) -> None:
        self.draw, self.lag, self.nodes, self.version = draw, lag, nodes, 0
        self.receiver = Receiver()
        self.tap = Tap(Everybody(), self.receiver, self.receiver)  # type: ignore[arg-type]
        self.running: list[Any] = []
        self.waiting: list[Any] = []
        self.under_way: deque[tuple[Any, Any, Any]] = deque()
        self.all: list[Any] = []

    def request(self) -> None:
        prompt, length = self.draw.randint(1, 12), self.draw.randint(1, 15)
        number = len(self.all)
        req = Made(
            rid=f"{number}{self.draw.choice(['', 'odd'])}",
            number=number,
            origin_input_ids=array("q", [token(number, position) for position in range(prompt)]),
            output_ids=array("q"),
            limit=length,
            input_embeds=None,
            finished_len=None,
            is_retracted=False,
            over=False,
            computed=0,
            cached=self.draw.randint(0, prompt - 1),
        )
        req.finished = lambda: req.over
        vars(req)["output_ids_through_stop"] = req.output_ids
        self.all.append(req)
        self.waiting.append(req)

    def prefill(self) -> None:
        """The first waiting requests, the last of which may get a chunk only."""
        reqs = [self.waiting.pop(0) for _ in range(min(self.draw.randint(1, 3), len(self.waiting)))]
        starts, counts = [], []
        for req in reqs:
            req.is_retracted = False
            whole = len(req.origin_input_ids) + len(req.output_ids)
            starts.append(max(req.computed, req.cached))
            counts.append(whole - starts[-1])
        if counts[-1] > 1 and self.draw.random() < 0.5:
            counts[-1] = self.draw.randint(1, counts[-1] - 1)
        states = [
            state(req, p) for req, start, n in zip(reqs, starts, counts, strict=True) for p in range(start, start + n)
        ]
        batch = Made(reqs=reqs, prefix_lens=starts, extend_lens=counts)
        result = self.result(states)
        self.tap.take_chunks(result, self.tap.chunks(batch))
        sampled = []
        for req, start, count in zip(reqs, starts, counts, strict=True):
            req.computed = start + count
            whole = req.computed == len(req.origin_input_ids) + len(req.output_ids)
            sampled.append(int(whole))
            (self.running.append if whole else lambda req: self.waiting.insert(0, req))(req)
        self.launched(reqs, result, sampled)

    def decode(self) -> None:
        """Lengths on the GPU run ahead of those that are settled: `computed` is theirs."""
        accepted = [self.draw.randint(1, min(MOST, self.nodes)) for _ in self.running]
        states = []
        for req, count in zip(self.running, accepted, strict=True):
            states += [state(req, req.computed + k) if k < count else -1.0 for k in range(self.nodes)]
            req.computed += count
        result = self.result(states)
        self.tap.take_step(list(self.running), result, MOST)
        self.launched(list(self.running), result, accepted)

    def result(self, states: list[float]) -> Any:
        column = torch.tensor(states)[:, None]
        output = Made(hidden_states=column, last_hidden_states=None)
        return Made(logits_output=output, stamp=Stamp("", self.version, self.version % 2 == 1, 0))

    def launched(self, reqs: list[Any], result: Any, counts: list[int]) -> None:
        result.logits_output = None  # what a graph is about to overwrite
        self.under_way.append((reqs, result, counts))
        if len(self.under_way) > self.lag:
            self.settle()

    def settle(self) -> None:
        reqs, result, counts = self.under_way.popleft()
        live = [(req, n) for req, n in zip(reqs, counts, strict=True) if not (req.over or req.is_retracted)]
        result.tapped.credit(live, result.stamp)
        for req, count in live:
            before = len(req.output_ids)
            prompt = len(req.origin_input_ids)
            req.output_ids.extend(token(req.number, prompt + before + k) for k in range(count))
            if count and len(req.output_ids) >= req.limit:
                self.end(req, req.limit)
        send_features(result)

    def end(self, req: Any, length: int) -> None:
        req.over, req.finished_len = True, length
        req.output_ids_through_stop = req.output_ids[:length]
        for where in (self.running, self.waiting):
            if req in where:
                where.remove(req)

    def retract(self) -> None:
        """What is under way for it is not settled; it is computed again."""
        while self.under_way:
            self.settle()
        for req in self.draw.sample(self.running, self.draw.randint(0, len(self.running))):
            self.running.remove(req)
            req.is_retracted, req.computed, req.cached = True, 0, self.draw.randint(0, len(req.origin_input_ids) - 1)
            self.waiting.append(req)

    def abort(self) -> None:
        if self.running:
            req = self.draw.choice(self.running)
            self.end(req, len(req.output_ids))

    def publish(self) -> None:
        self.version += 1

    def turn(self) -> None:
        choices = [self.request, self.prefill, self.decode, self.decode, self.decode, self.retract, self.publish]
        act = self.draw.choices([*choices, self.abort], weights=[4, 6, 4, 4, 4, 1, 1, 1])[0]
        if (act != self.prefill or self.waiting) and (act != self.decode or self.running):
            act()

    def drain(self) -> None:
        while self.running or self.waiting or self.under_way:
            if self.waiting:
                self.prefill()
            elif self.running:
                self.decode()
            else:
                self.settle()


def token(request: int, position: int) -> int:
    return 1000 * request + position


def state(req: Any, position: int) -> float:
    return float(token(req.number, position))
