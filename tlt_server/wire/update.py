"""A drafter's file, cut into chunks by the trainer and joined by the server."""

import hashlib
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tlt_server.errors import WireError
from tlt_server.wire.messages import Buffer, DrafterUpdate, ModelIdentity


class Outgoing:
    """An update: `header`, and the chunks that it tells of."""

    def __init__(self, file: bytes, version: int, trained_on: int, model: ModelIdentity, chunk_bytes: int) -> None:
        self._file, self._chunk_bytes = memoryview(file), chunk_bytes
        chunks = map(self.chunk, range(-(-len(file) // chunk_bytes)))
        with ThreadPoolExecutor() as pool:  # hashing gives the interpreter lock away
            digests = b"".join(pool.map(lambda chunk: hashlib.sha256(chunk).digest(), chunks))
        self.header = DrafterUpdate(
            version=version,
            trained_on=trained_on,
            model=model,
            size=len(file),
            chunk_bytes=chunk_bytes,
            digests=digests,
        )
        self.digest = self.header.digest

    def chunk(self, index: int) -> memoryview:
        return self._file[index * self._chunk_bytes : (index + 1) * self._chunk_bytes]


class Incoming:
    """A drafter on its way: a file, named by its contents, that grows by one verified chunk after another; a later life
    of the receiver goes on with it. Methods raise OSError where the disk does."""

    def __init__(self, header: DrafterUpdate, folder: Path) -> None:
        self.header, self.digest = header, header.digest
        self.path = folder / f"{self.digest.hex()[:16]}.partial"
        self.next = self.asked = self.damaged = 0
        self._file: io.FileIO | None = None

    @property
    def missing(self) -> int:
        """Bytes."""
        return max(self.header.size - self.next * self.header.chunk_bytes, 0)

    def resume(self) -> None:
        """Opens the file, and keeps of it the chunks that are good."""
        self._file = self.path.open("a+b", buffering=0)
        self._file.seek(0)
        while self.missing and self._is_next(self._file.read(self.header.chunk_bytes)):
            self.next += 1
        self._file.truncate(min(self.next * self.header.chunk_bytes, self.header.size))

    def add(self, index: int, chunk: Buffer) -> bool:
        """Appends a chunk; False where another one is due, as after a loss, and nothing was done.

        Raises:
            WireError: it is not what the sender said it would be.
        """
        assert self._file is not None
        if index != self.next:
            return False
        if not self._is_next(chunk):
            raise WireError(f"chunk {index} of drafter {self.header.version} was damaged: its sha256 is wrong")
        rest = memoryview(chunk)
        while rest:  # an unbuffered write may write a part, before it fails
            rest = rest[self._file.write(rest) :]
        self.next += 1
        return True

    def finish(self, path: Path) -> None:
        """Gives the whole file its name."""
        self._close()
        self.path.rename(path)

    def drop(self) -> None:
        self._close()
        self.path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _is_next(self, chunk: Buffer) -> bool:
        return hashlib.sha256(chunk).digest() == self.header.digests[32 * self.next : 32 * (self.next + 1)]
