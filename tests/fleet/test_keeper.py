"""A keeper: a real one behind a front over stand-ins, and a trainer whose group it is the one rank of."""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tlt_client import Client
from tlt_client.errors import TltClientError
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from tests.fleet.conftest import QUICK, Fleet, answers, wait_for
from tests.forks import Fork, forked
from tlt_server.engine.messages import Join, Receive
from tlt_server.errors import ConfigError, UpdateRefused
from tlt_server.fleet.front import Beside, Front
from tlt_server.fleet.keeper.folder import Kept
from tlt_server.fleet.keeper.receive import Receiver
from tlt_server.keys import Keys
from tlt_server.process import free_port

NAMES = ["embed", "norm", "head", "bias"]
Tensors = dict[str, torch.Tensor]


def base(folder: Path) -> Path:
    folder.mkdir(parents=True)
    save_file({name: torch.full((3,), -1.0) for name in NAMES}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder


def read(folder: Path) -> dict[str, float]:
    """As a loader does: file by file, what comes later holds."""
    found: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return {name: float(tensor[0]) for name, tensor in found.items()}


# -- what it keeps --


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.lists(st.sampled_from(NAMES), min_size=1, unique=True), min_size=1, max_size=3), max_size=4)
)
def test_a_checkpoint_is_whole_whatever_was_sent(
    tmp_path_factory: pytest.TempPathFactory, publications: list[list[list[str]]]
) -> None:
    folder = tmp_path_factory.mktemp("kept")
    kept, expected, value = Kept(folder / "out", base(folder / "model")), dict.fromkeys(NAMES, -1.0), 0.0
    for publication in publications:
        for call in publication:
            value += 1
            kept.take({name: torch.full((3,), value) for name in call})
            expected |= dict.fromkeys(call, value)
        path = kept.whole()
        assert read(path) == expected
        assert sorted(each.name for each in path.iterdir() if each.suffix == ".json") == ["config.json"]
        kept.clear_away()
    assert len(list((folder / "out").iterdir())) == min(len(publications), 2)


def test_what_members_refused_is_gone(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "out", base(tmp_path / "model"))
    kept.take({"norm": torch.ones(3)})
    first = kept.whole()
    kept.take({"norm": torch.full((3,), 7.0)})
    kept.drop(kept.whole())
    kept.take({"head": torch.full((3,), 2.0)})
    assert read(kept.whole()) == read(first) | {"head": 2.0}
    kept.drop(tmp_path / "model")
    assert (tmp_path / "model").exists(), "only its own are its to remove"
    with pytest.raises(UpdateRefused, match="no tensor came"):
        kept.whole()


def test_what_a_killed_keeper_was_receiving_is_gone(tmp_path: Path) -> None:
    model = base(tmp_path / "model")
    Kept(tmp_path / "out", model).take({"norm": torch.ones(3)})
    assert Kept(tmp_path / "out", model).staged == 0
    assert not list((tmp_path / "out").iterdir())
    with pytest.raises(ConfigError, match="no folder with safetensors"):
        Kept(tmp_path / "out", tmp_path)


def test_what_cannot_be_written_is_of_no_publication(tmp_path: Path) -> None:
    """A part of it is missing, and the rest is still on its way: the group is none any more."""

    class Sent:
        def receive(self, buffer: torch.Tensor) -> None:
            buffer.fill_(1.0)

        def close(self) -> None:
            pass

    kept = Kept(tmp_path / "out", base(tmp_path / "model"))
    receiver = Receiver(kept, torch.device("cpu"), 5.0)
    receiver._vllms, receiver._joined = Sent(), Join(("h", 1), 2, 1)
    receiver.transfer(Receive(["norm"], ["float32"], [[3]]))
    assert (kept.staged, receiver.joined) == (1, True)
    shutil.rmtree(tmp_path / "out" / ".staging")
    (tmp_path / "out" / ".staging").write_text("in the way")
    with pytest.raises(OSError, match="exists"):
        receiver.transfer(Receive(["head"], ["float32"], [[3]]))
    assert (kept.staged, receiver.joined) == (0, False)


# -- a trainer, a front, members --


class WithKeeper(Fleet):
    """Members are stand-ins, which say what they have read of the keeper's folder."""

    def start_with(self, keeper: str, *names: str) -> None:
        self.members(*names)
        self.front = Front(self.folder / "state", 1, QUICK, Keys(), Beside(keeper=keeper))
        self.run(self.front.start("127.0.0.1", self.port, {name: self.urls[name] for name in names}))
        self.await_states(**dict.fromkeys(names, "ready"))

    @property
    def active(self) -> dict[str, dict[str, float]]:
        return {name: httpx.get(self.urls[name] + "/read").json() for name in self.processes}


