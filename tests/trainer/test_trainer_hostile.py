"""What peers, folders and disks do to a trainer: it goes on, or ends with one line that names the remedy."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from benchmarks.lib.safety.peers import measure
from tests.trainer.stand_in import Running, shared_tensors
from tests.wire.ends import HELLO
from tlt_server.drafter.target import read_tensor
from tlt_server.errors import ConfigError, DiskFailed, WireError
from tlt_server.trainer.checkpoint import Checkpoints
from tlt_server.trainer.data.buffer import Buffer
from tlt_server.trainer.data.features import Feature, Piece, assemble
from tlt_server.trainer.data.targets import KEPT, Targets
from tlt_server.trainer.host import locked
from tlt_server.trainer.publish.folder import load_frozen
from tlt_server.trainer.publish.published import Published
from tlt_server.trainer.servers import HIGHEST_GIVEN, SERVERS_KEPT, Servers
from tlt_server.wire.features import MAX_TOKENS, Rows
from tlt_server.wire.messages import READS_TO_TRAINER, Hello, decode, encode

LARGE = 1 << 20
HOLDS = """
import pathlib, sys, time
from tlt_server.trainer.host import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def hello(**said: object) -> Hello:
    return HELLO.__class__(**{name: getattr(HELLO, name) for name in HELLO.__struct_fields__} | said)


@pytest.mark.parametrize("field", ["newest_drafter", "drafter_version", "target_version"])
@pytest.mark.parametrize("number", [2**53, 2**63, 2**64 - 1])
def test_a_number_out_of_range_is_no_message(field: str, number: int) -> None:
    with pytest.raises(WireError, match=f"at `\\$.{field}`"):
        decode([encode(hello(**{field: number}))], READS_TO_TRAINER)


@given(st.lists(st.integers(0, 2**53 - 1), min_size=1, max_size=8))
def test_whatever_servers_were_given_there_are_versions_beyond_it(given_: list[int]) -> None:
    servers, published = Servers(), 0
    for number, newest in enumerate(given_):
        servers.hear(f"s{number}/1", hello(newest_drafter=newest))
        published = 1 + max(servers.newest_drafter, published)
        assert published < HIGHEST_GIVEN + 100
        servers.hear("good/1", hello(newest_drafter=published))
        assert decode([encode(hello(newest_drafter=published))], READS_TO_TRAINER)


def test_what_is_known_of_servers_and_targets_does_not_grow_without_end() -> None:
    servers, targets = Servers(), Targets()
    for number in range(SERVERS_KEPT + KEPT + 10):
        servers.hear(f"{number}/1", hello(weight_version=str(number)))
        targets.hear("one", number, str(number))
    assert len(servers._servers) == SERVERS_KEPT
    assert targets.newest == SERVERS_KEPT + KEPT + 9
    assert targets.of("one", targets.newest) == targets.newest == targets.count_of(targets.newest)
    assert len(targets._counts) == len(targets._known) == KEPT


def test_positions_far_apart_take_no_more_than_the_pieces() -> None:
    def piece(first: int) -> Piece:
        return Piece(first, torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3), torch.zeros(2, 3), 0)

    began = time.monotonic()
    for _ in range(50):
        runs = assemble([piece(0), piece(MAX_TOKENS - 2)], 0)
    assert [run.first for run in runs] == [0, MAX_TOKENS - 2]
    assert time.monotonic() - began < 1
    with pytest.raises(ValueError, match="at most"):
        Rows("r", 0, 0, MAX_TOKENS - 1, 2, 0)


def test_thousands_of_requests_that_bring_nothing_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlt_server.trainer.data.buffer.MOST_RESPONSES", 50)
    buffer = Buffer(3, 3, LARGE, LARGE)
    for number in range(1000):  # all of one known prompt
        buffer.add(Feature(str(number), 1, 5, 0, torch.arange(4), torch.ones(4, 3), 0))
    assert len(buffer._responses) <= 51


