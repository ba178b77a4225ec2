"""`tlt-server top`: one frame, many, a fleet's, a server that is gone, keys."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.watch.stand_in import CALL, NEWER, Front, Recorded, serving
from tlt_server.errors import ConfigError, ServerFailed
from tlt_server.watch import top
from tlt_server.watch.frames import plain, sparkline
from tlt_server.watch.rates import Rates


def printed(url: str, key: str | None = None, width: int = 120) -> str:
    console = Console(width=width, color_system=None, highlight=False)
    with console.capture() as captured:
        top.once(url, key, console, interval_s=0)
    return captured.get()


def cells(line: str) -> list[str]:
    return [each for each in line.split("  ") if each]


def test_a_frame_of_a_server() -> None:
    seen = Recorded()
    with serving(seen) as server:
        shown = printed(server.url)
    arms = seen.strategy["selection"]["buckets"][2]["arms"]
    off, *others = (f"{each['expected_reward']:,.0f}" for each in sorted(arms, key=lambda each: str(each["arm"] or "")))
    lines = shown.splitlines()
    figures = next(line for line in lines if line.startswith("3.40"))
    assert [each.strip() for each in cells(figures)] == ["3.40", "1,000", "5", "0", "off", '3 "step-3"', "2"]
    assert "a target pass gives 5.06 tokens on average" in lines[0]
    assert next(line for line in lines if "▸ 5-16" in line).split()[2:] == [f"[{off}]", *others]
    assert "drafter_rolled_back" in shown
    assert "target_published" in shown


def test_what_history_gives_is_told() -> None:
    seen, front = Recorded(), Front("alpha", "beta", "gamma")
    seen.remembers()
    for name in ("alpha", "beta"):
        front.servers[name].remembers()
    with serving(seen) as server:
        shown = printed(server.url, width=160)
    assert "81 % found, 1,234,567 of 16,777,216 tokens" in shown
    assert "3.20" in next(line for line in shown.splitlines() if line.startswith("3.40"))
    foot = next(line for line in shown.splitlines() if "tokens a pass" in line).split()
    assert (foot[3], foot[-1]) == ("1.00", "3.21"), "of each arm: off, ..., history"
    with serving(front) as server:
        shown = printed(server.url, width=160)
    assert "81 % found, 2,469,134 of 33,554,432 tokens" in shown


def test_what_is_held_is_told() -> None:
    seen = Recorded()
    seen.status.update(paused=True, offloaded=["weights"], trainer={"address": "tcp://t:1", "connected": False})
    seen.status["versions"]["target"].update(partial=True, missing=["a.weight"])
    seen.status["versions"]["drafter"].update(frozen=True)
    seen.status["versions"]["drafter"]["watch"]["state"] = "worse"
    seen.strategy["held"] = "accept length 1.02"
    with serving(seen) as server:
        told = [line for line in printed(server.url).splitlines() if line.startswith("! ")]
    words = ("paused", "weights", "under way", "a.weight", "1.02", "held back", "plainly worse", "tcp://t:1")
    assert len(told) == len(words)
    assert all(word in line for word, line in zip(words, told, strict=True))


def test_a_frame_of_a_fleet() -> None:
    front = Front("alpha", "beta", "gamma")
    front.replica("beta").update(state="stale", why="has [red]step-2\x1b[2J", weight_version="step-2")
    front.servers["gamma"].gone = True
    front.replica("gamma").update(state="quarantined", why="", weight_version=None, running=0)
    front.fleet.update(paused=True, min_ready=2, transaction=CALL, held=7)
    front.event("quarantined", "gamma", "no answer for 30 s")
    with serving(front) as server:
        shown = printed(server.url)
        alone = printed(f"{server.url}/tlt/v1/replicas/alpha")
    alpha, beta, gamma = (next(line for line in shown.splitlines() if f"  {name} " in line) for name in front.servers)
    assert alpha.split()[1:6] == ["ready", "step-3", "5", "1,000", "3.40"]
    assert "stale: has [red]step-2\N{REPLACEMENT CHARACTER}[2J" in beta
    assert gamma.split()[1:6] == ["quarantined", "-", "0", "-", "-"]
    assert "\x1b" not in shown
    assert f"{CALL['call']}, apply, waiting for alpha, beta" in shown
    for told in ("1 of 3, at least 2", "2,000", "it has paused", "7 requests wait", "1 ready, of at least 2"):
        assert told in shown
    assert "gamma: no answer for 30 s" in shown
    assert '3 "step-3"' in alone


def test_an_older_server_says_less() -> None:
    seen = Recorded()
    seen.lacks = NEWER
    seen.strategy = {"mode": "off", "on": False, "held": None, "arm": None}
    with serving(seen) as server:
        assert " - " in printed(server.url)


def test_keys() -> None:
    with serving(Recorded()) as server:
        server.key = "s3cret"
        assert "3.40" in printed(server.url, "s3cret")
        with pytest.raises(ConfigError, match="TLT_API_KEY"):
            printed(server.url, "another")


def test_what_cannot_be_read_is_one_line() -> None:
    with serving(Recorded()) as server:
        server.failing = True
        with pytest.raises(ServerFailed, match="answers 500: is it a tlt-server"):
            printed(server.url)
    with pytest.raises(ServerFailed, match="does not answer"):
        printed(server.url)
    for wrong in ("127.0.0.1:30000", "ftp://x", "http://"):
        with pytest.raises(ConfigError, match="write it as http://127"):
            printed(wrong)


COMMAND = [sys.executable, "-m", "tlt_server", "top"]


@pytest.mark.slow
def test_once_is_for_scripts() -> None:
    with serving(Recorded()) as server:
        done = subprocess.run([*COMMAND, server.url, "--once", "--interval", "0.1"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "3.40" in done.stdout
    assert "\x1b" not in done.stdout
    done = subprocess.run([*COMMAND, server.url, "--once"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"{server.url} does not answer" in done.stderr


class Terminal:
    """`tlt-server top` in a terminal of 40 lines."""

    def __init__(self, url: str) -> None:
        self.keyboard, there = pty.openpty()
        size = {"COLUMNS": "120", "LINES": "40", "TERM": "xterm"}
        self.process = subprocess.Popen(
            [*COMMAND, url, "--interval", "0.1"], stdin=there, stdout=there, stderr=there, env=os.environ | size
        )
        os.close(there)
        self.said = b""

    def until(self, words: str, within_s: float = 20.0) -> None:
        self.said, give_up = b"", time.monotonic() + within_s
        while words.encode() not in self.said:
            assert time.monotonic() < give_up, f"never {words!r}, but {self.said[-2000:]!r}"
            if select.select([self.keyboard], [], [], 0.1)[0]:
                self.said += os.read(self.keyboard, 65536)

    def ended(self) -> int:
        give_up = time.monotonic() + 20
        while self.process.poll() is None:  # what it still has to say must not fill the terminal
            assert time.monotonic() < give_up
            if select.select([self.keyboard], [], [], 0.05)[0]:
                with contextlib.suppress(OSError):
                    os.read(self.keyboard, 65536)
        return self.process.returncode


@pytest.fixture
def terminal(request: Any) -> Iterator[Any]:
    started: list[Terminal] = []

    def start(url: str) -> Terminal:
        started.append(Terminal(url))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()
        os.close(each.keyboard)


@pytest.mark.slow
def test_it_lives_through_its_server_and_ends_by_q(terminal: Any) -> None:
    with serving(Recorded()) as server:
        shown = terminal(server.url)
        shown.until("1,000")
    shown.until("trying again")
    with serving(Recorded(), server.server_port):
        shown.until("1,000")
        os.write(shown.keyboard, b"q")
        assert shown.ended() == 0


@pytest.mark.slow
def test_it_ends_by_ctrl_c_and_leaves_the_terminal_as_it_was(terminal: Any) -> None:
    with serving(Front("alpha", "beta")) as server:
        shown = terminal(server.url)
        shown.until("beta")
        shown.process.send_signal(signal.SIGINT)
        assert shown.ended() == 0


@given(st.text())
def test_no_control_character_reaches_the_terminal(said: str) -> None:
    assert plain(said).isprintable()
    assert len(plain(said)) == len(said)


@given(st.lists(st.none() | st.floats(0, 1e9)))
def test_a_sparkline_has_a_bar_a_value(values: list[float | None]) -> None:
    drawn = sparkline(values)
    assert len(drawn) == len(values)
    known = [value for value in values if value is not None]
    if known and max(known) > 0:
        assert drawn[values.index(max(known))] == "█"


rates = st.builds(Rates, st.none() | st.floats(0, 1e6), st.integers(0, 1000), st.integers(0, 5000))


@given(st.lists(rates, max_size=8))
def test_sums_are_those_of_all_drafts(each: list[Rates]) -> None:
    whole = Rates.summed(each)
    drafts, accepted = sum(rate.drafts for rate in each), sum(rate.accepted for rate in each)
    assert whole.accept_length == (1 + accepted / drafts if drafts else None)
    if whole.accept_length is not None:
        lengths = [rate.accept_length for rate in each if rate.accept_length is not None]
        assert min(lengths) - 1e-9 <= whole.accept_length <= max([*lengths, 1 + accepted / drafts]) + 1e-9