Process = tuple[str, Fork]


@pytest.fixture(scope="module")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with keeping(tmp_path_factory.mktemp("keepers") / "first") as started:
        yield started


@contextlib.contextmanager
def keeping(folder: Path) -> Iterator[Process]:
    """Its URL, and its process."""
    url, log = f"http://127.0.0.1:{(port := free_port())}", folder / "log"
    flags = ["--model-path", str(base(folder / "model")), "--port", str(port), "--folder", str(folder / "out")]
    process = forked(["keeper", *flags], log)
    try:
        wait_for(lambda: process.poll() is not None or answers(url), log.read_text, 120)
        yield url, process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[WithKeeper]:
    fleet = WithKeeper(tmp_path)
    yield fleet
    fleet.close()


def tensors(value: float) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.full((3,), value)) for name in NAMES]


@pytest.mark.slow
def test_a_trainers_group_outlives_members(kept: WithKeeper, keeper: Process) -> None:
    kept.start_with(keeper[0], "a", "b")
    with Client(kept.url) as client:
        group = client.init_weights_update_group(backend="gloo")
        client.update_weights_from_distributed(group, tensors(1.0), "one")
        assert kept.active == {"a": dict.fromkeys(NAMES, 1.0), "b": dict.fromkeys(NAMES, 1.0)}
        kept.kill("b")
        kept.await_states(a="ready", b="quarantined")
        client.pause_generation("in_place")
        client.update_weights_from_distributed(group, tensors(2.0)[:2], "two")
        client.update_weights_from_distributed(group, tensors(3.0)[2:], "two")
        kept.processes.pop("b")
        assert kept.active == {"a": dict.fromkeys(NAMES, 1.0)}
        client.continue_generation()
        expected = dict.fromkeys(NAMES[:2], 2.0) | dict.fromkeys(NAMES[2:], 3.0)
        assert (kept.active, kept.seen()["weight_version"]) == ({"a": expected}, "two")
        kept.members("c")  # a late joiner has the keeper's folder, where a broadcast of members leaves it none
        kept.join("c")
        wait_for(lambda: kept.states()["c"] == "ready", kept.seen)
        assert kept.active["c"] == expected
        client.begin_weight_update()
        client.update_weights_from_distributed(group, tensors(4.0), "three")
        assert kept.generate(1).json()["meta_info"]["weight_version"] == "two", "rollouts go on while the trainer sends"
        client.end_weight_update()
        assert kept.generate(1).json()["meta_info"]["weight_version"] == "three"
        assert {tuple(each.values()) for each in kept.active.values()} == {(4.0,) * len(NAMES)}
        client.destroy_weights_update_group(group)


@pytest.mark.slow
def test_vllms_transfer_ends_at_the_keeper_too(kept: WithKeeper, keeper: Process) -> None:
    kept.start_with(keeper[0], "a")
    port = free_port()
    store = TCPStore("127.0.0.1", port, 2, True, timedelta(seconds=30), wait_for_workers=False)
    info = {"rank_offset": 1, "world_size": 2, "master_address": "127.0.0.1", "master_port": port}

    def post(path: str, body: Any = None) -> httpx.Response:
        return httpx.post(kept.url + path, json=body, timeout=60)

    with ThreadPoolExecutor() as pool:
        joining = pool.submit(post, "/init_weight_transfer_engine", {"init_info": info})
        group = ProcessGroupGloo(PrefixStore("tlt-gloo", store), 0, 2, timedelta(seconds=30))
        assert joining.result().status_code == 200, joining.result().text
        for path in ("/pause", "/start_weight_update"):
            assert post(path, {}).status_code == 200
        sent = tensors(5.0)
        described = {
            "names": NAMES, "dtype_names": ["float32"] * len(NAMES), "shapes": [[3]] * len(NAMES)
        }  # fmt: skip
        updating = pool.submit(post, "/update_weights", {"update_info": described})
        for _, tensor in sent:
            group.broadcast([tensor], BroadcastOptions()).wait()
        assert updating.result().status_code == 200, updating.result().text
    assert post("/finish_weight_update", {"weight_version": "v5"}).status_code == 200
    assert post("/resume").status_code == 200
    assert kept.active == {"a": dict.fromkeys(NAMES, 5.0)}
    assert kept.seen()["weight_version"] == "v5"
    assert post("/shutdown_weight_transfer_engine", {}).status_code == 200
    assert httpx.get(kept.url + "/get_world_size").json() == {"world_size": 1}


