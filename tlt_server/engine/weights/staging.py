"""A drafter on its way, in one rank."""

import logging
from concurrent.futures import Future
from dataclasses import dataclass

from tlt_server.engine.messages import Offer
from tlt_server.errors import UpdateRefused

logger = logging.getLogger(__name__)

FAILED, RUNNING, READY = range(3)
"""How far a rank's staging is; all go on as far as the one that is least far."""


@dataclass
class OnItsWay:
    """What was offered, and what becomes of it: sha256 of the file, and the seconds that staging took."""

    offer: Offer
    future: "Future[tuple[str, float]]"

    def progress(self) -> int:
        if not self.future.done():
            return RUNNING
        return READY if self.future.exception() is None else FAILED

    def failure(self) -> str | None:
        """Why it failed; None where it did not. To be asked once it is done."""
        error = self.future.exception()
        if error is None:
            return None
        if isinstance(error, UpdateRefused):
            return str(error)
        logger.error("staging a drafter failed", exc_info=error)
        return f"{type(error).__name__}: {error}"
