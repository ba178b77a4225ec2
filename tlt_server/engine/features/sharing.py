"""What a drafter shares with the target, written to a folder for the drafter trainer, beside the decode loop.

A thread copies and writes; the loop waits for neither, and hardly any memory of the GPU is taken. An update of the
target that came in between has torn the copy: whoever asks for the result learns that, because the scheduler answers,
which also makes the updates. So a copy that is told of is of the one version that it is told with.

Each tensor is a file. One that has not changed since the last copy is neither copied nor written: its file moves along.

Of a tensor-parallel target each rank holds rows, the last ones padding. The threads of the ranks hand them to the first
one's, which writes. They have a process group of their own; when to begin, and what came of it, the ranks agree upon
between two steps, as one may have learnt of a publication's end where another has not.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tlt_client.schemas import SharedTarget

from tlt_server.drafter import header
from tlt_server.engine.ranks import joined, lowest, objections, twin
from tlt_server.engine.weights.publications import Publications
from tlt_server.errors import OutOfTurn, UpdateRefused

RANKS_WITHIN_S = 60.0
"""Seconds that a rank's thread waits for the others'."""
CHUNK_BYTES = 256 << 20
"""Of pinned memory. Few chunks: between them the thread asks for Python's lock, which the decode loop holds mostly."""


@dataclass
class _UnderWay:
    path: str
    version: int
    future: "Future[None]"


class _Folder:
    """The last copy, for one thread of each rank; the first rank's has the files. path: where it is; None where there
    is none. marks: of what it holds of this rank's, by name."""

    def __init__(self, rows: int, group: Any, *, leads: bool) -> None:
        self._rows, self._group, self._leads = rows, group, leads
        self.path: Path | None = None
        self._marks: dict[str, torch.Tensor] = {}

    def write(self, path: Path, tensors: Mapping[str, torch.Tensor], written: Any) -> None:
        """Makes it the folder `path`, of these tensors as they are after the event `written`. A collective.
        Raises UpdateRefused: the folder cannot be made. Raises OSError: it cannot be written."""
        if objected := objections(self._group, self._begin(path)):
            raise UpdateRefused("; ".join(objected))
        # of the tensors' device: a thread's own is the first one
        stream = None if written is None else torch.cuda.Stream(next(iter(tensors.values())).device)
        if stream is not None:
            stream.wait_event(written)
        with torch.cuda.stream(stream):  # of None: nothing, as on a CPU
            marks = {name: _mark(tensor) for name, tensor in tensors.items()}
            same = {n: n in self._marks and torch.equal(mark, self._marks[n]) for n, mark in marks.items()}
            unchanged = {name: lowest(self._group, same[name]) for name in tensors}
            changed = {name: tensor.detach() for name, tensor in tensors.items() if not unchanged[name]}
        # ranks hand tensors over in one order; where there is one rank, each takes its own time
        with ThreadPoolExecutor(2 if self._group is None else 1, "target-file") as pool:
            list(pool.map(lambda name: self._save(path / f"{name}.safetensors", name, changed[name], stream), changed))
        self._marks, self.path = marks, path

    def _save(self, file: Path, name: str, tensor: torch.Tensor, stream: Any) -> None:
        """The first rows of all ranks' as a safetensors file."""
        with torch.cuda.stream(stream):
            self._write_rows(file, name, tensor)

    def _write_rows(self, file: Path, name: str, tensor: torch.Tensor) -> None:
        parts: Iterable[torch.Tensor] = _on_cpu(tensor[: self._rows] if self._group is None else tensor)
        if self._group is not None:
            whole = joined(self._group, torch.cat([part.clone() for part in parts]))
            if whole is None:
                return
            parts = [whole[: self._rows]]
        file.unlink(missing_ok=True)  # who reads the one before goes on, and there may be no room for two
        with file.open("xb") as out:
            out.write(header.begin(name, (self._rows, *tensor.shape[1:]), tensor.dtype))
            for part in parts:
                out.write(memoryview(part.view(torch.uint8).numpy()))

    def remove(self) -> None:
        """It is not of one version."""
        if self.path is not None and self._leads:
            shutil.rmtree(self.path)
        self.path = None

    def _begin(self, path: Path) -> str | None:
        """Moves the last copy to `path`, or makes that folder; says why it cannot be."""
        kept, self.path = self.path, None  # until it is whole
        if not self._leads:
            return None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if kept is not None and kept.exists():
                kept.rename(path)
            else:
                path.mkdir()
                self._marks = {}
        except OSError as error:
            return str(error)
        return None


