"""Drafts of history: what the running requests say goes into an index of this rank, and drafts come out of it.

All ranks hold the same index: what is added, and in which order, follows from the steps that they run alike. What is
read of it for the strategy changes nothing in it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from tlt_client import schemas
from tlt_client.schemas import HistoryLoad

from tlt_server.engine.requests.remembered import Asked, asked_of, digest, prompt_of
from tlt_server.errors import ConfigError
from tlt_server.history.calibration import Calibration
from tlt_server.history.compiled import make_index
from tlt_server.history.index import TAIL, Drafts, Ints, no_drafts, tail_of

EVERY = 4
"""Steps of the same requests from one look ahead to the next: as many as between two decisions (strategy/bandit.py)."""
COUNTED = ("written", "lookups", "found", "drafted", "accepted")


class Response:
    """Of one request, from its prefill on; a retracted one begins anew. slot: its number in the index. told: tokens of
    its output that are in there. version: of the target, that they are noted under."""

    def __init__(self, asked: Asked, slot: int) -> None:
        self.asked, self.slot = asked, slot
        self.told = self.version = 0


class Look(NamedTuple):
    """What was looked up for the strategy. told: how much of each request's output was known then."""

    reqs: Sequence[Any]
    told: Sequence[int]
    drafts: Drafts


