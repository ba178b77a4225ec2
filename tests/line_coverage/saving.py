"""A plugin of coverage that saves what a process has run, every second: SGLang ends its schedulers by SIGKILL."""

import os
import threading
import time
from typing import Any

from coverage import Coverage

EVERY = 1.0
"""Seconds; what a killed process ran in its last one is lost."""


_SAVING = set[int]()
"""Processes that do; a fork has those before it."""


def coverage_init(registry: Any, options: Any) -> None:
    """Called for each measurement that begins; a fork begins one beside that of the process that it is a fork of."""
    if os.getpid() not in _SAVING:  # two threads that saved the same data at once ended the process
        _SAVING.add(os.getpid())
        threading.Thread(target=_save_for_ever, name="coverage", daemon=True).start()


def _save_for_ever() -> None:
    while True:
        time.sleep(EVERY)
        if (running := Coverage.current()) is not None:
            running.save()