class Sharing:
    """Of a rank of the first replica. read: this rank's rows of embedding and head [V', H]; the same tensor where they
    are tied. rows: V of the whole; what the ranks hold beyond is padding. RuntimeError: another rank is gone."""

    def __init__(
        self,
        read: Callable[[], tuple[torch.Tensor, torch.Tensor]],
        rows: int,
        publications: Publications,
        group: Any = None,
    ) -> None:
        self._read, self._publications, self._group = read, publications, group
        self._thread = ThreadPoolExecutor(1, "target-sharing")
        leads = group is None or dist.get_rank(group) == 0
        self._folder = _Folder(rows, twin(group, RANKS_WITHIN_S), leads=leads)
        self._under_way: _UnderWay | None = None

    def share(self, path: str) -> SharedTarget | None:
        """Begins to write a folder or, asked again, says what it holds; None until it is whole. A collective. Raises
        OutOfTurn: the target is being written, or was meanwhile. Raises UpdateRefused: the folder cannot be written."""
        if self._under_way is None or self._under_way.path != path:
            self._begin(path)
            return None
        if not lowest(self._group, self._under_way.future.done()):
            return None
        done, self._under_way = self._under_way, None
        error = done.future.exception()
        objected = objections(self._group, str(error) if error else self._torn(done))
        if error:
            raise UpdateRefused(f"{path}: {error}") from error
        if objected:
            self._folder.remove()
            raise OutOfTurn("; ".join(objected))
        return SharedTarget(done.version, path)

    def wait(self) -> None:
        """Until nothing is being copied."""
        if self._under_way is not None:
            wait([self._under_way.future])

    def _begin(self, path: str) -> None:
        partial = "a publication of the target is under way: ask again after it" if self._publications.partial else None
        if objected := objections(self._group, partial):
            raise OutOfTurn("; ".join(objected))
        embedding, head = self._read()
        written = torch.cuda.current_stream().record_event() if head.is_cuda else None
        tied = embedding.data_ptr() == head.data_ptr()
        tensors = {"model.embed_tokens.weight": embedding} | ({} if tied else {"lm_head.weight": head})
        writing = self._thread.submit(self._folder.write, Path(path), tensors, written)
        self._under_way = _UnderWay(path, self._publications.version, writing)

    def _torn(self, done: _UnderWay) -> str | None:
        if not self._publications.partial and self._publications.version == done.version:
            return None
        return f"the target was written while it was copied to {done.path}: ask again after its publication"


def sharing_of(scheduler: Any, publications: Publications) -> Sharing | None:
    """None where another replica has the same tensors, or ranks differ in more than the rows that they hold."""
    ps = scheduler.ps
    if (ps.dp_rank or 0) > 0 or ps.attn_dp_size > 1 or ps.pp_size > 1:
        return None
    runner = scheduler.tp_worker.model_runner
    group = scheduler.tp_cpu_group if ps.tp_size > 1 else None
    return Sharing(lambda: _embedding_and_head(runner.model), runner.model_config.vocab_size, publications, group)


def _embedding_and_head(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Asked of a model only when they are to be shared: not every class of SGLang's can say. Raises UpdateRefused: this
    one cannot."""
    if not hasattr(model, "get_embed_and_head"):
        raise UpdateRefused(f"SGLang's {type(model).__name__} does not give its embedding and head away")
    embedding, head = model.get_embed_and_head()
    return embedding, head


def _on_cpu(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Its rows [V, H] in parts, contiguous, each until the next is asked for. They go through a chunk of pinned memory:
    while the GPU copies to memory that is not pinned, the driver may keep other threads of the process from launching
    kernels."""
    rows = min(len(tensor), max(1, CHUNK_BYTES // tensor[0].nbytes))
    chunk = torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    for part in tensor.split(rows):
        arrived = chunk[: len(part)].copy_(part, non_blocking=True)
        if tensor.is_cuda:
            torch.cuda.current_stream().synchronize()
        yield arrived


def _mark(tensor: torch.Tensor) -> torch.Tensor:
    """What tells a tensor [V, H] from another one: the sum of each row's bits as whole numbers of 4 bytes, or 2 where a
    row is not so many, modulo their width: [V] on the CPU. Two that differ in many rows, as those of an RL step do, are
    never alike. No sum is wider than what it is of: torch would copy the tensor for it."""
    row_bytes = tensor.shape[1] * tensor.element_size()
    bits = tensor.detach().view(torch.int16 if row_bytes % 4 else torch.int32)
    return bits.sum(-1, dtype=bits.dtype).cpu()
