"""Drafts of history: what the running requests say goes into an index of this rank, and drafts come out of it.

All ranks hold the same index: what is added, and in which order, follows from the steps that they run alike. What is
read of it for the strategy changes nothing in it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tlt_client import schemas
from tlt_client.schemas import HistoryLoad

from tlt_server.engine.requests.remembered import Asked, Batch, Response, asked_of, digest, prompt_of
from tlt_server.errors import ConfigError
from tlt_server.history.compiled import make_index
from tlt_server.history.foresight import Foresight
from tlt_server.history.index import DEEPEST, TAIL, Drafts, Ints, no_drafts, tail_of

COUNTED = ("written", "lookups", "found", "drafted", "accepted")


class Step:
    """One that was launched. heard: which of its batch's tokens were taken in before it was credited."""

    def __init__(self, batch: Batch, result: Any, prefill: bool) -> None:
        self.batch, self.result, self.prefill = batch, result, prefill
        self.heard: NDArray[np.bool_] | None = None

    def hear(self, which: NDArray[np.bool_]) -> None:
        """These tokens are taken in now."""
        self.heard = which

    def tokens(self) -> tuple[Ints, Ints]:
        """Of each request."""
        return tokens_of(self.result, len(self.batch.reqs))


def tokens_of(result: Any, requests: int) -> tuple[Ints, Ints]:
    """What a result gave each of so many requests: rows, and how many of each count. A prefill a token, a decode step
    what it accepted. Under overlap they were copied to the CPU."""
    rows: Ints = result.next_token_ids.cpu().numpy().reshape(requests, -1)
    rows = rows.astype(np.int32, copy=False)
    accepted = result.accept_lens
    return rows, np.ones(len(rows), np.int32) if accepted is None else accepted.cpu().numpy()


