"""The log of settled steps: whole lines, readable while it grows."""

import time
from contextlib import closing
from pathlib import Path

from tlt_server.config import Arm
from tlt_server.engine.decode.steplog import SettledStep, StepLog, read_steps


def test_steps_are_read_back_from_any_line_on(tmp_path: Path) -> None:
    path, began = tmp_path / "steps.jsonl", time.monotonic()
    with closing(StepLog(path)) as log, closing(StepLog(path)) as of_another_replica:
        log.note(False, None, {"a": 1})
        since = path.stat().st_size
        of_another_replica.note(True, 7, {"a": 3, "b": 4}, Arm(3, 1, 4))
    first, second = read_steps(path)
    assert began <= first.settled <= second.settled <= time.monotonic()
    assert (first.decode, first.drafter_version, first.tokens) == (False, None, {"a": 1})
    assert read_steps(path, since) == [second] == [SettledStep(second.settled, True, 7, {"a": 3, "b": 4}, Arm(3, 1, 4))]


def test_a_line_that_is_being_written_is_left(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with closing(StepLog(path)) as log:
        log.note(True, 0, {"a": 1})
    path.write_bytes(path.read_bytes() + b'[1.0,true,0,{"a"')
    assert len(read_steps(path)) == 1
