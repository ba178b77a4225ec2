"""What drafters share with their target, for a trainer to which the server's path does not lead: fetched over the
control link, file by file, in verified chunks; a file that has not changed is not fetched again."""

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tlt_server.errors import WireError
from tlt_server.wire.files import MAX_DAMAGED, Given, Incoming, chunks_of
from tlt_server.wire.messages import Buffer, Chunk, ChunksWanted, Hello, Shared, SharedFile, SharedWanted
from tlt_server.wire.sockets import Link

log = logging.getLogger(__name__)

STALLED = 5.0
"""Seconds without a chunk, after which what is missing may come from another server."""
ASK_EVERY = 1.0
"""Seconds, until files are asked for again that a server has not told of."""


class Sharer:
    """A server's side. Files are hashed in a thread, and open until the target is another."""

    def __init__(self, link: Link, chunk_bytes: int) -> None:
        self._link, self._chunk_bytes = link, chunk_bytes
        self._pool = ThreadPoolExecutor(1, "sharing")
        self._version = -1
        self._hashing: Future[list[Given[SharedFile]]] | None = None
        self._files: list[Given[SharedFile]] = []

    def hear(self, message: SharedWanted | ChunksWanted, hello: Hello) -> None:
        if isinstance(message, ChunksWanted):
            for each in self._files:
                each.send(self._link, message)
        elif message.target_version == hello.target_version and hello.shared:
            if self._version == message.target_version and self._files:
                self._tell()
            elif self._hashing is None:
                self._version = message.target_version
                self._hashing = self._pool.submit(self._opened, Path(hello.shared))

    def step(self, hello: Hello) -> None:
        """Tells of files whose digests are known by now, and lets go of those of a target before."""
        if self._hashing is not None and self._hashing.done():
            hashed, self._hashing = self._hashing, None
            try:
                self._close_files()
                self._files = hashed.result()
            except OSError as error:
                log.info("what is shared of target %d is gone: %s", self._version, error)
            else:
                self._tell()
        if self._hashing is None and self._version != hello.target_version:
            self._close_files()

    def close(self) -> None:
        if self._hashing is not None and self._hashing.exception() is None:
            self._files += self._hashing.result()
        self._pool.shutdown()
        self._close_files()

    def _opened(self, folder: Path) -> list[Given[SharedFile]]:
        """In the thread."""
        found = []
        for path in sorted(folder.glob("*.safetensors")):
            descriptor = os.open(path, os.O_RDONLY)
            size = os.fstat(descriptor).st_size
            chunks = chunks_of(descriptor, size, self._chunk_bytes)
            digests = b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)
            header = {"name": path.stem, "size": size, "chunk_bytes": self._chunk_bytes, "digests": digests}
            found.append(Given(msgspec.convert(header, SharedFile), descriptor))
        return found

    def _tell(self) -> None:
        self._link.send(Shared(target_version=self._version, files=tuple(each.header for each in self._files)))

    def _close_files(self) -> None:
        for each in self._files:
            os.close(each.descriptor)
        self._files = []


@dataclass(frozen=True)
class Source:
    """target: by the trainer's number. peer: a server that has it, which counts it as `version`."""

    target: int
    peer: bytes
    version: int


