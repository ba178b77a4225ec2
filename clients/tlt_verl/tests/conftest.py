"""verl imports wherever torch does, and only where a test needs it: that takes seconds."""

from pathlib import Path

import pytest
from tlt_server.engine.cpu.torchvision import mend_torchvision

mend_torchvision()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make check` leaves servers alone, and so the modules whose tests are all of servers."""
    return True if collection_path.name == "server" and "not server" in config.option.markexpr else None
