"""A drafter on its way: staged by a thread, while decoding goes on."""

import logging
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tlt_server.engine.messages import Offer
from tlt_server.engine.weights.swap import Staged
from tlt_server.errors import UpdateRefused

logger = logging.getLogger(__name__)

FAILED, RUNNING, READY = range(3)
"""How far a rank's staging is; all go on as far as the one that is least far."""


class Weights(Protocol):
    """`DrafterWeights`, as far as it is used here."""

    def stage(self, path: Path, sha256: str | None) -> Staged: ...
    def flip(self, *, remember: bool) -> None: ...
    def flip_back(self) -> None: ...
    def reset(self) -> None: ...


@dataclass
class OnItsWay:
    """What was offered, and what becomes of it: what was read, and how many seconds that took."""

    offer: Offer
    future: "Future[tuple[Staged, float]]"

    def progress(self) -> int:
        if not self.future.done():
            return RUNNING
        return READY if self.future.exception() is None else FAILED

    def failure(self) -> str | None:
        return _reason(self.future.exception()) if self.progress() == FAILED else None


def _reason(error: BaseException | None) -> str:
    if isinstance(error, UpdateRefused):
        return str(error)
    logger.error("staging a drafter failed", exc_info=error)
    return f"{type(error).__name__}: {error}"
