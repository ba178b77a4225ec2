"""A trainer's line in a terminal; none elsewhere."""

import io
import logging
import os
import pty
import sys
import time
from typing import Any

import pytest

from tlt_server.trainer.progress import in_terminal, line
from tlt_server.trainer.status import Status

COUNTS: dict[str, Any] = {
    "tokens_dropped": {}, "parts_dropped": {}, "connections_cut": {}, "servers": [], "workers": [],
    "candidate_reaches": [], "live_reaches": [],
}  # fmt: skip


def status(**said: Any) -> Status:
    fields = dict.fromkeys(Status.__struct_fields__, 0) | COUNTS
    return Status(
        **fields | {"state": "training", "loss": None, "candidate": None, "live": None, "surely": None} | said
    )


def test_a_line_says_what_is_known() -> None:
    assert line(status(checkpoint_in=200)) == "training · step 0 · 0 tokens/s · published 0 · checkpoint in 200 steps"
    known = status(
        steps=1234, entries_per_s=5678.9, loss=0.5, candidate=2.811, live=2.6, surely=0.031, judged_by=12,
        candidate_reaches=[0.91, 0.6, 0.301],
        published=7, active=6, rejected=2, tokens_dropped={"old": 5, "malformed": 4}, checkpoint_in=60,
    )  # fmt: skip
    assert line(known) == (
        "training · step 1,234 · 5,679 tokens/s · loss 0.500 · "
        "accept length held out 2.81 (by position 91% 60% 30%, active 2.60, surely +3.1%, 12 requests) · "
        "published 7, active 6, 2 not kept · 9 tokens dropped · checkpoint in 60 steps"
    )


@pytest.mark.slow
def test_it_stands_below_the_log_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, inner = pty.openpty()
    with os.fdopen(inner, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "200")
        handler = logging.StreamHandler(stderr)
        log = logging.getLogger()
        monkeypatch.setattr(log, "handlers", [handler])  # others' may write to what is closed
        with in_terminal(lambda: status(steps=42)):
            log.warning("something happened")
            time.sleep(0.7)
        log.warning("afterwards")
        assert handler.stream is stderr
        stderr.flush()
        seen = ""
        while "afterwards" not in seen:
            seen += os.read(terminal, 4096).decode()
    os.close(terminal)
    assert "step 42" in seen
    assert seen.index("something happened") < seen.rindex("step 42") < seen.index("afterwards")


def test_it_writes_nothing_where_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with in_terminal(lambda: pytest.fail("it was asked for")):
        pass
    assert sys.stderr.getvalue() == ""
