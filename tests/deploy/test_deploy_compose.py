"""compose.yaml and the YAML beside it: valid, and of one mind with each other."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from deployment import DEPLOY, ROOT, compose, dashboard, passes, read_yaml

SERVICES: dict[str, dict[str, Any]] = compose()["services"]
SERVERS = {name: service for name, service in SERVICES.items() if "build" in service}


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Path in the container -> what is mounted there."""
    return {volume.split(":")[1]: volume.split(":")[0] for volume in service["volumes"]}


def on_this_machine(service: dict[str, Any], path: str) -> Path:
    """The file or folder of deploy/ that `path` in a container shows."""
    (root,) = (root for root in mounts(service) if Path(path).is_relative_to(root))
    return DEPLOY / mounts(service)[root] / Path(path).relative_to(root)


def test_it_is_a_compose_file() -> None:
    passes("check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml")


def test_yamllint_finds_nothing() -> None:
    passes("yamllint", "--strict", "--config-file", DEPLOY / ".yamllint", DEPLOY)


def test_one_server_a_profile() -> None:
    assert {name: service["profiles"] for name, service in SERVERS.items()} == {
        "server-cpu": ["cpu"],
        "server-gpu": ["gpu"],
    }
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name, service in SERVERS.items():
        kind = name.removeprefix("server-")
        assert service["image"] == f"tlt-server:{version}-{kind}"
        assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
        assert service["build"]["dockerfile"] == f"deploy/{kind}.Dockerfile"


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_pinned_local_and_finds_its_files(name: str) -> None:
    service = SERVICES[name]
    assert re.fullmatch(r"[\w./-]+:v?\d[\w.-]*", service["image"])
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    for source in mounts(service).values():
        assert (DEPLOY / source).exists() if source.startswith(".") else source in compose()["volumes"], source


def test_what_is_waited_for_can_be_waited_for() -> None:
    awaited = [(name, *pair) for name, service in SERVICES.items() for pair in service.get("depends_on", {}).items()]
    assert awaited
    for name, other, how in awaited:
        assert "profiles" not in SERVICES[other], f"{name} cannot start without the profile of {other}"
        assert how["condition"] == "service_healthy"
        assert "healthcheck" in SERVICES[other]


def test_every_variable_is_explained() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    explained = " ".join(re.findall(r"^# .*", text.partition("\nname:")[0], re.MULTILINE))
    used = set(re.findall(r"\$\{(\w+)", text)) | {
        name for service in SERVICES.values() for name, value in service.get("environment", {}).items() if value is None
    }
    assert used
    assert used <= set(re.findall(r"[A-Z_]{3,}", explained))


def test_prometheus_scrapes_the_server() -> None:
    (job,) = read_yaml(DEPLOY / "prometheus.yml")["scrape_configs"]
    ((target,),) = (each["targets"] for each in job["static_configs"])
    host, port = target.split(":")
    for service in SERVERS.values():
        assert service["networks"]["default"]["aliases"] == [host]
        assert [each.split(":")[-1] for each in service["ports"]] == [port]
    assert on_this_machine(SERVICES["prometheus"], "/etc/prometheus/prometheus.yml") == DEPLOY / "prometheus.yml"
    assert on_this_machine(SERVICES["prometheus"], "/etc/prometheus/rules/serving.yml").is_file()


def test_grafana_finds_prometheus_and_its_dashboards() -> None:
    grafana = SERVICES["grafana"]
    provisioning = on_this_machine(grafana, "/etc/grafana/provisioning")
    (source,) = read_yaml(provisioning / "datasources/prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:" + SERVICES["prometheus"]["ports"][0].split(":")[-1]
    assert source["jsonData"]["timeInterval"] == read_yaml(DEPLOY / "prometheus.yml")["global"]["scrape_interval"]
    (provider,) = read_yaml(provisioning / "dashboards/files.yml")["providers"]
    assert on_this_machine(grafana, provider["options"]["path"]) == DEPLOY / "grafana/dashboards"
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert dashboard(on_this_machine(grafana, home))["title"]
