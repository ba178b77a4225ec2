"""How a trainer stands, in one line at the bottom of a terminal."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tlt_server.trainer.status import Status

REFRESHES_PER_S = 2


def line(status: Status) -> str:
    """What somebody who watches wants to know of it."""
    parts = [status.state, f"step {status.steps:,}", f"{status.entries_per_s:,.0f} tokens/s"]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.3f}")
    if status.candidate is not None and status.live is not None and status.surely is not None:
        by_position = " ".join(f"{each:.0%}" for each in status.candidate_reaches)
        gain = f"by position {by_position}, " if by_position else ""
        gain += f"active {status.live:.2f}, surely {status.surely:+.1%}, {status.judged_by} requests"
        parts.append(f"accept length held out {status.candidate:.2f} ({gain})")
    kept = f"published {status.published}" + (f", active {status.active}" if status.published else "")
    parts.append(f"{kept}, {status.rejected} not kept" if status.rejected else kept)
    if dropped := sum(status.tokens_dropped.values()):
        parts.append(f"{dropped:,} tokens dropped")
    parts.append(f"checkpoint in {status.checkpoint_in:,} steps")
    return " · ".join(parts)


@contextmanager
def in_terminal(read: Callable[[], Status]) -> Iterator[None]:
    """Shows the line while the context lasts, log lines above it; nothing where standard error is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    handlers = [each for each in logging.getLogger().handlers if isinstance(each, logging.StreamHandler)]
    with Live(
        get_renderable=lambda: Text(line(read()), overflow="ellipsis", no_wrap=True),
        console=console,
        refresh_per_second=REFRESHES_PER_S,
        transient=True,
    ):
        before = [each.setStream(sys.stderr) for each in handlers]  # Live's own, by now
        try:
            yield
        finally:
            for handler, stream in zip(handlers, before, strict=True):
                if stream is not None:
                    handler.setStream(stream)
