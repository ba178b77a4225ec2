"""A plugin of coverage that saves what a process has run, every second: SGLang ends its schedulers by SIGKILL."""

import os
import threading
import time
from typing import Any

from coverage import Coverage

EVERY, LOOK_EVERY = 1.0, 0.05
"""Seconds; what a killed process ran in its last one is lost; until it is noticed that the process ends."""
_SAVING = set[int]()
"""Processes that do; a fork has those before it."""


def coverage_init(registry: Any, options: Any) -> None:
    """Called for each measurement that begins; a fork begins one beside that of the process that it is a fork of."""
    if os.getpid() not in _SAVING:  # two threads that saved the same data at once ended the process
        _SAVING.add(os.getpid())
        threading.Thread(target=_save, name="coverage").start()


def _save() -> None:
    """Until the main thread ends, which waits for this one before coverage saves for the last time."""
    due, main = time.monotonic() + EVERY, threading.main_thread()
    while main.is_alive():
        time.sleep(LOOK_EVERY)
        if time.monotonic() >= due and (running := Coverage.current()) is not None:
            running.save()
            due = time.monotonic() + EVERY
