"""The demo's loop as a person meets it: it shows a step, and Ctrl-C ends it and every process that it started."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.server.conftest import Servers

pytestmark = pytest.mark.server


def test_ctrl_c_ends_every_process(servers: Servers, tmp_path: Path) -> None:
    servers.close()  # the demo has its own
    command = [sys.executable, "-u", "-m", "tlt_server", "demo", "--part", "loop", "--plot", str(tmp_path / "demo.png")]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert demo.stdout is not None
    said = [demo.stdout.readline(), demo.stdout.readline()]
    assert said[1].startswith("step 1 of 10: reward 0."), said
    started = psutil.Process(demo.pid).children(recursive=True)
    commands = " ".join(word for process in started for word in process.cmdline())
    assert all(name in commands for name in ("tlt_server serve", "tlt_server train", "tlt_grpo")), commands
    demo.send_signal(signal.SIGINT)
    _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert "Traceback" not in errors
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive
    assert not list(tmp_path.glob("tlt-demo-*"))
