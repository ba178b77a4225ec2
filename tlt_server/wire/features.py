"""What a server sends on the features link: hidden states of consecutive tokens, whose sizes the header declares."""

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct
from msgspec.msgpack import Decoder

from tlt_server.errors import WireError
from tlt_server.wire.messages import Buffer, Count, ModelIdentity, Name, opened, sealed

MAX_TOKENS = 1 << 24
"""Of a sequence: what the trainer makes room for must not hang on a number that somebody else has sent."""


class Rows(Struct, frozen=True, forbid_unknown_fields=True):
    """Consecutive tokens [start, start + count) of one request, under one version of the target.

    rid: the request's id, never that of another. group: 64 bits of a hash of the prompt. prompt_tokens: its length.
    partial: the target was being written then, so that it was neither that version nor the one before.
    """

    rid: Name
    group: Annotated[int, Meta(ge=0)]
    prompt_tokens: Annotated[int, Meta(ge=0, lt=MAX_TOKENS)]
    start: Annotated[int, Meta(ge=0, lt=MAX_TOKENS)]
    count: Annotated[int, Meta(ge=1, lt=MAX_TOKENS)]
    target_version: Count
    partial: bool = False

    def __post_init__(self) -> None:
        if self.start + self.count > MAX_TOKENS:
            raise ValueError(f"tokens [{self.start}, {self.start + self.count}) of a sequence of {MAX_TOKENS} at most")


class FeatureHeader(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """server: as in its `Hello`. dtype: of all states. width: of a row of what the drafter reads."""

    server: Name
    model: ModelIdentity
    kind: Literal["eagle", "eagle3"]
    dtype: Literal["float32", "bfloat16", "float16"]
    width: Annotated[int, Meta(ge=1, lt=1 << 20)]
    rows: Annotated[tuple[Rows, ...], Meta(min_length=1, max_length=1 << 14)]

    @property
    def tokens(self) -> int:
        return sum(each.count for each in self.rows)


class FeatureBatch(NamedTuple):
    """N tokens, those of one `Rows` after those of the one before; little-endian, row-major.

    tokens: [N] int32. hidden: [N, width], what the drafter reads. finals: [N, hidden size], or empty (EAGLE).
    """

    header: FeatureHeader
    tokens: Buffer
    hidden: Buffer
    finals: Buffer

    def encode(self) -> list[Buffer]:
        return [sealed(msgspec.msgpack.encode(self.header)), *self[1:]]

    @classmethod
    def decode(cls, frames: Sequence[Buffer]) -> "FeatureBatch":
        """Views of the frames. Raises WireError: they are no batch."""
        if len(frames) != 4:
            raise WireError(f"features in {len(frames)} frames; they take 4")
        header = opened(frames, Decoder(FeatureHeader))
        item, finals = 4 if header.dtype == "float32" else 2, header.model.hidden_size * (header.kind == "eagle3")
        wanted = [header.tokens * size for size in (4, header.width * item, finals * item)]
        if (sizes := [memoryview(frame).nbytes for frame in frames[1:]]) != wanted:
            raise WireError(f"features of {header.tokens} tokens in frames of {sizes} bytes; they take {wanted}")
        return cls(header, *frames[1:])
