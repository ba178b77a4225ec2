"""A server that follows a drafter trainer: what is published takes over by itself, and nothing is left at the end."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import load_file, save
from tlt_client import Client, SamplingParams, Unauthorized

from tests.link.processes import MARK, links, until
from tests.server.conftest import PROMPTS, Servers
from tests.server.drafter_trainer import DrafterTrainer, slow_trainer, target
from tests.server.trainer import DRAFTERS, Trainer, buckets, noisy, tensors_of, while_running
from tests.wire.children import receive
from tests.wire.ends import HELLO
from tlt_server.demo import default_paths
from tlt_server.process import Running, free_port, running_module
from tlt_server.wire.files import CHUNK_BYTES

pytestmark = pytest.mark.server

START = tensors_of(DRAFTERS["eagle-chain"])
KEYS = ["--api-key", "user", "--admin-api-key", "admin"]
LONG = SamplingParams(temperature=0, max_new_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("link")


@pytest.fixture(scope="module")
def address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def server(servers: Servers, place: Path, address: str) -> Iterator[Running]:
    """It finds a trainer that has published before it came. Its tests end it, so that it is nobody else's."""
    servers.close()
    start = running_module(
        ["tlt_server", "serve"],
        ["--trainer", address, *KEYS],
        place / "log",
        start_timeout=180,
        environment={MARK: str(place)},
    )
    with contextlib.ExitStack() as stack:
        with DrafterTrainer(address) as trainer:
            trainer.publish(3, START, trained_on=0)
            running = stack.enter_context(start)
            trainer.hears(drafter_version=3, settled_drafter=3)
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[Client]:
    with Client(server.url, api_key="user", admin_key="admin") as client:
        yield client


@contextlib.contextmanager
def another_trainer(client: Client, address: str, **tree: int) -> Iterator[DrafterTrainer]:
    """It hears the whole state of the server first."""
    with DrafterTrainer(address, **tree) as trainer:
        until(trainer.said)
        until(lambda: client.status().trainer.connected)  # type: ignore[union-attr]
        yield trainer


def test_the_latest_drafter_reaches_a_server_that_comes_late(client: Client) -> None:
    live, trainer = client.drafter().live, client.status().trainer
    assert (live.version, live.trained_on, Path(live.path).name) == (3, 0, "drafter-3.safetensors")
    assert trainer is not None
    assert trainer.received == 3
    until(lambda: "trainer_lost" in [event.kind for event in client.events()])
    seen = [event.kind for event in client.events()]
    assert sorted(seen) == ["drafter_swapped", "trainer_connected", "trainer_lost"]


def test_a_drafter_takes_over_while_rollouts_run(client: Client, address: str, tmp_path: Path) -> None:
    undisturbed = client.generate_batch(PROMPTS[:8], LONG)
    good = tensors_of(noisy(DRAFTERS["eagle-chain"], tmp_path / "good", 1, scale=0.005))
    with another_trainer(client, address) as trainer:
        version = client.drafter().newest + 1

        def publish() -> None:
            until(lambda: client.load().running == 8)
            trainer.publish(version, good, trained_on=0)

        given = while_running(lambda: client.generate_batch(PROMPTS[:8], LONG), publish)
        trainer.hears(drafter_version=version, settled_drafter=version)
        assert trainer.said(newest_drafter=version, reason="")
        until(lambda: any(hello.load is not None for hello in trainer.said()))
    assert (client.drafter().live.version, client.drafter().live.trained_on) == (version, 0)
    assert [each.tokens for each in given] == [each.tokens for each in undisturbed]
    assert any(len(each.drafter_versions) == 2 for each in given)
    assert all(len(each.weight_versions) == 1 for each in given)


