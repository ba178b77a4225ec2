"""Drafters from host to host."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.test_trainer_hosts import UNSHARE


@pytest.mark.slow
def test_servers_on_other_hosts_fetch_from_one_another_where_they_can(tmp_path: Path) -> None:
    """With a CURVE key each; who reaches no other fetches from the trainer, the second time at once."""
    if subprocess.run([*UNSHARE, "true"], check=False).returncode:
        pytest.skip("needs namespaces of its own: run it as root")
    command = [*UNSHARE, sys.executable, "-m", "tests.wire.hosts", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith("all arrived\n")
