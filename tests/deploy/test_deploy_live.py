"""A real Prometheus with our configuration scrapes our metrics: every rule holds and every panel shows something."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from deployment import DEPLOY, RULES, panel_queries, read_yaml, rules, tool

from tlt_server.process import free_port

pytestmark = pytest.mark.slow  # Prometheus takes seconds to have scraped
SOURCE = Path(__file__).with_name("metrics_source.py")
Query = Callable[[str], list[dict[str, Any]]]


@contextmanager
def running(*command: object, **options: Any) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([*map(str, command)], text=True, stdout=subprocess.PIPE, **options) as process:
        try:
            yield process
        finally:
            process.terminate()


def configuration(folder: Path, target: str) -> Path:
    """Ours, with another target, which it sees as two replicas, and a clock that makes a test short."""
    config = read_yaml(DEPLOY / "prometheus.yml")
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(path) for path in RULES]
    replicas = [{"targets": [target], "labels": {"replica": name}} for name in ("a", "b")]
    config["scrape_configs"][0]["static_configs"] = replicas
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


def until_answered(prometheus: httpx.Client, process: subprocess.Popen[str], query: str, series: int = 1) -> None:
    for _ in range(300):
        assert process.poll() is None, f"prometheus ended with {process.returncode}"
        time.sleep(0.1)
        try:
            answer = prometheus.get("/api/v1/query", params={"query": query})
        except httpx.TransportError:  # it does not listen yet, or is slow
            continue
        if answer.status_code == 503:  # it listens, and is not ready yet
            continue
        if len(answer.raise_for_status().json()["data"]["result"]) >= series:
            return
    pytest.fail(f"no answer to {query} for 30 seconds")


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder, address = tmp_path_factory.mktemp("prometheus"), f"127.0.0.1:{free_port()}"
    (folder / "processes").mkdir()
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(folder / "processes")}
    with running(sys.executable, SOURCE, env=environment) as source:
        assert source.stdout
        port = int(source.stdout.readline() or pytest.fail("the source of metrics ended: its error stands above"))
        config = configuration(folder, f"127.0.0.1:{port}")
        flags = (f"--config.file={config}", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}")
        with (
            running(tool("prometheus"), *flags, "--log.level=error") as process,
            httpx.Client(base_url=f"http://{address}") as client,
        ):
            # Prometheus takes up new targets after five seconds, whatever it is told.
            until_answered(client, process, "instance_position:tlt_spec_acceptance:ratio1m")
            # a rate takes two scrapes, and the replicas' are not at one time
            until_answered(client, process, dict(panel_queries())["Accept length A"], series=2)
            yield client


@pytest.fixture
def ask(prometheus: httpx.Client) -> Query:
    """Samples that Prometheus answers a query with."""

    def query(expr: str) -> list[dict[str, Any]]:
        answer = prometheus.get("/api/v1/query", params={"query": expr}).json()
        assert answer["status"] == "success", answer
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    return query


@pytest.mark.slow
def test_every_rule_is_evaluated(prometheus: httpx.Client) -> None:
    groups = prometheus.get("/api/v1/rules").json()["data"]["groups"]
    found = {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
    assert found == {rule.get("record") or rule["alert"]: "ok" for rule in rules()}


@pytest.mark.slow
def test_every_panel_shows_something(ask: Query) -> None:
    empty = [panel for panel, expr in panel_queries() if not [each for each in ask(expr) if each["value"][1] != "NaN"]]
    assert not empty


@pytest.mark.parametrize(
    ("panel", "expected"),
    [
        ("Accept length now A", [2.8]),
        ("Acceptance rate A", [0.6]),
        ("Accept length A", [2.8, 2.8]),
        ("Acceptance by position A", [0.8, 0.6, 0.4]),
        ("Server answers A", [1]),
        ("Alerts A", [0]),
        ("KV cache in use A", [0.5, 0.5]),
    ],
)
def test_a_panel_shows_the_truth(ask: Query, panel: str, expected: list[float]) -> None:
    shown = sorted((float(each["value"][1]) for each in ask(dict(panel_queries())[panel])), reverse=True)
    assert shown == pytest.approx(expected)


def test_a_replica_is_shown_alone(ask: Query) -> None:
    panels = dict(panel_queries("b"))
    (shown,) = ask(panels["Accept length A"])
    assert shown["metric"]["replica"] == "b"
    everywhere, alone = (ask(queries["Running requests A"]) for queries in (dict(panel_queries()), panels))
    assert float(everywhere[0]["value"][1]) == 2 * float(alone[0]["value"][1]) == 1
