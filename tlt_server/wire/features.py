"""Features as they travel from a server to the trainer: what a message holds, and how it becomes frames.

A message is four frames: the header (as every message's, see messages.py), the tokens as int32, the states that a
drafter reads, and the target's final hidden states, which is empty where the states are these (EAGLE). Numbers are
little-endian, rows after rows, those of one group of rows after those of the one before.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from tlt_server.errors import WireError
from tlt_server.wire.messages import Buffer, Count, ModelIdentity, Name, opened, sealed

MAX_TOKENS = 1 << 24
"""Of a sequence: what the trainer makes room for must not hang on a number that somebody else has sent."""

FRAMES = 4
MAX_WIDTH = 1 << 20
MAX_ROWS = 1 << 14
"""Groups of rows in a message: a parcel of small states has one for each of its tokens at most."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Rows(Struct, frozen=True, forbid_unknown_fields=True):
    """Consecutive tokens of one request, under one version of the target.

    rid: the request's id, never that of another. group: a hash of the prompt's tokens. prompt_tokens: of the prompt.
    start: position of the first token. count: tokens. target_version: as the server counts publications. partial:
    whether the target was being written then, so that it was neither that version nor the one before.
    """

    rid: Name
    group: Annotated[int, Meta(ge=0)]  # 64 bits, as msgpack has no more
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
    width: Annotated[int, Meta(ge=1, lt=MAX_WIDTH)]
    rows: Annotated[tuple[Rows, ...], Meta(min_length=1, max_length=MAX_ROWS)]

    @property
    def tokens(self) -> int:
        return sum(each.count for each in self.rows)


class FeatureBatch(NamedTuple):
    """N tokens' features. tokens: [N] int32. hidden: [N, width]. finals: [N, hidden size], or empty (EAGLE)."""

    header: FeatureHeader
    tokens: Buffer
    hidden: Buffer
    finals: Buffer

    def encode(self) -> list[Buffer]:
        """The frames."""
        return [sealed(msgspec.msgpack.encode(self.header)), self.tokens, self.hidden, self.finals]

    @classmethod
    def decode(cls, frames: Sequence[Buffer]) -> "FeatureBatch":
        """The batch that the frames are; nothing is copied.

        Raises:
            WireError: they are none.
        """
        if len(frames) != FRAMES:
            raise WireError(f"features in {len(frames)} frames; they take {FRAMES}")
        body = opened(memoryview(frames[0]), len(frames))
        try:
            header = _READS.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"not a header of features: {error}") from error
        item, finals = ITEM_BYTES[header.dtype], header.model.hidden_size if header.kind == "eagle3" else 0
        wanted = [header.tokens * size for size in (4, header.width * item, finals * item)]
        if (sizes := [memoryview(frame).nbytes for frame in frames[1:]]) != wanted:
            raise WireError(f"features of {header.tokens} tokens in frames of {sizes} bytes; they take {wanted}")
        return cls(header, *frames[1:])


_READS = msgspec.msgpack.Decoder(FeatureHeader)
