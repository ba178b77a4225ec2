"""What a drafter shares with the target, written to a folder for the drafter trainer, beside the decode loop.

A thread copies and writes; the loop waits for neither, and hardly any memory of the GPU is taken. An update of the
target that came in between has torn the copy: whoever asks for the result learns that, because the scheduler answers,
which also makes the updates. So a copy that is told of is of the one version that it is told with.

Each tensor is a file. One that has not changed since the last copy is neither copied nor written: its file moves along.
"""

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tlt_client.schemas import SharedTarget

from tlt_server.engine.publications import Publications
from tlt_server.engine.tensorfile import DTYPES
from tlt_server.errors import OutOfTurn, UpdateRefused
from tlt_server.wire.update import Tensor, safetensors_parts

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ROWS = 1024
"""Summed at once: torch widens them to int64 first."""
_BITS = {2: torch.int16, 4: torch.int32}


@dataclass
class _UnderWay:
    path: str
    version: int
    future: "Future[None]"


class _Folder:
    """The last copy, for one thread. path: where it is; None where there is none. marks: of what it holds, by name."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self._marks: dict[str, torch.Tensor] = {}

    def write(self, path: Path, tensors: Mapping[str, torch.Tensor], written: Any) -> None:
        """Makes it the folder `path`, of these tensors as they are after the event `written`."""
        kept, self.path = self.path, None  # until it is whole
        path.parent.mkdir(parents=True, exist_ok=True)
        if kept is not None and kept.exists():
            kept.rename(path)
        else:
            path.mkdir()
            self._marks = {}
        with _beside(written):
            marks = {name: _mark(tensor) for name, tensor in tensors.items()}
            changed = [name for name in tensors if not _same(marks[name], self._marks.get(name))]
            copies = {name: tensors[name].detach().cpu().contiguous() for name in changed}
        for name, copy in copies.items():
            _replace(path / f"{name}.safetensors", name, copy)
        self._marks, self.path = marks, path

    def remove(self) -> None:
        """It is not of one version."""
        if self.path is not None:
            shutil.rmtree(self.path)
        self.path = None


class Sharing:
    """Of the first replica's rank 0.

    Args:
        read: embedding and head [V, H]; the same tensor where they are tied.
        publications: of the target.
    """

    def __init__(self, read: Callable[[], tuple[torch.Tensor, torch.Tensor]], publications: Publications) -> None:
        self._read, self._publications = read, publications
        self._thread = ThreadPoolExecutor(1, "target-sharing")
        self._folder = _Folder()
        self._under_way: _UnderWay | None = None

    def share(self, path: str) -> SharedTarget | None:
        """Begins to write a folder or, asked again, says what it holds; None until it is whole.

        Raises:
            OutOfTurn: the target is being written, or was meanwhile.
            UpdateRefused: the folder cannot be written.
        """
        if self._under_way is None or self._under_way.path != path:
            self._begin(path)
            return None
        if not self._under_way.future.done():
            return None
        done, self._under_way = self._under_way, None
        if error := done.future.exception():
            raise UpdateRefused(f"{path}: {error}") from error
        if self._publications.partial or self._publications.version != done.version:
            self._folder.remove()
            raise OutOfTurn(f"the target was written while it was copied to {path}: ask again after its publication")
        return SharedTarget(done.version, path)

    def wait(self) -> None:
        """Until nothing is being copied."""
        if self._under_way is not None:
            wait([self._under_way.future])

    def _begin(self, path: str) -> None:
        if self._publications.partial:
            raise OutOfTurn("a publication of the target is under way: ask again after it")
        embedding, head = self._read()
        written = torch.cuda.current_stream().record_event() if head.is_cuda else None
        tied = embedding.data_ptr() == head.data_ptr()
        tensors = {"model.embed_tokens.weight": embedding} | ({} if tied else {"lm_head.weight": head})
        writing = self._thread.submit(self._folder.write, Path(path), tensors, written)
        self._under_way = _UnderWay(path, self._publications.version, writing)


def sharing_of(scheduler: Any, publications: Publications) -> Sharing | None:
    """None where a rank holds a part of the tensors alone, or another replica holds the same ones."""
    if scheduler.ps.tp_size > 1 or (scheduler.ps.dp_rank or 0) > 0:
        return None
    runner = scheduler.tp_worker.model_runner
    vocabulary = runner.model_config.vocab_size

    def read() -> tuple[torch.Tensor, torch.Tensor]:
        embedding, head = runner.model.get_embed_and_head()
        return embedding[:vocabulary], head[:vocabulary]  # rows beyond are padding

    return Sharing(read, publications)


def _mark(tensor: torch.Tensor) -> torch.Tensor:
    """What tells a tensor [V, H] from another one: the sum of each row's bits as whole numbers, [V] int64 on the CPU.

    Two that differ in many rows, as those of an RL step do, are never alike.
    """
    bits = tensor.detach().view(_BITS[tensor.element_size()])
    return torch.cat([rows.sum(-1, dtype=torch.int64) for rows in bits.split(ROWS)]).cpu()


def _same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and torch.equal(one, other)


def _replace(file: Path, name: str, copy: torch.Tensor) -> None:
    """Removes it first: who reads the one before goes on, and there may be no room for two."""
    file.unlink(missing_ok=True)
    part = Tensor(_NAMES[copy.dtype], tuple(copy.shape), copy.view(torch.uint8).numpy().data)
    with file.open("xb", buffering=0) as opened:
        for piece in safetensors_parts({name: part}, {"format": "pt"}):
            rest = memoryview(piece).cast("B")
            while rest:
                rest = rest[opened.write(rest) :]


def _beside(written: Any) -> AbstractContextManager[Any]:
    """A stream of its own, after what was launched before; nothing on a CPU."""
    if written is None:
        return nullcontext()
    stream = torch.cuda.Stream()
    stream.wait_event(written)
    context: AbstractContextManager[Any] = torch.cuda.stream(stream)
    return context
