"""The trainer's process, and servers that follow it."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors import safe_open
from tlt_client import Client, VersionConflict

from tests.trainer.models import texts
from tests.trainer.stand_in import MODEL, WITHIN_S, Running, Server, until
from tlt_server.drafter.card import HEARD
from tlt_server.trainer.publish.export import export
from tlt_server.wire.messages import ModelIdentity


def test_no_server_of_other_tests_polls_beside_these() -> None:
    """One that idles takes a core all the same, and every wait below lasts several times as long."""
    children = psutil.Process().children(recursive=True)
    assert not [child for child in children if child.name().startswith("sglang")]


@pytest.mark.slow
def test_from_nothing_it_trains_publishes_and_follows_the_target(tmp_path: Path) -> None:
    trainer = Running(tmp_path / "trainer")
    with Server(tmp_path / "one", trainer.control, trainer.features) as server:
        with trainer.process() as process:
            until(lambda: server.name in trainer.status().get("servers", []), "the server is not known")
            until(lambda: trainer.status()["state"] == "waiting for features", "it is known, and still waited for")
            server.push(range(40))
            until(lambda: server.arrived, f"nothing was published: {trainer.log}")
            arrived = server.arrived[0]
            assert (arrived.version, arrived.trained_on) == (1, 0)
            with safe_open(arrived.path, framework="pt") as file:
                assert file.metadata()["trained"] == "yes"
            status = until(lambda: (now := trainer.status())["active"] and now, "the swap was not heard")
            assert status["candidate"] > 1.0
            _no_step_for_a_target_without_its_head(trainer, server)
            server.share()
            server.push(range(40, 80))
            until(lambda: server.arrived[-1].trained_on == 1, "nothing was published for the new target")
            until(lambda: trainer.status()["published"] >= 2, "the trainer takes no note of it")
            _metrics_are_those_of_the_status(trainer)
            trainer.end(process)
        with trainer.process() as process, Server(tmp_path / "two", trainer.control, trainer.features, "two:2") as late:
            until(lambda: late.newest == server.newest, "the late server was not offered the newest")
            assert trainer.status()["steps"] > 0
            trainer.end(process)
        assert export(trainer.folder, tmp_path / "out")["version"] == str(server.newest)
        assert f"| {HEARD} | 1 | " in (tmp_path / "out" / "README.md").read_text()
        assert not {"Traceback", "refuses"} & set(trainer.log.split()), trainer.log


@pytest.mark.slow
def test_a_first_step_that_takes_long_is_told_of(tmp_path: Path) -> None:
    """Else who waits until the trainer has learnt from all that came is told that it waits for more."""
    trainer = Running(tmp_path / "trainer", entries=2048)
    with Server(tmp_path / "one", trainer.control, trainer.features) as server, trainer.process() as process:
        until(lambda: trainer.status().get("state") == "waiting for features", "the target is not followed")
        server.push(range(40))
        status = until(lambda: (now := trainer.status())["state"] == "training" and now, "it does not train")
        assert status["steps"] == 0
        trainer.end(process)


@pytest.mark.slow
def test_a_new_target_is_trained_and_judged_for_at_once(tmp_path: Path) -> None:
    trainer = Running(tmp_path / "trainer", judged_every=10**6)
    with Server(tmp_path / "one", trainer.control, trainer.features) as server, trainer.process() as process:
        until(lambda: trainer.status().get("frozen") == 0, "the first target is not followed")
        server.push(range(40))
        until(lambda: trainer.status()["judged_by"], "nothing was judged for the first target")
        first = trainer.status()["candidate"]
        server.publish()
        server.share()
        until(lambda: trainer.status()["frozen"] == 1, "the second target is not followed")
        server.push(range(40, 80))
        until(lambda: trainer.status()["candidate"] != first, "nothing was judged for the second target")
        trainer.end(process)


@pytest.mark.slow
def test_nothing_is_published_while_the_last_drafter_is_on_its_way(tmp_path: Path) -> None:
    trainer = Running(tmp_path / "trainer", "passes = 1000.0", judged_every=2)
    with Server(tmp_path / "one", trainer.control, trainer.features) as server, trainer.process() as process:
        server.held = True
        until(lambda: trainer.status().get("frozen") == 0, "the first target is not followed")
        server.push(range(40))
        until(lambda: server.arrived, "nothing was published")
        steps = trainer.status()["steps"]
        until(lambda: trainer.status()["steps"] > steps + 20, "it does not train on")
        assert trainer.status()["published"] == server.newest == 1
        server.held = False
        server.swap()
        until(lambda: server.newest > 1, "what it learnt meanwhile is not published")
        trainer.end(process)


@pytest.mark.slow
def test_drafters_that_servers_do_not_keep_are_published_ever_more_seldom(tmp_path: Path) -> None:
    """They look better on what is held out, each than the one before, and are rolled back: it was never asked for how
    many times."""
    trainer = Running(tmp_path / "trainer", "passes = 1000.0", judged_every=1)
    with Server(tmp_path / "one", trainer.control, trainer.features) as server, trainer.process() as process:
        server.refuses = True
        until(lambda: trainer.status().get("frozen") == 0, "the first target is not followed")
        server.push(range(40))
        until(lambda: trainer.status()["steps"] > 18, "it does not train on")
        assert 2 <= len(server.arrived) <= 5  # after 1, 2, 4, ... steps more
        server.refuses = False
        until(lambda: trainer.status()["active"], "nothing is published any more")
        trainer.end(process)


@pytest.mark.slow
def test_on_demand_it_takes_the_steps_that_it_is_asked_for(tmp_path: Path) -> None:
    """No more, though it has features, nor fewer, however often it has learnt from them; and what they gave is active
    when the answer comes."""
    trainer = Running(tmp_path / "trainer", "on_demand = true\npasses = 0.1", judged_every=1)
    with trainer.process() as process, Client(f"http://127.0.0.1:{trainer.port}") as client:
        until(trainer.status, "it does not answer")
        assert client.train_drafter(2, within_s=0.2).waits_for == "waiting for a server"
        with Server(tmp_path / "one", trainer.control, trainer.features) as server:
            until(lambda: trainer.status()["state"] == "waiting to be asked", "the server is not known")
            assert client.train_drafter(2, within_s=0.2).steps == 0
            server.push(range(40))
            until(lambda: trainer.status()["tokens_received"] > 512, "no features came")
            time.sleep(0.3)
            assert trainer.status()["steps"] == 0
            made = client.train_drafter(7, within_s=WITHIN_S)
            assert (made.steps, made.waits_for) == (7, "")
            assert made.published == made.active == server.newest == 1
            assert (trainer.status()["steps"], made.seconds > 0) == (7, True)
            made = client.train_drafter(25, within_s=WITHIN_S, until="taken")
            assert (made.steps, made.published, made.waits_for) == (25, 1, "")
            assert client.train_drafter(0, within_s=WITHIN_S, until="taken").published == 1
            server.held = True
            with ThreadPoolExecutor(1) as pool:
                late = pool.submit(client.train_drafter, 0, within_s=WITHIN_S)
                until(lambda: trainer.status()["published"] == 2, "nothing better was published")
                time.sleep(0.3)
                assert not late.done(), "it is on its way"
                server.swap()
                made = late.result()
            assert (made.steps, made.published, made.active, made.waits_for) == (0, 2, 2, "")
        trainer.end(process)


@pytest.mark.slow
def test_steps_that_were_asked_for_do_not_wait_for_the_target_that_is_published_meanwhile(tmp_path: Path) -> None:
    """An RL trainer asks for them beside its publication: of the new target nothing was sampled yet, and its embedding
    and head are gigabytes."""
    trainer = Running(tmp_path / "trainer", "on_demand = true", judged_every=10**6)
    with trainer.process() as process, Client(f"http://127.0.0.1:{trainer.port}") as client:
        with Server(tmp_path / "one", trainer.control, trainer.features) as server, ThreadPoolExecutor(1) as pool:
            until(lambda: trainer.status().get("state") == "waiting to be asked", "the server is not known")
            server.push(range(40))
            until(lambda: trainer.status()["tokens_received"] > 512, "no features came")
            made = pool.submit(client.train_drafter, 40, within_s=WITHIN_S, until="taken")
            until(lambda: trainer.status()["steps"], "it does not begin")
            server.publish()
            assert (made.result().steps, made.result().waits_for) == (40, "")
            made = client.train_drafter(1, within_s=0.5, until="taken")
            assert (made.steps, made.waits_for) == (0, "waiting for the target's embedding and head")
            server.share()
            server.push(range(40, 80))
            assert client.train_drafter(1, within_s=WITHIN_S, until="taken").steps == 1
        trainer.end(process)


@pytest.mark.slow
def test_steps_are_asked_for_in_good_form_and_by_one_at_a_time(tmp_path: Path, idle: Running) -> None:
    with Client(f"http://127.0.0.1:{idle.port}") as client, pytest.raises(VersionConflict, match="on_demand = true"):
        client.train_drafter(1)
    trainer = Running(tmp_path / "trainer", "on_demand = true")
    with trainer.process() as process, ThreadPoolExecutor(1) as pool:
        until(trainer.status, "it does not answer")
        url = f"http://127.0.0.1:{trainer.port}/tlt/v1/train/steps"
        for body, kind, code in (
            (b'{"steps": -1}', "application/json", 400),
            (b'{"steps": 1, "within_s": -1}', "application/json", 400),
            (b" " * 1025, "application/json", 413),
            (b'{"steps": 1}', "text/plain", 415),
        ):
            assert httpx.post(url, content=body, headers={"Content-Type": kind}).status_code == code
        with Client(f"http://127.0.0.1:{trainer.port}") as client, Client(f"http://127.0.0.1:{trainer.port}") as other:
            first = pool.submit(client.train_drafter, 1, within_s=2.0)
            time.sleep(0.5)
            with pytest.raises(VersionConflict, match="asked for already"):
                other.train_drafter(1)
            assert first.result().steps == 0
            assert other.train_drafter(1, within_s=0.1).steps == 0
            with pytest.raises(httpx.ReadTimeout):  # an RL trainer that dies in its step, and is started again
                httpx.post(url, json={"steps": 1, "within_s": 3600}, timeout=0.3)
            until(lambda: httpx.post(url, json={"steps": 1, "within_s": 0.1}).status_code == 200, "it holds all up")
        trainer.end(process)


def _no_step_for_a_target_without_its_head(trainer: Running, server: Server) -> None:
    server.publish()
    until(lambda: trainer.status()["state"] == "waiting for the target's embedding and head", "it goes on")
    steps = trainer.status()["steps"]
    time.sleep(0.5)
    assert trainer.status()["steps"] == steps


def _metrics_are_those_of_the_status(trainer: Running) -> None:
    families = text_string_to_metric_families(trainer.get("/metrics").text)
    values = {sample.name: sample.value for family in families for sample in family.samples}
    assert values["tlt_train_tokens_received_total"] == trainer.status()["tokens_received"]
    assert values["tlt_train_drafter_published"] >= 2


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Running:
    trainer = Running(tmp_path_factory.mktemp("idle") / "trainer")
    with trainer.process():
        until(trainer.status, "it does not answer")
        yield trainer


@pytest.mark.slow
def test_what_is_not_features_of_this_target_is_refused(tmp_path: Path, idle: Running) -> None:
    with Server(tmp_path / "one", idle.control, idle.features) as server:
        until(lambda: server.name in idle.status()["servers"], "the server is not known")
        server.push_frames([b"rubbish"])
        server.push_frames([b"", b""])
        server.push([0], change=lambda tokens, states: tokens.fill_(MODEL.vocab_size))
        server.push([0], change=lambda tokens, states: states[3].fill_(float("nan")))
        server.push([0], model=ModelIdentity("Other", 256, 290))
        server.push([3], server="stranger")
        until(lambda: idle.status()["tokens_dropped"].get("unknown target"), "nothing was dropped")
    one, status = len(texts("eagle", 40)[0].tokens), idle.status()
    assert status["tokens_received"] == 0
    assert status["tokens_dropped"]["malformed"] == 2 + 2 * one
    assert status["tokens_dropped"]["another model"] == one
    assert MODEL.architecture in idle.log
