"""compose.yaml and the YAML beside it: valid, and of one mind with each other."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from command_lines import Serve, interpolated, parsed
from deployment import DEPLOY, ROOT, compose, dashboard, entrypoint, passes, read_yaml

from tlt_server.preflight import is_loopback
from tlt_server.trainer.config import TrainConfig

SERVICES: dict[str, dict[str, Any]] = compose()["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
SERVERS = {name: service for name, service in OURS.items() if name.startswith("server-")}
TRAINERS = {name: service for name, service in OURS.items() if name.startswith("trainer-")}
FLAGS = {
    "TLT_SERVE_FLAGS": "--model-path Qwen/Qwen2.5-7B-Instruct --drafter thoughtworks/Qwen2.5-7B-Instruct-Eagle3",
    "TLT_TRAIN_FLAGS": "--target Qwen/Qwen2.5-7B-Instruct --drafter-kind eagle3",
}


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


def command(service: dict[str, Any], variables: dict[str, str]) -> Serve | TrainConfig:
    """What a service of our images runs, as its parser takes it."""
    kind = service["image"].rpartition("-")[2]
    words = service.get("entrypoint") or entrypoint(DEPLOY / f"{kind}.Dockerfile")
    words = [*words, *shlex.split(interpolated(service["command"], variables))]
    files = {path: on_this_machine(service, path) for path in mounts(service) if path.startswith("/etc/")}
    found = parsed(words, files)
    assert isinstance(found, Serve | TrainConfig)
    return found


def test_a_profile_is_a_server_or_a_server_and_a_trainer() -> None:
    profiles: dict[str, list[str]] = {}
    for name, service in OURS.items():
        for profile in service["profiles"]:
            profiles.setdefault(profile, []).append(name)
    assert profiles == {
        "cpu": ["server-cpu"],
        "gpu": ["server-gpu"],
        "cpu-train": ["server-cpu-train", "trainer-cpu"],
        "gpu-train": ["server-gpu-train", "trainer-gpu"],
    }
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name, service in OURS.items():
        kind = name.split("-")[1]
        assert service["image"] == f"tlt-server:{version}-{kind}"
        assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
        assert service["build"]["dockerfile"] == f"deploy/{kind}.Dockerfile"


def test_what_no_profile_asks_for_is_no_server() -> None:
    assert {name for name, service in SERVICES.items() if "profiles" not in service} == {"prometheus", "grafana"}


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("variables", [{}, FLAGS], ids=["as it is", "with flags"])
def test_its_flags_are_the_programs(name: str, variables: dict[str, str]) -> None:
    found = command(OURS[name], variables)
    if isinstance(found, Serve):
        assert found.insecure
        assert (found.config.trainer is not None) == name.endswith("-train")
        if variables:
            assert found.config.drafter == "thoughtworks/Qwen2.5-7B-Instruct-Eagle3"
            assert found.sglang.model_path == "Qwen/Qwen2.5-7B-Instruct"
    else:
        assert found.target == ("Qwen/Qwen2.5-7B-Instruct" if variables else "embedded")


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_trainer_and_its_server_meet(kind: str) -> None:
    server, trainer = OURS[f"server-{kind}-train"], OURS[f"trainer-{kind}"]
    follows, listens = command(server, {}), command(trainer, {})
    assert isinstance(follows, Serve)
    assert isinstance(listens, TrainConfig)
    assert follows.config.trainer
    assert follows.config.trainer.address == listens.listen
    assert follows.config.trainer.features_address == listens.features_address
    place = Path(listens.listen.removeprefix("ipc://")).parent
    assert mounts(server)[str(place)] == mounts(trainer)[str(place)] == "link"
    assert mounts(trainer)[listens.folder] == "drafters"
    assert mounts(server).keys() >= mounts(OURS[f"server-{kind}"]).keys()
    made = re.search(r"install --directory --owner tlt --group tlt (.*)", (DEPLOY / f"{kind}.Dockerfile").read_text())
    assert made
    for path, source in (mounts(server) | mounts(trainer)).items():
        assert source.startswith(".") or path in made[1].split(), f"{path}: root's, so the user could not write there"


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_says_how_it_is(name: str) -> None:
    service, found = TRAINERS[name], command(TRAINERS[name], {})
    assert isinstance(found, TrainConfig)
    kind, *program = service["healthcheck"]["test"]
    assert (kind, *program[:2]) == ("CMD", "python", "-c")
    compile(program[2], "healthcheck", "exec")
    assert f"'http://127.0.0.1:{found.port}/tlt/v1/train/status'" in program[2]
    assert [each.split(":")[-1] for each in service["ports"]] == [str(found.port)]
    assert not is_loopback(found.host), "Prometheus asks from another container"
    assert service["restart"] == "on-failure"


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


def test_prometheus_scrapes_server_and_trainer() -> None:
    job, trainers = read_yaml(DEPLOY / "prometheus.yml")["scrape_configs"]
    ((target,),) = (each["targets"] for each in job["static_configs"])
    host, port = target.split(":")
    for service in SERVERS.values():
        assert service["networks"]["default"]["aliases"] == [host]
        assert [each.split(":")[-1] for each in service["ports"]] == [port]
    (found,) = trainers["dns_sd_configs"]
    for service in TRAINERS.values():
        assert service["networks"]["default"]["aliases"] == found["names"]
        assert [each.split(":")[-1] for each in service["ports"]] == [str(found["port"])]
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