class Fetcher:
    """A trainer's side; all but `want` in the thread of the link.

    folder: for what arrives; its own. most: bytes of a file. done: called with a target's number and a folder of its
    files, which lies there until the next one does.
    """

    def __init__(
        self, folder: Path, most: int, done: Callable[[int, Path], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._most, self._done, self._clock = folder, most, done, clock
        shutil.rmtree(folder, ignore_errors=True)  # an earlier life's
        self._wanted: Source | None = None
        self._source: Source | None = None
        self._shared: Shared | None = None
        self._incoming: Incoming | None = None
        self._have: dict[str, tuple[bytes, Path]] = {}
        self._made: list[Path] = []
        self._ask_due = self._moved = 0.0

    def want(self, source: Source) -> None:
        """From any thread, as often as one likes: the last one counts, but what comes is not given up for another
        server that has the same."""
        self._wanted = source

    def step(self, link: Link) -> None:
        """Asks for what is due."""
        now, wanted = self._clock(), self._wanted
        if wanted is None:
            return
        if self._source is None or self._source.target != wanted.target or now - self._moved > STALLED:
            self._source, self._shared, self._incoming, self._moved = wanted, None, None, now
        if self._shared is None:
            if now >= self._ask_due:
                self._ask_due = now + ASK_EVERY
                link.send(SharedWanted(target_version=self._source.version), to=self._source.peer)
        elif self._incoming is not None and (chunks := self._incoming.wanted(now)) is not None:
            link.send(chunks, to=self._source.peer)

    def hear(self, link: Link, peer: bytes, message: Shared | Chunk, payload: Buffer) -> bool:
        """Whether it was asked for."""
        if self._source is None or peer != self._source.peer:
            return False
        try:
            if isinstance(message, Chunk):
                return self._add(link, message, payload)
            return self._begin(message)
        except OSError as error:
            log.error("what drafters share with target %d: %s: %s", self._source.target, self._folder, error.strerror)
            self._give_up()
            return True

    def _begin(self, shared: Shared) -> bool:
        assert self._source is not None
        if shared.target_version != self._source.version or self._shared is not None:
            return False
        if (largest := max(each.size for each in shared.files)) > self._most:
            log.warning("%r: a file of %d bytes; this target's have %d at most", self._source.peer, largest, self._most)
            self._give_up()
            return True
        self._shared, self._moved = shared, self._clock()
        self._next()
        return True

    def _next(self) -> None:
        """Goes on with a file that is missing; ends where none is."""
        assert self._shared is not None
        for each in self._shared.files:
            if self._have.get(each.name, (b"", None))[0] != each.digest:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._incoming = Incoming(each, self._folder)
                self._incoming.resume()
                if self._incoming.missing:
                    return
                self._keep(each)
        self._finish()

    def _add(self, link: Link, chunk: Chunk, payload: Buffer) -> bool:
        incoming = self._incoming
        if incoming is None or chunk.digest != incoming.digest:
            return False
        if chunk.index != incoming.next:
            return True  # asked for twice
        try:
            incoming.add(payload, self._clock())
        except WireError as error:
            assert self._source is not None
            link.reject(self._source.peer, str(error))
            if incoming.damaged == MAX_DAMAGED:
                self._give_up()
            return True
        self._moved = self._clock()
        if not incoming.missing:
            assert self._shared is not None
            self._keep(next(each for each in self._shared.files if each.digest == incoming.digest))
            self._next()
        return True

    def _keep(self, file: SharedFile) -> None:
        assert self._incoming is not None
        path = self._incoming.path.rename(self._folder / f"{file.digest.hex()[:16]}.whole")
        self._have[file.name], self._incoming = (file.digest, path), None

    def _finish(self) -> None:
        """A folder of links to the files, which the next target may share."""
        assert self._shared is not None
        assert self._source is not None
        names = {each.name for each in self._shared.files}
        self._have = {name: each for name, each in self._have.items() if name in names}
        made = self._folder / f"target-{self._source.target}"
        shutil.rmtree(made, ignore_errors=True)  # of this target, damaged on a disk of ours
        made.mkdir()
        for name, (_, path) in self._have.items():
            os.link(path, made / f"{name}.safetensors")
        self._done(self._source.target, made)
        self._wanted = self._source = self._shared = None
        for old in self._made:
            if old != made:
                shutil.rmtree(old)
        self._made = [made]
        kept = {path for _, path in self._have.values()}
        for path in self._folder.glob("*.whole"):
            if path not in kept:
                path.unlink()

    def _give_up(self) -> None:
        self._wanted = self._source = self._shared = self._incoming = None
