"""What the manifests of deploy/kubernetes say of each other, and where they contradict themselves."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from command_lines import Fleet, Serve, parsed
from deployment import DEPLOY, compose, entrypoint
from typer.exceptions import TyperException

from tlt_server.errors import ConfigError
from tlt_server.trainer.config import TrainConfig

Document = Mapping[str, Any]
FOLDER = DEPLOY / "kubernetes"
WORKLOADS = ("StatefulSet", "Deployment", "LeaderWorkerSet")
SECRET = re.compile(r"kubectl create secret generic ([\w-]+)((?: --from-(?:file|literal)=\S+)+)")


@cache
def images() -> set[str]:
    """What deploy/ builds."""
    return {service["image"] for service in compose()["services"].values() if "build" in service}


class Pod(NamedTuple):
    """of: the workload's name. labels, spec: of its pods. claims: names of volumes that come with each pod."""

    of: str
    labels: Mapping[str, str]
    spec: Mapping[str, Any]
    claims: frozenset[str]

    @property
    def container(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.spec["containers"][0]
        return found

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}


def pods(documents: Iterable[Document]) -> Iterator[Pod]:
    for document in documents:
        if document["kind"] in WORKLOADS:
            spec = document["spec"]
            template = spec["leaderWorkerTemplate"]["workerTemplate"] if "leaderWorkerTemplate" in spec else None
            template = template or spec["template"]
            claims = frozenset(claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ()))
            yield Pod(document["metadata"]["name"], template["metadata"]["labels"], template["spec"], claims)


def named(documents: Iterable[Document], kind: str) -> dict[str, Any]:
    return {document["metadata"]["name"]: document for document in documents if document["kind"] == kind}


@cache
def secrets() -> dict[str, set[str]]:
    """Keys of each Secret that the README makes."""
    text = (DEPLOY / "README.md").read_text().replace("\\\n", " ")
    made = SECRET.findall(re.sub(r" +", " ", text))
    return {
        name: {Path(each.partition("=")[2].partition("=")[0]).name for each in options.split()}
        for name, options in made
    }


def program(pod: Pod, files: Mapping[str, Path]) -> Serve | TrainConfig | Fleet:
    """What its container runs, as the parser of its program takes it."""
    variables = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "leader"}
    kind = pod.container["image"].rpartition("-")[2]
    words = [*(pod.container.get("command") or entrypoint(DEPLOY / f"{kind}.Dockerfile")), *pod.container["args"]]
    return parsed([re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word) for word in words], files)


def settings(pod: Pod, documents: Sequence[Document], folder: Path) -> dict[str, Path]:
    """Files of ConfigMaps that it mounts, written to `folder`, by their path in the container."""
    maps, found = named(documents, "ConfigMap"), {}
    volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
    for mount in pod.container["volumeMounts"]:
        if "configMap" in volumes.get(mount["name"], {}):
            of = volumes[mount["name"]]["configMap"]["name"]
            found[mount["mountPath"]] = folder / f"{of}.toml"
            found[mount["mountPath"]].write_text(maps[of]["data"][mount["subPath"]])
    return found


def faults(documents: Sequence[Document], folder: Path) -> list[str]:
    """Each contradiction, in a line. folder: for files."""
    found = [fault for pod in pods(documents) for fault in _pod_faults(pod, documents)]
    found += [
        fault for service in named(documents, "Service").values() for fault in _service_faults(service, documents)
    ]
    try:
        programs = {pod.of: program(pod, settings(pod, documents, folder)) for pod in pods(documents)}
    except (KeyError, ValueError, ConfigError, TyperException) as error:
        return [*found, f"command line: {error!r}"]
    for pod in pods(documents):
        found += _port_faults(pod, programs[pod.of])
    return [*found, *_link_faults(documents, programs), *_member_faults(documents, programs)]


def _pod_faults(pod: Pod, documents: Sequence[Document]) -> Iterator[str]:
    volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
    containers = [*pod.spec.get("initContainers", ()), *pod.spec["containers"]]
    mounted = {mount["name"] for each in containers for mount in each["volumeMounts"]}
    if mounted != volumes.keys() | pod.claims:
        yield f"{pod.of}: volumes {sorted(volumes.keys() | pod.claims)}, mounted {sorted(mounted)}"
    kinds = {"configMap": "name", "persistentVolumeClaim": "claimName"}
    for kind, name in kinds.items():
        there = named(documents, kind[0].upper() + kind[1:])
        yield from (
            f"{pod.of}: no {kind} {volume[kind][name]}"
            for volume in volumes.values()
            if kind in volume and volume[kind][name] not in there
        )
    for each in containers:
        if each["image"] not in images():
            yield f"{pod.of}: image {each['image']} is none that deploy/ builds"
        for probe in (each.get(f"{kind}Probe") for kind in ("startup", "readiness", "liveness")):
            port = probe and (probe.get("httpGet") or probe["tcpSocket"])["port"]
            if port and port not in pod.ports:
                yield f"{pod.of}: a probe asks port {port}, which it has not"
        for variable in each.get("env", ()):
            asked = variable["valueFrom"]["secretKeyRef"]
            if asked["key"] not in secrets().get(asked["name"], ()):
                yield f"{pod.of}: the README makes no secret {asked['name']} with {asked['key']}"
    copied = {word for each in pod.spec.get("initContainers", ()) for word in each["command"] if "/secret/" in word}
    for volume in (volume for volume in volumes.values() if "secret" in volume):
        if {Path(word).name for word in copied} != secrets().get(volume["secret"]["secretName"]):
            yield f"{pod.of}: {sorted(copied)} is not what the README puts into {volume['secret']['secretName']}"