@contextmanager
def quickly(seconds: float = 10) -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_what_is_shared_may_be_anything(tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.mkdir()
    save_file(shared_tensors(), good / "m.safetensors")
    frozen = load_frozen(good, 1)
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe in it", "device in it", "nan", "shape", "header", "endless"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "pipe in it" / "m.safetensors")
    (tmp_path / "device in it" / "m.safetensors").symlink_to("/dev/zero")
    save_file({name: each * torch.nan for name, each in shared_tensors().items()}, tmp_path / "nan" / "m.safetensors")
    save_file({name: each[1:].clone() for name, each in shared_tensors().items()}, tmp_path / "shape/m.safetensors")
    (tmp_path / "header" / "m.safetensors").write_bytes(b"\xff" * 100)
    (tmp_path / "endless" / "m.safetensors").write_bytes((100).to_bytes(8, "little") + b" " * 100)
    os.truncate(tmp_path / "endless" / "m.safetensors", 1 << 40)
    folders = [path for path in tmp_path.iterdir() if path != good] + [
        Path("a\0b"),
        Path("x" * 5000),
        Path("/dev/zero"),
    ]
    with quickly():
        for folder in folders:
            with pytest.raises(ConfigError):
                load_frozen(folder, 1, like=frozen)
        with pytest.raises(ConfigError, match="is wanted"):
            read_tensor(tmp_path / "shape", "lm_head.weight", like=frozen.head)


def test_two_trainers_do_not_share_a_folder(tmp_path: Path) -> None:
    with locked(tmp_path / "one"):
        holder = [sys.executable, "-c", HOLDS, str(tmp_path / "one")]
        second = subprocess.run(holder, capture_output=True, text=True, check=False)
        assert f"that of a running trainer, process {os.getpid()}" in second.stderr
        with locked(tmp_path / "two"):
            pass
    with locked(tmp_path / "one"):
        pass


def test_the_lock_of_a_trainer_that_was_killed_is_free(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(ConfigError, match=f"process {holder.pid}"), locked(tmp_path):
            pass
        holder.kill()
    with locked(tmp_path):
        pass


@contextmanager
def full(size: int) -> Iterator[None]:
    """As a disk that has no room for larger files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_told_leaves_nothing_and_the_next_checkpoint_is_whole(tmp_path: Path) -> None:
    saves = Checkpoints(tmp_path)
    with full(1 << 12):
        saves.save(1, {"w": torch.ones(1 << 14)}, {})
        with pytest.raises(DiskFailed, match=r"step-00000001 cannot be written .*make room"):
            saves.wait()
    assert not list(tmp_path.iterdir())
    saves.save(2, {"w": torch.ones(1 << 14)}, {"steps": 2})
    saves.close()
    found = saves.newest()
    assert found is not None
    assert found.facts == {"steps": 2}


def test_a_damaged_checkpoint_or_drafter_is_named_at_once(tmp_path: Path) -> None:
    saved, drafter = tmp_path / "step-00000003", tmp_path / "published" / "drafter-00000001"
    saved.mkdir()
    drafter.mkdir(parents=True)
    os.mkfifo(saved / "facts.json")
    os.mkfifo(drafter / "model.safetensors")
    (drafter / "config.json").write_text(json.dumps({}))
    with quickly():
        with pytest.raises(ConfigError, match="damaged"):
            Checkpoints(tmp_path).newest()
        with pytest.raises(ConfigError, match=r"damaged .*Remove it"):
            Published(tmp_path).newest()
        with pytest.raises(ConfigError, match="damaged or incomplete"):
            Published(tmp_path).network(1)


@pytest.mark.slow
def test_a_trainer_ends_by_a_damaged_drafter_with_one_line(tmp_path: Path) -> None:
    trainer = Running(tmp_path)
    drafter = tmp_path / "published" / "drafter-00000001"
    drafter.mkdir(parents=True)
    (drafter / "model.safetensors").write_bytes(b"torn")
    with trainer.process() as process:
        assert process.wait(60) != 0
    assert "Traceback" not in trainer.log
    assert f"{drafter}: damaged" in trainer.log.splitlines()[-1]


def test_signals_end_a_process_that_is_stuck() -> None:
    code = (
        "import ctypes, threading\nfrom tlt_server.trainer.host import ended_by_signals\n"
        "ended_by_signals(threading.Event(), 0.5)\nprint(1, flush=True)\n"
        "while True: ctypes.CDLL(None).sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as stuck:
        assert stuck.stdout is not None
        stuck.stdout.readline()
        time.sleep(0.3)
        stuck.send_signal(signal.SIGTERM)
        assert stuck.wait(10) == 1


@pytest.mark.slow
def test_hostile_peers_end_and_stall_nobody(tmp_path: Path) -> None:
    figures = measure(1000, 7, tmp_path)
    assert figures["peer_messages"] >= 1000
    assert figures["trainer_ended"] == figures["trainer_stalled"] == 0
    assert figures["peer_memory_growth"] < 0.05
