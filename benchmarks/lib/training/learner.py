"""The trainer's end of the features link: keeps what servers send, by request and position."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tlt_server.trainer.data.inbox import tensors
from tlt_server.wire.features import FeatureBatch
from tlt_server.wire.sockets import Inlet


class Row(NamedTuple):
    """Of one position. finals: None where they are the states."""

    token: int
    hidden: torch.Tensor
    finals: torch.Tensor | None
    target_version: int
    partial: bool


class Learner:
    """Inside a `with`, it listens.

    keeps: whether rows are kept, or only counted.
    rows: as they came, by rid and position. groups: by rid. tokens: by server.
    """

    def __init__(self, address: str, keeps: bool = True) -> None:
        self.keeps = keeps
        self.rows: dict[str, dict[int, list[Row]]] = {}
        self.groups: dict[str, int] = {}
        self.tokens: Counter[str] = Counter()
        self._inlet = Inlet(address)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen)

    def of(self, rid: str, positions: set[int], seconds: float = 10) -> dict[int, list[Row]]:
        """What came of a request; waited for until these positions have."""
        deadline = time.monotonic() + seconds
        while not positions <= self.rows.get(rid, {}).keys() and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.rows.get(rid, {})

    def _listen(self) -> None:
        while not self._over.is_set():
            self._inlet.wait(0.05)
            if (frames := self._inlet.receive()) is not None:
                batch = FeatureBatch.decode(frames)
                if self.keeps:
                    self._keep(batch)
                self.tokens[batch.header.server] += batch.header.tokens
        self._inlet.close()

    def _keep(self, batch: FeatureBatch) -> None:
        header = batch.header
        tokens, hidden, finals = tensors(batch)
        at = 0
        for rows in header.rows:
            self.groups[rows.rid] = rows.group
            places = self.rows.setdefault(rows.rid, {})
            for position in range(rows.start, rows.start + rows.count):
                final = None if finals is None else finals[at]
                row = Row(int(tokens[at]), hidden[at], final, rows.target_version, rows.partial)
                places.setdefault(position, []).append(row)
                at += 1

    def __enter__(self) -> "Learner":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()


@torch.no_grad()
def states(model: Any, tokens: Sequence[int], layers: Sequence[int] = (0, 1, 2)) -> tuple[torch.Tensor, torch.Tensor]:
    """By a model of transformers, of each position: [n, H] final states, and [n, 3H] what these layers put out."""
    found = model(torch.tensor([tokens], device=model.device), output_hidden_states=True).hidden_states
    return found[-1][0], torch.cat([found[layer + 1][0] for layer in layers], dim=-1)
