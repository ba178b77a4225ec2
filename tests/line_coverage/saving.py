"""A plugin of coverage that saves what a process has run, every second: SGLang ends its schedulers by SIGKILL."""

import threading
import time
from typing import Any

from coverage import Coverage

EVERY = 1.0
"""Seconds; what a killed process ran in its last one is lost."""


def coverage_init(registry: Any, options: Any) -> None:
    threading.Thread(target=_save_for_ever, name="coverage", daemon=True).start()


def _save_for_ever() -> None:
    while True:
        time.sleep(EVERY)
        if (running := Coverage.current()) is not None:
            running.save()