DIES = """
import os, sys, threading
import httpx, torch
from tlt_client import Client
with Client(sys.argv[1]) as client:
    group = client.init_weights_update_group(backend="gloo")
    client.pause_generation("in_place")
    client.update_weights_from_distributed(group, [("norm", torch.ones(3))], "one")
    threading.Timer(0.5, os._exit, (9,)).start()
    asked = {"group_name": group.name, "names": ["head"], "dtypes": ["float32"], "shapes": [[3]]}
    httpx.post(sys.argv[1] + "/update_weights_from_distributed", json=asked, timeout=60)
"""


@pytest.mark.slow
def test_a_trainer_that_dies_in_its_broadcast_publishes_nothing(kept: WithKeeper, keeper: Process) -> None:
    kept.start_with(keeper[0], "a")
    assert subprocess.run([sys.executable, "-c", DIES, kept.url], check=False, timeout=60).returncode == 9
    wait_for(lambda: kept.seen()["transaction"] is None)
    answer = httpx.post(kept.url + "/continue_generation", json={}, timeout=60)
    assert (answer.status_code, "no tensor came" in answer.text) == (409, True), answer.text
    assert (kept.active, kept.seen()["paused"]) == ({"a": {}}, True)
    with Client(kept.url) as client:  # another trainer begins anew
        group = client.init_weights_update_group(backend="gloo")
        client.update_weights_from_distributed(group, tensors(9.0), "nine")
        client.continue_generation()
        client.destroy_weights_update_group(group)
    assert (kept.active, kept.seen()["weight_version"]) == ({"a": dict.fromkeys(NAMES, 9.0)}, "nine")


@pytest.mark.slow
def test_what_cannot_be_is_refused_in_a_line(keeper: Process) -> None:
    of_one = {"update_info": {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}}
    nowhere = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 0, "world_size": 2}
    for path, body, said in (
        ("/update_weights_from_distributed", {"group_name": "x", "names": ["a"]}, "no group 'x'"),
        ("/destroy_weights_update_group", {"group_name": "x"}, "no group 'x'"),
        ("/update_weights", of_one, "no weight transfer"),
        ("/update_weights", {"weight_dir": "/x"}, "members are told by the front"),
        ("/init_weights_update_group", {"rank_offset": 1}, "missing required field `master_address`"),
        ("/init_weights_update_group", nowhere, "the trainer is rank 0"),
        ("/init_weight_transfer_engine", {"init_info": {"rank_offset": 1, "world_size": 2}}, "give master_address"),
        ("/collective_rpc", {"method": "sleep"}, "is not a keeper's"),
        ("/tlt/v1/keeper/whole", {}, "no tensor came"),
    ):
        answer = httpx.post(keeper[0] + path, json=body)
        assert (answer.status_code, said in answer.json()["message"]) == (400, True), (path, answer.text)
    assert answers(keeper[0])


@pytest.mark.slow
def test_a_keeper_that_dies_once_members_read_takes_nothing_back(kept: WithKeeper, tmp_path: Path) -> None:
    with keeping(tmp_path / "keeping") as (url, process), Client(kept.url) as client, ThreadPoolExecutor(1) as pool:
        kept.start_with(url, "a")
        group = client.init_weights_update_group(backend="gloo")
        client.pause_generation("in_place")
        client.update_weights_from_distributed(group, tensors(1.0), "one")
        kept.fault("a", "apply", "stop")
        going_on = pool.submit(client.continue_generation)
        member = psutil.Process(kept.processes["a"].pid)
        wait_for(lambda: member.status() == psutil.STATUS_STOPPED, kept.seen)
        process.kill()
        process.wait()
        member.resume()
        going_on.result()
    assert (kept.active, kept.seen()["weight_version"]) == ({"a": dict.fromkeys(NAMES, 1.0)}, "one")
    (told,) = [event for event in kept.seen()["events"] if event["kind"] == "keeper_failed"]
    assert "is gone" in told["detail"]
    assert not kept.seen()["paused"]


@pytest.mark.slow
def test_a_keeper_that_is_gone_is_told_of(kept: WithKeeper, keeper: Process) -> None:
    kept.start_with(keeper[0], "a")
    with Client(kept.url) as client:
        group = client.init_weights_update_group(backend="gloo")
        client.pause_generation("in_place")
        client.update_weights_from_distributed(group, tensors(1.0), "one")
        keeper[1].kill()
        keeper[1].wait()
        with pytest.raises(TltClientError, match=r"keeper .* is gone|not answered|Connect"):
            client.continue_generation()
        assert kept.seen()["paused"], "what was sent did not reach them: they do not go on as if it had"
