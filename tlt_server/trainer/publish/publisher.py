"""Drafters on their way out: written, and offered to the servers, by a thread. A training step waits for neither."""

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from tlt_server.errors import DiskFailed
from tlt_server.trainer.publish.folder import Drafter
from tlt_server.trainer.publish.published import Edition, Published
from tlt_server.wire.trainer import Sender

log = logging.getLogger(__name__)


class Publisher:
    """One drafter at a time. edition: the one published last; None: none yet. target: that it was judged for, as the
    trainer counts; -1: it is of an earlier life. ConfigError: the last one is damaged."""

    def __init__(self, published: Published, sender: Sender) -> None:
        self._published, self._sender = published, sender
        self._thread = ThreadPoolExecutor(1, "publisher")
        self._under_way: tuple[Future[Edition | None], int] | None = None
        self.edition, self.target = published.newest(), -1

    @contextmanager
    def open(self) -> Iterator[None]:
        """Offers what an earlier life has published. At the end what is under way is whole, and offered."""
        if self.edition is not None:
            self._send(self.edition)
        try:
            yield
        finally:
            self._thread.shutdown()
        self.collect()

    @property
    def is_busy(self) -> bool:
        """Whether a drafter is being written: `publish` may not be called."""
        return self._under_way is not None

    @property
    def newest(self) -> int:
        """Version of `edition`; 0: there is none."""
        return self.edition.version if self.edition else 0

    def publish(self, drafter: Drafter, version: int, target: int, provenance: Mapping[str, str], why: str) -> None:
        """Begins to; the drafter may not change any more. version: higher than any before."""
        writing = self._thread.submit(self._write, drafter, version, provenance, why)
        self._under_way = writing, target

    def collect(self) -> None:
        """Takes note of what was published meanwhile. Raises what has ended that; of the disk it was logged."""
        if self._under_way is not None and self._under_way[0].done():
            (writing, target), self._under_way = self._under_way, None
            if (edition := writing.result()) is not None:
                self.edition, self.target = edition, target

    def _write(self, drafter: Drafter, version: int, provenance: Mapping[str, str], why: str) -> Edition | None:
        try:
            edition = self._published.add(drafter, version, provenance)
        except DiskFailed as error:
            log.error("%s. Training goes on", error)
            return None
        self._send(edition)
        log.info("drafter %d is published: %s", version, why)
        return edition

    def _send(self, edition: Edition) -> None:
        self._sender.publish(edition.version, edition.trained_on, edition.file())
