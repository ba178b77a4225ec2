"""A file in chunks, each with its sha256: cut by who has it, put together by who asks for it."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from tlt_server.errors import WireError
from tlt_server.wire.messages import MAX_CHUNKS_WANTED, Buffer, Chunk, ChunksWanted, LiveFile, Offer, SharedFile
from tlt_server.wire.sockets import Link

F = TypeVar("F", SharedFile, LiveFile)

CHUNK_BYTES = 2 << 20
"""Between 1 and 4 MiB ZMQ is fastest; a larger one makes other messages wait longer."""
ASK_AGAIN = 1.0
"""Seconds without a chunk, until it is asked for again."""
WINDOW = MAX_CHUNKS_WANTED
"""Chunks asked for ahead, half of them at a time: 8 MiB under way, however slow this side is."""
MAX_DAMAGED = 3
"""Chunks damaged one after another, after which it is not the line."""


def digests_of(chunks: Sequence[Buffer]) -> bytes:
    """End to end."""
    with ThreadPoolExecutor() as pool:  # hashing gives the interpreter lock away
        return b"".join(pool.map(lambda chunk: hashlib.sha256(chunk).digest(), chunks))


def chunks_of(descriptor: int, size: int, chunk_bytes: int) -> Iterator[bytes]:
    """Of an open file."""
    for start in range(0, size, chunk_bytes):
        yield os.pread(descriptor, chunk_bytes, start)


@dataclass(frozen=True)
class Given(Generic[F]):
    """A file that is given out. It stays readable while it is open, whatever becomes of its name."""

    header: F
    descriptor: int

    def send(self, link: Link, wanted: ChunksWanted) -> None:
        """What is wanted of it, to the trainer."""
        if wanted.digest == self.header.digest:
            for index in range(wanted.start, min(wanted.stop, self.header.chunks)):
                chunk = os.pread(self.descriptor, self.header.chunk_bytes, index * self.header.chunk_bytes)
                link.send(Chunk(digest=wanted.digest, index=index), chunk)


class Incoming:
    """A file on its way, named by its digest, that grows by one verified chunk after another; a later life of who
    fetches it goes on with it. Methods raise OSError where the disk does.

    next: the chunk that is due. damaged: chunks, one after another.
    """

    def __init__(self, header: Offer | SharedFile | LiveFile, folder: Path) -> None:
        self._header, self.digest = header, header.digest
        self.path = folder / f"{self.digest.hex()[:16]}.partial"
        self.next = self.damaged = 0
        self._asked, self._due = 0, 0.0  # the first that was not asked for yet; when all are asked for again

    @property
    def missing(self) -> int:
        """Bytes."""
        return max(self._header.size - self.next * self._header.chunk_bytes, 0)

    def resume(self) -> None:
        """Makes the file, or keeps of it the chunks that are good."""
        with self.path.open("a+b") as file:
            file.seek(0)
            while self.missing and self._is_next(file.read(self._header.chunk_bytes)):
                self.next += 1
            file.truncate(min(self.next * self._header.chunk_bytes, self._header.size))
        self._asked = self.next

    def add(self, chunk: Buffer, now: float) -> None:
        """Appends the chunk that is due. WireError: it is not what the sender said it would be."""
        if not self._is_next(chunk):
            self.damaged, self._asked = self.damaged + 1, self.next
            raise WireError(f"chunk {self.next} of {self._header} was damaged: its sha256 is wrong")
        with self.path.open("r+b") as file:
            file.seek(self.next * self._header.chunk_bytes)
            file.write(chunk)
        self.next, self.damaged, self._due = self.next + 1, 0, now + ASK_AGAIN

    def chunk(self, index: int) -> bytes:
        """One before `next`, read again."""
        with self.path.open("rb") as file:
            return os.pread(file.fileno(), self._header.chunk_bytes, index * self._header.chunk_bytes)

    def again(self) -> None:
        """What was asked for does not come."""
        self._asked = self.next

    def wanted(self, now: float) -> ChunksWanted | None:
        """What to ask for now: more once half of what was asked for is here, all of it again after a silence."""
        if now >= self._due:
            self._asked = self.next
        start, stop = self._asked, min(self.next + WINDOW, self._header.chunks)
        if start - self.next > WINDOW // 2 or start >= stop:
            return None
        self._asked, self._due = stop, now + ASK_AGAIN
        return ChunksWanted(digest=self.digest, start=start, stop=stop)

    def _is_next(self, chunk: Buffer) -> bool:
        return hashlib.sha256(chunk).digest() == self._header.digests[32 * self.next : 32 * (self.next + 1)]
