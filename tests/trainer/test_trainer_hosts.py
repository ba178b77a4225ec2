"""Training across hosts."""

import subprocess
import sys
from pathlib import Path

import pytest

UNSHARE = ["unshare", "--net", "--mount"]


@pytest.mark.slow
def test_a_trainer_learns_from_servers_on_other_hosts(tmp_path: Path) -> None:
    """Over a network, with CURVE keys, and nothing of the servers' files in sight."""
    if subprocess.run([*UNSHARE, "true"], check=False).returncode:
        pytest.skip("needs namespaces of its own: run it as root")
    command = [*UNSHARE, sys.executable, "-m", "tests.trainer.hosts", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith("all arrived\n")