def test_of_two_servers_one_fetches_from_the_other(client: Client, address: str, tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    hello = msgspec.structs.replace(HELLO, model=target())
    other = spawn.Process(target=receive, args=(address, theirs, hello, tmp_path / "drafters"))
    other.start()
    try:
        with another_trainer(client, address, fan_out=1, pays=0) as trainer:
            until(lambda: len({hello.server for hello in trainer.said() if hello.door}) == 2)
            version, file = client.drafter().newest + 1, save(START)
            trainer.publish(version, START)
            trainer.hears(drafter_version=version, settled_drafter=version)
            trainer.hears(newest_drafter=version, server=hello.server)
            assert trainer.sent.value == -(-len(file) // CHUNK_BYTES)
        assert Path(client.drafter().live.path).read_bytes() == file
    finally:
        ours.close()
        other.join()


def test_a_publication_of_the_target_is_told_once_and_shared(
    server: Running, client: Client, address: str, tmp_path: Path
) -> None:
    """It ends by silence, which is noticed though nobody asks the server anything."""
    target = Trainer(server.url)
    target.http.headers["Authorization"] = "Bearer admin"
    with another_trainer(client, address) as trainer:
        before = trainer.said()[-1].target_version
        sent = tensors_of(noisy(default_paths()[0], tmp_path / "target", 1, scale=0.001))
        for part in buckets(sent, 3):
            target.tensor(part, weight_version="step 7", flush_cache=False).raise_for_status()
        assert trainer.hears(target_version=before + 1).weight_version == "step 7"
        until(lambda: trainer.said()[-1].shared and trainer.said()[-1].target_version == before + 1)
        said = [(hello.target_version, hello.shared) for hello in trainer.said(target_version=before + 1)]
        shared = trainer.said()[-1].shared
        assert [told for _, told in dict.fromkeys(said)] == ["", shared]
        held = {name: each for file in Path(shared).iterdir() for name, each in load_file(file).items()}
        assert held.keys() == {"model.embed_tokens.weight", "lm_head.weight"}
        for name, tensor in held.items():
            assert torch.equal(tensor, sent[name].to(tensor.dtype)), name
    target.close()


def test_a_wrong_drafter_is_refused_and_the_trainer_told(client: Client, address: str) -> None:
    name = "layers.0.self_attn.q_proj.weight"
    nan, before = START[name].clone(), client.drafter()
    nan[-1, -1] = float("nan")
    wrong = {"NaN": nan, "its shape is [256, 128]": START[name][:, :128].contiguous()}
    with another_trainer(client, address) as trainer:
        for version, (why, tensor) in enumerate(wrong.items(), before.newest + 1):
            trainer.publish(version, START | {name: tensor})
            told = trainer.hears(settled_drafter=version)
            assert told.drafter_version == before.live.version
            assert told.reason.startswith(f"drafter {version}: ")
            assert why in told.reason
            assert client.drafter().live == before.live
            assert client.events()[-1].kind == "drafter_refused"


def test_an_old_drafter_is_turned_away_by_the_link(client: Client, address: str) -> None:
    before = client.events()[-1].number
    with another_trainer(client, address) as trainer:
        trainer.publish(1, START)
        until(lambda: "drafter 1: version 1 is older than" in trainer.said()[-1].reason)
    until(lambda: "drafter_refused" in [event.kind for event in client.events(before)])
    told = next(event for event in client.events(before) if event.kind == "drafter_refused")
    assert told.detail["version"] == 1
    assert "raise the version" in str(told.detail["why"])
    trainer_now = client.status().trainer
    assert trainer_now is not None
    assert trainer_now.refused == 1


def test_a_rollback_is_told(client: Client, address: str) -> None:
    live, previous = client.drafter().live.version, client.drafter().previous
    assert previous is not None
    with another_trainer(client, address) as trainer:
        client.roll_back_drafter()
        reason = f"drafter {live}: rolled back: it was asked for"
        trainer.hears(drafter_version=previous.version, reason=reason)


def test_a_trainer_that_is_killed_in_mid_push(client: Client, address: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    sent, version = spawn.Value("i", 0), client.drafter().newest + 10
    first = spawn.Process(target=slow_trainer, args=(address, version, DRAFTERS["eagle-chain"], sent))
    first.start()
    until(lambda: sent.value > 20)
    first.kill()
    first.join()
    first.close()
    with DrafterTrainer(address) as trainer:
        trainer.publish(version + 1, START)
        trainer.hears(drafter_version=version + 1, settled_drafter=version + 1)
    assert client.drafter().live.version == version + 1


def test_a_link_that_is_killed_is_started_anew(client: Client, address: str, place: Path) -> None:
    (link,) = links(str(place))
    link.kill()
    with DrafterTrainer(address) as trainer:
        version = client.drafter().newest + 1
        trainer.publish(version, START)
        trainer.hears(drafter_version=version, settled_drafter=version)
    assert links(str(place)) not in ([], [link])


def test_a_server_with_keys_is_closed_to_others(server: Running) -> None:
    with Client(server.url) as stranger, pytest.raises(Unauthorized):
        stranger.events()


def test_nothing_is_left_of_a_server_that_is_ended(server: Running, client: Client, place: Path) -> None:
    """By SIGTERM, after which SGLang kills itself and all of its descendants."""
    folder = Path(client.drafter().live.path).parent
    assert [file.name for file in folder.iterdir()] != []
    os.kill(server.pid, signal.SIGTERM)
    until(lambda: psutil.Process(server.pid).status() == psutil.STATUS_ZOMBIE, 60)
    until(lambda: not links(str(place)), 5)
    assert not folder.exists()
    assert "Traceback" not in (place / "log").read_text()