class Histories:
    """The index of one rank, and who reads and writes it.

    capacity: tokens. slots: places of running requests; theirs in the request pool are their numbers here. deepest:
    tokens that an arm drafts at most. version: of the target that samples now, known alike on all ranks: a page of the
    index is of one.
    drafted: how many tokens each request had in the newest step that asked.
    """

    drafted: list[int]

    def __init__(self, capacity: int, slots: int, deepest: int, version: Callable[[], int] = lambda: 0) -> None:
        self.capacity, self.deepest, self.version = capacity, min(deepest, DEEPEST), version
        self._index = make_index(capacity)
        self._spare, self._told = slots, np.zeros(slots + 1, np.int64)
        self._stamped = 0
        self._cleared: dict[str, int] = {}
        self._live = dict[int, Any]()
        self._batch: Batch | None = None
        self._under_way: list[Step] = []
        self._credited: list[tuple[Step, Sequence[tuple[Any, int]], int]] = []
        self._foresight = Foresight(slots, self.deepest)
        self.counts, self._shown = Counter[str](), Counter[str]()

    # -- what requests say --

    def begin(self, reqs: Iterable[Any]) -> None:
        """They are prefilled, or a chunk of them."""
        self.settle()
        self._stamp(self.version())
        self._batch = None
        for req in reqs:
            req.tlt_response = Response(asked_of(req), req.req_pool_idx)
            self._live[req.req_pool_idx] = req
            self._set_out(req)
            self._foresight.begun([req.req_pool_idx])

    def launched(self, reqs: Sequence[Any], result: Any, *, prefill: bool = False) -> None:
        """A step runs; its result is credited later."""
        self._under_way.append(Step(self._batch_of(reqs), result, prefill))

    def credited(self, given: Sequence[tuple[Any, int]], result: Any) -> None:
        """A result has come, and is about to be appended to the output of the requests that it counts for, so many
        tokens to each."""
        for place, step in enumerate(self._under_way):
            if step.result is result:
                del self._under_way[: place + 1]  # they come in order: what is still before it was lost
                # by what is active now, not when it is taken in, which is at another time on other ranks
                self._credited.append((step, given, self.version()))
                break
        if (arm := getattr(result, "arm", None)) is not None and arm.of_history:
            self.counts["accepted"] += sum(count for _, count in given) - len(given)
        self._foresight.stepped()

    def settle(self) -> None:
        """Takes in what results have given since, as far as it stays."""
        credited, self._credited = self._credited, []
        for step, given, version in credited:
            self._stamp(version)
            self._settle(step, given)

    def _settle(self, step: Step, given: Sequence[tuple[Any, int]]) -> None:
        batch, came = step.batch, step.batch.plain
        ended = [req for req, _ in given if req.finished_reason is not None]
        for req in self._alone(step, given, ended):
            self._follow(req)
        for req in ended:
            if self._live.get(slot := req.tlt_response.slot) is req:
                del self._live[slot]
            self._foresight.changed()
        if step.prefill or step.heard is batch.plain:
            return
        if len(given) < len(batch.reqs):
            came = came & batch.among(req for req, _ in given)
        if ended:
            came = came & ~batch.among(ended)
        if step.heard is not None:
            came = came & ~step.heard
        if came.any():
            self._write(batch, came, *step.tokens())

    def _alone(self, step: Step, given: Sequence[tuple[Any, int]], ended: list[Any]) -> list[Any]:
        """Whose output is looked at: of a prefill all, for a chunk gives nothing; else who may have less than came."""
        if step.prefill:
            return [req for req, _ in given if req.tlt_response.asked.takes_part]
        if not step.batch.alone:
            return ended
        alone = step.batch.alone
        return [req for req, _ in given if id(req) in alone or req.finished_reason is not None]

    def _hear(self, batch: Batch) -> None:
        """Takes in what steps under way gave these requests: under overlap the one before, which is waited for. What
        is taken in beyond the end of one of them leads nowhere."""
        for step in self._under_way:
            if step.heard is not None:
                continue
            step.result.copy_done.synchronize()
            self._stamp(self.version())
            before, (rows, lengths) = step.batch, step.tokens()
            wanted = None if before is batch else before.among(batch.reqs)
            step.hear(taken := before.plain if wanted is None else wanted & before.plain)
            self._write(before, taken, rows, lengths)
            for row, req in enumerate(before.reqs if before.alone else ()):
                if id(req) in before.alone and (wanted is None or wanted[row]):
                    self._follow(req, rows[row, : lengths[row]].tolist())

    def _write(self, batch: Batch, which: NDArray[np.bool_], rows: Ints, lengths: Ints) -> None:
        """Rows of tokens, the first ones of each as they count."""
        slots = batch.slots
        if which is not batch.plain or not batch.all_plain:
            slots, rows, lengths = slots[which], rows[which], lengths[which]
        self._index.add(slots, lengths, rows)
        self._told[slots] += lengths
        self.counts["written"] += int(lengths.sum())

    def _follow(self, req: Any, coming: Sequence[int] = ()) -> None:
        """One request's output as it is now, and what will come behind it."""
        response, output = req.tlt_response, req.output_ids_through_stop
        told = int(self._told[response.slot])
        if not response.asked.writes or len(output) < told:  # a grammar took something back
            self._set_out(req, coming)
            return
        new = np.array([*output[told:], *coming], np.int32)
        self._index.add([response.slot], [len(new)], new)
        self._told[response.slot] += len(new)
        self.counts["written"] += len(new)

    def _stamp(self, version: int) -> None:
        """What is said from here on, these weights have said."""
        if version != self._stamped:
            self._stamped = version
            taking_part = [slot for slot, req in self._live.items() if req.tlt_response.asked.takes_part]
            self._index.stamp(taking_part, version)

    def _set_out(self, req: Any, coming: Sequence[int] = ()) -> None:
        """What a request says next follows upon its prompt, its output and this."""
        response, output = req.tlt_response, req.output_ids_through_stop
        self._told[response.slot] = len(output) + len(coming)
        if response.asked.takes_part:
            said = (*req.origin_input_ids[-TAIL:], *output[-TAIL:], *coming)
            key = response.asked.key(prompt_of(req), self._cleared)
            self._index.begin(response.slot, key, tail_of(said), self._stamped)

    def _batch_of(self, reqs: Sequence[Any]) -> Batch:
        if self._batch is None or not self._batch.is_of(reqs):
            self._batch = Batch(reqs)
            self._foresight.changed()
        return self._batch

    # -- what they may say next --

    def draft(self, reqs: Sequence[Any], steps: int) -> Drafts:
        """For a step of these requests."""
        self.settle()
        batch = self._batch_of(reqs)
        self._hear(batch)
        drafts = self._drafts(batch, steps)
        self.counts["lookups"] += batch.reading
        self.counts["found"] += int(np.count_nonzero(drafts.lengths))
        self.drafted = drafts.lengths.tolist()
        self.counts["drafted"] += sum(self.drafted)
        return drafts

    def _drafts(self, batch: Batch, steps: int) -> Drafts:
        if batch.reading == len(batch.reqs):
            return self._foresight.draft(self._index, batch.slots, steps)
        drafts, reads = no_drafts(len(batch.reqs), steps), batch.reads
        for every, some in zip(drafts, self._foresight.draft(self._index, batch.slots[reads], steps), strict=True):
            every[reads] = some
        return drafts

    def foreseen(self) -> list[float] | None:
        """Expected accept length of a step of the present requests, by tokens drafted from one on, without waiting for
        the one under way. None: as last time."""
        if not self._foresight.due:
            return None
        self.settle()
        return self._foresight.lengths(self._index, self._present)

    def _present(self) -> tuple[list[int], int]:
        """Who reads of the requests that run, and how many these are."""
        self._live = {slot: req for slot, req in self._live.items() if req.req_pool_idx == slot}  # some were retracted
        return [slot for slot, req in self._live.items() if req.tlt_response.asked.reads], len(self._live)

    # -- what others say --

    def load(self, given: HistoryLoad, vocabulary: int) -> None:
        """Takes in responses that are complete. ConfigError: a token beyond the vocabulary; nothing was taken in."""
        largest = max(map(max, (given.prompt, *given.responses)))
        if largest >= vocabulary:
            raise ConfigError(f"token {largest}: the model has {vocabulary}. Send ids of its own tokenizer")
        self.settle()
        self._foresight.begun(self._live)
        version = self.version() if given.version is None else given.version
        key = Asked(namespace=given.namespace).key(digest(given.prompt), self._cleared)
        for response in given.responses:
            self._index.begin(self._spare, key, tail_of(given.prompt), version)
            self._index.add([self._spare], [len(response)], np.array(response, np.int32))
            self.counts["written"] += len(response)

    def forget(self, namespace: str | None) -> None:
        """All that was said, or what was within a namespace: that is found no more, and overwritten in time."""
        self.settle()
        self._foresight.begun(self._live)
        if namespace is None:
            self._index.clear()
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
        since = self.counts - self._shown
        self._shown = self.counts.copy()
        return self._index.tokens, since
