"""Training across hosts."""

import subprocess
import sys
from pathlib import Path

import pytest

UNSHARE = ["unshare", "--net", "--mount"]


def run_on_hosts(module: str, folder: Path, within_s: float) -> None:
    """A module that makes hosts of network namespaces, and says at its end that all arrived."""
    if subprocess.run([*UNSHARE, "true"], check=False).returncode:
        pytest.skip("needs namespaces of its own: run it as root")
    command = [*UNSHARE, sys.executable, "-m", module, str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith("all arrived\n")


@pytest.mark.slow
def test_a_trainer_learns_from_servers_on_other_hosts(tmp_path: Path) -> None:
    """Over a network, with CURVE keys, and nothing of the servers' files in sight."""
    run_on_hosts("tests.trainer.hosts", tmp_path, 300)
