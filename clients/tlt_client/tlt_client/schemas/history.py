"""What is remembered of responses, to draft others from."""

from typing import Annotated

import msgspec


class History(msgspec.Struct, frozen=True):
    """`GET /tlt/v1/history`: what is remembered of responses, in each rank; counts are since the server started."""

    tokens: int
    """That are kept."""
    capacity: int
    """Tokens; what was written first is forgotten first."""
    bytes: int
    """Of memory, reserved."""
    written: int
    """Tokens taken in."""
    lookups: int
    """Requests that a step asked drafts for."""
    found: int
    """Of them, those that it found some for."""
    drafted: int
    """Tokens."""
    accepted: int
    """Of them."""


TokenIds = Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]], msgspec.Meta(min_length=1)]


class HistoryLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`POST /tlt/v1/history`: responses to a prompt, to draft others from. Several megabytes at once keep steps waiting
    for a tenth of a second."""

    prompt: TokenIds
    responses: Annotated[list[TokenIds], msgspec.Meta(min_length=1)]
    version: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] | None = None
    """A number for the weights that said them; None: that of the active ones. It is kept, and weighs nothing yet."""
    namespace: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    """As in requests' `history_namespace`."""
