"""`tlt-server bench` on a real server: what it keeps, what it leaves behind, what it refuses."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tlt_client import Client, SamplingParams
from tlt_client.schemas import StrategyUpdate

from tests.server.conftest import PROMPTS
from tlt_server import results

pytestmark = pytest.mark.server("eagle-chain")


def start(url: str, *flags: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tlt_server", "bench", "--url", url, "--max-new-tokens", "200", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_figures_are_kept_and_the_strategy_is_set_back(url: str, client: Client, tmp_path: Path) -> None:
    before = client.set_strategy(StrategyUpdate("bandit", exploration=0.02))
    kept = tmp_path / "made" / "bench.json"
    run = start(url, "--concurrency", "2", "--seconds", "1", "--rounds", "2", "--json", str(kept))
    printed, said = run.communicate(timeout=300)
    assert run.returncode == 0, said
    figures = results.read(kept).figures
    assert {f"tokens_per_s_{side}_batch_2" for side in ("off", "bandit", "3_1_4")} <= figures.keys()
    assert all(value > 0 for value in figures.values())
    assert 2 < figures["accept_length_3_1_4_batch_2"] <= 4
    assert f"{url} will be asked for about" in printed
    after = client.strategy()
    assert (after.mode, after.selection.exploration) == ("bandit", 0.02)
    assert [b.first for b in after.selection.buckets] == [b.first for b in before.selection.buckets]
    assert client.load().running == 0


def test_what_was_measured_by_ctrl_c_is_kept(url: str, client: Client, tmp_path: Path) -> None:
    before = client.strategy().mode
    kept = tmp_path / "bench.json"
    run = start(url, "--concurrency", "1", "--seconds", "2", "--rounds", "9", "--json", str(kept))
    time.sleep(1)
    deadline = time.monotonic() + 120
    while client.strategy().mode != "pinned" and time.monotonic() < deadline:  # off and the bandit had their turn
        time.sleep(0.2)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=60)
    assert run.returncode != 0
    assert "Traceback" not in said
    assert "speedup_bandit_batch_1" in results.read(kept).figures
    assert client.strategy().mode == before
    assert client.load().running == 0


def test_a_server_that_others_use_is_not_measured(url: str, client: Client) -> None:
    long = SamplingParams(max_new_tokens=600, ignore_eos=True)
    other = threading.Thread(target=client.generate, args=(PROMPTS[0], long))
    other.start()
    while not client.load().running:
        time.sleep(0.01)
    run = start(url)
    _, said = run.communicate(timeout=60)
    other.join()
    assert run.returncode == 2
    assert "1 requests of others" in said
