"""A thread that sends pinned batches to the drafter trainer: it owns the socket, and all that takes time is its."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from tlt_server.engine.features.pinned import PinnedBatch, PinnedMemory, Rows
from tlt_server.metrics import count_features_dropped, count_features_sent
from tlt_server.wire.features import FeatureBatch, FeatureHeader
from tlt_server.wire.features import Rows as Described
from tlt_server.wire.messages import Buffer, short
from tlt_server.wire.sockets import Outlet

log = logging.getLogger(__name__)

MESSAGE_BYTES = 4 << 20
MESSAGE_AGE = 0.25
"""A message is sent when it is so large, or its first batch so many seconds old: the rows of a request that lie
together in it are one piece to the trainer."""
LOOK_EVERY = 0.001
"""Seconds until a batch that has not arrived is asked again."""

Header = Callable[[tuple[Described, ...], torch.Tensor], FeatureHeader]


class Sender:
    """Takes pinned batches from the scheduler's thread; it never blocks that. connect: makes the outlet, in a thread of
    its own. header: of a message with these rows, and [n, W] states that a drafter reads."""

    def __init__(self, pinned: PinnedMemory, connect: Callable[[], Outlet], header: Header) -> None:
        self._pinned, self._connect, self._header = pinned, connect, header
        self._queue: queue.SimpleQueue[PinnedBatch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="features", daemon=True)
        self._thread.start()

    def take(self, batch: PinnedBatch) -> None:
        self._queue.put(batch)

    def close(self) -> None:
        """Sends what it has, and ends."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        """The thread's edge: decoding goes on without features, whatever happens here."""
        try:
            outlet = self._connect()
            try:
                while held := self._collected():
                    self._send(outlet, held)
            finally:
                outlet.close()
        except Exception:
            log.exception("no more features are sent; the server goes on. Restart it to have them again")

    def _collected(self) -> list[PinnedBatch]:
        """Pinned batches for a message, once there are some; none at the end."""
        held: list[PinnedBatch] = []
        nbytes, due = 0, float("inf")
        while nbytes < MESSAGE_BYTES and (left := due - time.monotonic()) > 0:
            try:
                batch = self._queue.get(timeout=None if not held else left)
            except queue.Empty:
                break
            if batch is None:
                if held:
                    self._queue.put(None)
                break
            if not held:
                due = time.monotonic() + MESSAGE_AGE
            held.append(batch)
            nbytes += batch.nbytes
        return held

    def _send(self, outlet: Outlet, held: Sequence[PinnedBatch]) -> None:
        while not held[-1].arrived.query():  # and so have those before it
            time.sleep(LOOK_EVERY)
        frames = merged(held, self._header).encode() if outlet.ready else None
        self._pinned.free(held[-1])
        tokens = sum(batch.tokens for batch in held)
        if frames is not None and outlet.send(frames):
            count_features_sent(tokens, sum(memoryview(frame).nbytes for frame in frames))
        else:
            count_features_dropped(tokens, "no_trainer")


def merged(batches: Sequence[PinnedBatch], header: Header) -> FeatureBatch:
    """A message of all that batches hold, in memory of its own; consecutive rows of a request become one piece."""
    rows = [each for batch in batches for each in batch.rows]
    places = accumulate((len(each.tokens) for each in rows), initial=0)  # as the states of all lie one behind the other
    runs = _runs(each._replace(row=place) for each, place in zip(rows, places, strict=False))
    described = header(tuple(_described(run) for run in runs), batches[0].states.hidden)
    tokens = np.array([token for run in runs for each in run for token in each.tokens], dtype="<i4")
    order = np.concatenate([np.arange(each.row, each.row + len(each.tokens)) for run in runs for each in run])
    hidden = _picked([batch.states.hidden for batch in batches], order)
    finals = [batch.states.finals for batch in batches if batch.states.finals is not None]
    return FeatureBatch(described, tokens.data.cast("B"), hidden, _picked(finals, order) if finals else b"")


def _picked(states: Sequence[torch.Tensor], order: "np.ndarray[Any, Any]") -> Buffer:
    """The bytes of rows in this order. By numpy, whose copies take one core, and let others run Python meanwhile."""
    rows = np.concatenate([each.view(torch.uint8).numpy() for each in states])
    return rows.take(order, axis=0).data.cast("B")


def _runs(rows: Iterable[Rows]) -> list[list[Rows]]:
    """Rows of one request and one target that follow each other, together; else in the order they came in."""
    runs: list[list[Rows]] = []
    last: dict[str, list[Rows]] = {}
    for each in rows:
        run = last.get(each.rid)
        if run is None or not _goes_on(run[-1], each):
            run = last[each.rid] = []
            runs.append(run)
        run.append(each)
    return runs


def _goes_on(before: Rows, after: Rows) -> bool:
    stamped = (before.target_version, before.partial) == (after.target_version, after.partial)
    return stamped and before.start + len(before.tokens) == after.start


def _described(run: Sequence[Rows]) -> Described:
    first = run[0]
    return Described(
        rid=short(first.rid),
        group=first.group,
        prompt_tokens=first.prompt,
        start=first.start,
        count=sum(len(each.tokens) for each in run),
        target_version=first.target_version,
        partial=first.partial,
    )