def _service_faults(service: Document, documents: Sequence[Document]) -> Iterator[str]:
    name, spec = service["metadata"]["name"], service["spec"]
    behind = [pod for pod in pods(documents) if spec["selector"].items() <= pod.labels.items()]
    if len(behind) != 1:
        yield f"service {name}: {len(behind)} workloads behind it"
    for pod in behind:
        for port in spec["ports"]:
            if pod.ports.get(port["targetPort"]) != port["port"]:
                yield f"service {name}: port {port['port']} is not {pod.of}'s {port['targetPort']}"


def _port_faults(pod: Pod, found: Serve | TrainConfig | Fleet) -> Iterator[str]:
    """What it listens on is what it declares, and others reach it."""
    if isinstance(found, TrainConfig):
        said = {
            "control": found.listen.rpartition(":")[2],
            "features": found.features_address.rpartition(":")[2],
            "status": found.port,
        }
        hosts = {found.host, found.listen.split(":")[1].strip("/"), found.features_address.split(":")[1].strip("/")}
    else:
        said = {"http": found.own["port"] if isinstance(found, Fleet) else found.sglang.port}
        hosts = {found.own["host"] if isinstance(found, Fleet) else found.sglang.host}
        if isinstance(found, Serve) and found.sglang.nnodes > 1:
            said["rendezvous"] = found.sglang.dist_init_addr.rpartition(":")[2]
    if {name: int(port) for name, port in said.items()} != pod.ports:
        yield f"{pod.of}: listens at {said}, declares {pod.ports}"
    if hosts != {"0.0.0.0"}:
        yield f"{pod.of}: listens at {sorted(hosts)}, where no other pod reaches it"


def _link_faults(documents: Sequence[Document], programs: Mapping[str, Any]) -> Iterator[str]:
    """Trainer and servers: where they meet, by which keys, over which target."""
    services = named(documents, "Service")
    keys = {pod.of: _keys(pod) for pod in pods(documents)}
    for name, server in ((name, each) for name, each in programs.items() if isinstance(each, Serve)):
        if (follows := server.config.trainer) is None:
            continue
        for trainer, of in ((each, of) for of, each in programs.items() if isinstance(each, TrainConfig)):
            ports = {port["name"]: port["port"] for port in services[of]["spec"]["ports"]}
            for port, address in (("control", follows.address), ("features", follows.features_address)):
                if address != f"tcp://{of}:{ports.get(port)}":
                    yield f"{name}: {port} at {address}, the trainer's is at {of}:{ports.get(port)}"
            if {follows.key, follows.trainer_key} != keys[name]:
                yield f"{name}: keys {follows.key} and {follows.trainer_key}, it has {sorted(keys[name])}"
            peers = {f"{trainer.server_keys}/servers.key"}
            if {trainer.key, *peers} != keys[of]:
                yield f"{of}: keys {trainer.key} and {sorted(peers)}, it has {sorted(keys[of])}"
            if (trainer.target, trainer.drafter_kind) != (server.sglang.model_path, server.config.drafter_kind):
                yield f"{of}: a drafter of another kind, or for another target, than {name} has"


def _keys(pod: Pod) -> set[str]:
    """Files that its init container leaves."""
    found: set[str] = set()
    for each in pod.spec.get("initContainers", ()):
        *_, place = each["command"]
        found |= {f"{place}/{Path(word).name}" for word in each["command"] if word.startswith("/secret/")}
    return found


def _member_faults(documents: Sequence[Document], programs: Mapping[str, Any]) -> Iterator[str]:
    """The front's members are the pods of the StatefulSet, and to be found before they are ready."""
    (servers,) = named(documents, "StatefulSet").values()
    headless = named(documents, "Service").get(servers["spec"]["serviceName"], {"spec": {}})["spec"]
    if headless.get("clusterIP") != "None" or not headless.get("publishNotReadyAddresses"):
        yield "servers: no headless service that finds those which are not ready"
    of = servers["metadata"]["name"]
    port = programs[of].sglang.port
    wanted = [f"http://{of}-{at}.{servers['spec']['serviceName']}:{port}" for at in range(servers["spec"]["replicas"])]
    for front in (each for each in programs.values() if isinstance(each, Fleet) and each.own["member"]):
        if front.own["member"] != wanted:
            yield f"front: members {front.own['member']}, pods {wanted}"
        if front.own["min_ready"] > len(wanted):
            yield f"front: {front.own['min_ready']} members must be ready, of {len(wanted)}"