class Histories:
    """The index of one rank, and who reads and writes it.

    capacity: tokens. slots: places of running requests; theirs in the request pool are their numbers here. deepest:
    tokens that an arm drafts at most. version: of the target that samples now, known alike on all ranks: a page of the
    index is of one.
    drafted: how many tokens each request had in the newest step that asked.
    """

    drafted: list[int]

    def __init__(self, capacity: int, slots: int, deepest: int, version: Callable[[], int] = lambda: 0) -> None:
        self.capacity, self.deepest, self.version = capacity, deepest, version
        self._index = make_index(capacity)
        self._spare = slots
        self._cleared: dict[str, int] = {}
        self._live: dict[int, Any] = {}
        self._came: list[Any] = []
        self._under_way: list[tuple[Sequence[Any], Any]] = []
        self._look: Look | None = None
        self._changed, self._steps = False, 0
        self.calibration = Calibration()
        self.counts, self._told = Counter[str](), Counter[str]()

    # -- what requests say --

    def begin(self, reqs: Iterable[Any]) -> None:
        """They are prefilled, or a chunk of them."""
        self.settle()
        self._changed = True
        for req in reqs:
            req.tlt_response = Response(asked_of(req), req.req_pool_idx)
            self._live[req.req_pool_idx] = req
            self._set_out(req)

    def launched(self, reqs: Sequence[Any], result: Any) -> None:
        """A step runs; its result is credited later."""
        self._under_way.append((tuple(reqs), result))

    def credited(self, given: Sequence[tuple[Any, int]], result: Any) -> None:
        """A result has come, and is about to be appended to the output of the requests that it counts for, so many
        tokens to each."""
        for place, (_, launched) in enumerate(self._under_way):
            if launched is result:
                del self._under_way[: place + 1]  # they come in order: what is still before it was lost
                break
        self._came += [req for req, _ in given]
        if (arm := getattr(result, "arm", None)) is not None and arm.of_history:
            self.counts["accepted"] += sum(count - 1 for _, count in given)
        self._steps += 1
        self._changed |= self._steps % EVERY == 0

    def settle(self) -> None:
        """Takes in what results have given since, as far as it stays."""
        came, self._came = self._came, []
        self._add([(req, ()) for req in came])
        for req in came:
            slot = req.tlt_response.slot
            if req.finished() and self._live.get(slot) is req:
                del self._live[slot]

    def _hear(self, reqs: Sequence[Any]) -> None:
        """Takes in what steps under way gave these requests: under overlap the one before, which is waited for. What
        is taken in beyond the end of one of them leads nowhere."""
        wanted = set(map(id, reqs))
        for of, result in self._under_way:
            result.copy_done.synchronize()
            given = zip(of, tokens_of(result, len(of)), strict=True)
            self._add([(req, tokens) for req, tokens in given if id(req) in wanted])

    def _add(self, given: Sequence[tuple[Any, Sequence[int]]]) -> None:
        """What is new in the outputs of requests, and what will come behind it."""
        version = self.version()
        slots: list[int] = []
        counts: list[int] = []
        new: list[int] = []
        for req, coming in given:
            response, output, before = req.tlt_response, req.output_ids_through_stop, len(new)
            if len(output) < response.told or not response.asked.writes:  # a grammar took something back
                self._set_out(req, coming)
                continue
            if response.version != version:
                response.version = version
                self._index.stamp([response.slot], version)
            new += output[response.told :]
            new += coming
            response.told = len(output) + len(coming)
            slots.append(response.slot)
            counts.append(len(new) - before)
        self._index.add(slots, counts, np.array(new, np.int32))
        self.counts["written"] += len(new)

    def _set_out(self, req: Any, coming: Sequence[int] = ()) -> None:
        """What a request says next follows upon its prompt, its output and this."""
        response, output = req.tlt_response, req.output_ids_through_stop
        response.told, response.version = len(output) + len(coming), self.version()
        if response.asked.takes_part:
            said = (*req.origin_input_ids[-TAIL:], *output[-TAIL:], *coming)
            key = response.asked.key(prompt_of(req), self._cleared)
            self._index.begin(response.slot, key, tail_of(said), response.version)

    # -- what they may say next --

    def draft(self, reqs: Sequence[Any], steps: int) -> Drafts:
        """For a step of these requests."""
        self.settle()
        self._hear(reqs)
        drafts = self._drafts(reqs, steps)
        self.counts["lookups"] += sum(req.tlt_response.asked.reads for req in reqs)
        self.counts["found"] += int((drafts.lengths > 0).sum())
        self.drafted = drafts.lengths.tolist()
        self.counts["drafted"] += sum(self.drafted)
        return drafts

    def _drafts(self, reqs: Sequence[Any], steps: int) -> Drafts:
        reads = [place for place, req in enumerate(reqs) if req.tlt_response.asked.reads]
        found = self._index.draft([reqs[place].tlt_response.slot for place in reads], steps)
        if len(reads) == len(reqs):
            return found
        drafts = no_drafts(len(reqs), steps)
        for every, some in zip(drafts, found, strict=True):
            every[reads] = some
        return drafts

    def foreseen(self) -> list[float] | None:
        """Expected accept length of a step of the present requests, by tokens drafted from one on, without waiting for
        the one under way: for others than before, and for the same now and then. None: as last time."""
        if not self._changed:
            return None
        self.settle()
        self._changed = False
        if self._look is not None:
            came = zip(self._look.reqs, self._look.told, strict=True)
            self.calibration.learn(self._look.drafts, [req.output_ids_through_stop[told:] for req, told in came])
        self._live = {slot: req for slot, req in self._live.items() if req.req_pool_idx == slot}  # some were retracted
        reqs = list(self._live.values())
        drafts = self._drafts(reqs, self.deepest)
        self._look = Look(reqs, [req.tlt_response.told for req in reqs], drafts) if reqs else None
        return self.calibration.lengths(drafts) if reqs else [1.0] * self.deepest

    # -- what others say --

    def load(self, given: HistoryLoad, vocabulary: int) -> None:
        """Takes in responses that are complete. ConfigError: a token beyond the vocabulary; nothing was taken in."""
        largest = max(map(max, (given.prompt, *given.responses)))
        if largest >= vocabulary:
            raise ConfigError(f"token {largest}: the model has {vocabulary}. Send ids of its own tokenizer")
        self.settle()
        self._changed = True
        version = self.version() if given.version is None else given.version
        key = Asked(namespace=given.namespace).key(digest(given.prompt), self._cleared)
        for response in given.responses:
            self._index.begin(self._spare, key, tail_of(given.prompt), version)
            self._index.add([self._spare], [len(response)], np.array(response, np.int32))
            self.counts["written"] += len(response)

    def forget(self, namespace: str | None) -> None:
        """All that was said, or what was within a namespace: that is found no more, and overwritten in time."""
        self.settle()
        self._look, self._changed = None, True
        if namespace is None:
            self._index = make_index(self.capacity)
        else:
            self._cleared[namespace] = self._cleared.get(namespace, 0) + 1
        for req in self._live.values():
            if namespace in (None, req.tlt_response.asked.namespace):
                self._set_out(req)

    # -- what there is to tell --

    def describe(self) -> schemas.History:
        """As our routes show it."""
        self.settle()
        counts = {name: self.counts[name] for name in COUNTED}
        return schemas.History(self._index.tokens, self.capacity, self._index.bytes, **counts)

    def untold(self) -> tuple[int, dict[str, int]]:
        """Tokens that are kept, and what was counted since the last time."""
        since = self.counts - self._told
        self._told = self.counts.copy()
        return self._index.tokens, since


def tokens_of(result: Any, count: int) -> list[list[int]]:
    """What a result gave each of `count` requests, copied to the CPU: a prefill a token, a decode step what it
    accepted."""
    rows: Ints = result.next_token_ids.numpy().reshape(count, -1)
    lens = [1] * count if result.accept_lens is None else result.accept_lens.tolist()
    return [row[:length].tolist() for row, length in zip(rows, lens, strict=True)]
