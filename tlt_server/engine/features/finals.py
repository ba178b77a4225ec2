"""The target's final hidden states beside those that EAGLE-3's drafter reads: what that drafter learns from."""

from functools import cache
from typing import Any

from tlt_server.config import ServerConfig


def keeps_last_states(aux_hidden_states: Any, metadata: Any) -> bool:
    """Whether a pass keeps what its head reads, though it captures other states: `aux_hidden_states`, None where they
    are the final ones. metadata: upstream's `LogitsMetadata`."""
    return aux_hidden_states is not None and metadata.capture_hidden_mode.is_full() and _taps()


@cache
def _taps() -> bool:
    return ServerConfig.from_environment().taps
