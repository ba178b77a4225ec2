"""What a drafter shares with the target, written to a folder for the drafter trainer, beside the decode loop.

A thread copies and writes; the loop waits for neither, and no memory of the GPU is taken. An update of the target that
came in between has torn the copy: whoever asks for the result learns that, because the scheduler answers, which also
makes the updates. So a copy that is told of is of the one version that it is told with.
"""

import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tlt_client.schemas import SharedTarget

from tlt_server.engine.publications import Publications
from tlt_server.errors import OutOfTurn, UpdateRefused
from tlt_server.wire.update import Tensor, safetensors_parts

FILE = "shared.safetensors"
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass
class _UnderWay:
    path: str
    version: int
    future: "Future[None]"


class Sharing:
    """Of the first replica's rank 0.

    Args:
        read: embedding and head [V, H]; the same tensor where they are tied.
        publications: of the target.
    """

    def __init__(self, read: Callable[[], tuple[torch.Tensor, torch.Tensor]], publications: Publications) -> None:
        self._read, self._publications = read, publications
        self._thread = ThreadPoolExecutor(1, "target-sharing")
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
            shutil.rmtree(path)
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
        self._under_way = _UnderWay(
            path, self._publications.version, self._thread.submit(_write, Path(path), embedding, head, written)
        )


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


def _write(folder: Path, embedding: torch.Tensor, head: torch.Tensor, written: Any) -> None:
    tied = embedding.data_ptr() == head.data_ptr()
    tensors = {"model.embed_tokens.weight": embedding} | ({} if tied else {"lm_head.weight": head})
    with _beside(written):
        copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    parts = {
        name: Tensor(_NAMES[copy.dtype], tuple(copy.shape), copy.view(torch.uint8).numpy().data)
        for name, copy in copies.items()
    }
    folder.mkdir(parents=True)
    with (folder / FILE).open("wb", buffering=0) as file:
        for part in safetensors_parts(parts, {"format": "pt"}):
            rest = memoryview(part).cast("B")
            while rest:
                rest = rest[file.write(rest) :]


def _beside(written: Any) -> AbstractContextManager[Any]:
    """A stream of its own, after what was launched before; nothing on a CPU."""
    if written is None:
        return nullcontext()
    stream = torch.cuda.Stream()
    stream.wait_event(written)
    context: AbstractContextManager[Any] = torch.cuda.stream(stream)
    return context
