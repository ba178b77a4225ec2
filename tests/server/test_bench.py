"""`tlt-server bench` on a real server: what it keeps, what it leaves behind, what it refuses."""

import signal
import threading
import time
from pathlib import Path

import pytest
from tlt_client import Client, SamplingParams
from tlt_client.schemas import StrategyUpdate

from tests.forks import Fork, forked
from tests.server.conftest import PROMPTS
from tlt_server import results

pytestmark = pytest.mark.server("eagle-chain")


def start(log: Path, url: str, *flags: str) -> Fork:
    return forked(["bench", "--url", url, "--max-new-tokens", "200", *flags], log)


def test_figures_are_kept_and_the_strategy_is_set_back(url: str, client: Client, tmp_path: Path) -> None:
    before = client.set_strategy(StrategyUpdate("bandit", exploration=0.02))
    kept, log = tmp_path / "made" / "bench.json", tmp_path / "log"
    run = start(log, url, "--concurrency", "2", "--seconds", "1", "--rounds", "1", "--json", str(kept))
    assert run.wait(300) == 0, log.read_text()
    figures = results.read(kept).figures
    assert {f"tokens_per_s_{side}_batch_2" for side in ("off", "bandit", "3_1_4")} <= figures.keys()
    assert all(value > 0 for value in figures.values())
    assert 2 < figures["accept_length_3_1_4_batch_2"] <= 4
    assert f"{url} will be asked for about" in log.read_text()
    after = client.strategy()
    assert (after.mode, after.selection.exploration) == ("bandit", 0.02)
    assert [b.first for b in after.selection.buckets] == [b.first for b in before.selection.buckets]
    assert client.load().running == 0


def test_what_was_measured_by_ctrl_c_is_kept(url: str, client: Client, tmp_path: Path) -> None:
    client.set_strategy(StrategyUpdate("bandit"))
    kept, log = tmp_path / "bench.json", tmp_path / "log"
    run = start(log, url, "--concurrency", "1", "--seconds", "1", "--rounds", "9", "--json", str(kept))
    deadline = time.monotonic() + 120
    while client.strategy().mode != "pinned" and time.monotonic() < deadline:  # off and the bandit had their turn
        time.sleep(0.1)
    run.send_signal(signal.SIGINT)
    assert run.wait(60) != 0
    assert "Traceback" not in log.read_text()
    assert "speedup_bandit_batch_1" in results.read(kept).figures
    assert client.strategy().mode == "bandit"
    assert client.load().running == 0


def test_a_server_that_others_use_is_not_measured(url: str, client: Client, tmp_path: Path) -> None:
    long = SamplingParams(max_new_tokens=600, ignore_eos=True)
    other = threading.Thread(target=client.generate, args=(PROMPTS[0], long))
    other.start()
    while not client.load().running:
        time.sleep(0.01)
    run = start(tmp_path / "log", url)
    assert run.wait(60) == 2
    other.join()
    assert "1 requests of others" in (tmp_path / "log").read_text()
