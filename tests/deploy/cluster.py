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
POD_IP = "10.0.0.1"
RAY_AGENT = 52365
"""The port of Ray's own health, which KubeRay opens."""
RAY = re.compile(r"(?m)^ray==(\S+)")
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
    claims: frozenset[str] = frozenset()

    @property
    def container(self) -> Mapping[str, Any]:
        """The one that runs our program; else the first, which runs Ray."""
        containers: Sequence[Mapping[str, Any]] = self.spec["containers"]
        return next((each for each in containers if "args" in each), containers[0])

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", ())}


def pods(documents: Iterable[Document]) -> Iterator[Pod]:
    for document in documents:
        name, spec = document["metadata"]["name"], document.get("spec", {})
        match document["kind"]:
            case "StatefulSet" | "Deployment":
                claims = frozenset(claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ()))
                yield Pod(name, spec["template"]["metadata"]["labels"], spec["template"]["spec"], claims)
            case "LeaderWorkerSet":
                template = spec["leaderWorkerTemplate"]["workerTemplate"]
                yield Pod(name, template["metadata"]["labels"], template["spec"])
            case "RayService":
                head, (worker,) = (
                    spec["rayClusterConfig"]["headGroupSpec"],
                    spec["rayClusterConfig"]["workerGroupSpecs"],
                )
                for of, template in ((name, head["template"]), (workers_of(name), worker["template"])):
                    yield Pod(of, template["metadata"]["labels"], template["spec"])


def workers_of(name: str) -> str:
    """What the pods are known as here in which Ray places the servers of a front."""
    return f"{name}-workers"


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


def applied() -> dict[str, list[str]]:
    """Files that the README has one apply together, by that command."""
    found = re.findall(r"^kubectl apply (.*)$", (DEPLOY / "README.md").read_text(), re.MULTILINE)
    return {line: re.findall(r"-f (\S+)", line) for line in found}


def program(pod: Pod, files: Mapping[str, Path]) -> Serve | TrainConfig | Fleet:
    """What its container runs, as the parser of its program takes it."""
    variables = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "leader", "POD_IP": POD_IP}
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
        programs = {
            pod.of: program(pod, settings(pod, documents, folder)) for pod in pods(documents) if "args" in pod.container
        }
    except (KeyError, ValueError, ConfigError, TyperException) as error:
        return [*found, f"command line: {error!r}"]
    for pod in pods(documents):
        if pod.of in programs:
            found += _port_faults(pod, programs[pod.of])
    found += [*_link_faults(documents, programs), *_member_faults(documents, programs)]
    return [*found, *_ray_faults(documents, programs)]


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
            if port and port not in {*pod.ports, RAY_AGENT}:
                yield f"{pod.of}: a probe asks port {port}, which it has not"
        for asked in (each["valueFrom"].get("secretKeyRef") for each in each.get("env", ())):
            if asked is None:
                continue
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
    to_all = POD_IP if isinstance(found, Fleet) and found.own["replicas"] else "0.0.0.0"
    if hosts != {to_all}:
        yield f"{pod.of}: listens at {sorted(hosts)}, where no other pod reaches it"


def _link_faults(documents: Sequence[Document], programs: Mapping[str, Any]) -> Iterator[str]:
    """Trainer and servers: where they meet, by which keys, over which target."""
    services = named(documents, "Service")
    keys = {pod.of: _keys(pod) for pod in pods(documents)}
    servers = {name: each for name, each in programs.items() if isinstance(each, Serve)}
    placed = {name: each for name, each in programs.items() if isinstance(each, Fleet) and each.own["replicas"]}
    servers |= {workers_of(name): each.serve for name, each in placed.items()}
    for name, server in servers.items():
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
            kinds = {None, server.config.drafter_kind}
            if trainer.target != server.sglang.model_path or trainer.drafter_kind not in kinds:
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
    fronts = {name: each.own for name, each in programs.items() if isinstance(each, Fleet)}
    for name in fronts:
        if not named(documents, "Service")[name]["spec"].get("publishNotReadyAddresses"):
            yield f"{name}: no trainer reaches it while it has no ready members"
    for of, servers in named(documents, "StatefulSet").items():
        headless = named(documents, "Service").get(servers["spec"]["serviceName"], {"spec": {}})["spec"]
        if headless.get("clusterIP") != "None" or not headless.get("publishNotReadyAddresses"):
            yield f"{of}: no headless service that finds those which are not ready"
        place = f"{servers['spec']['serviceName']}:{programs[of].sglang.port}"
        wanted = [f"http://{of}-{at}.{place}" for at in range(servers["spec"]["replicas"])]
        for name, front in fronts.items():
            if front["member"] and front["member"] != wanted:
                yield f"{name}: members {front['member']}, pods {wanted}"
            if front["member"] and front["min_ready"] > len(wanted):
                yield f"{name}: {front['min_ready']} members must be ready, of {len(wanted)}"


def _ray_faults(documents: Sequence[Document], programs: Mapping[str, Any]) -> Iterator[str]:
    """The front starts as many servers as Ray has room for, of one version, and each finds its settings."""
    by_name = {pod.of: pod for pod in pods(documents)}
    for name, service in named(documents, "RayService").items():
        cluster, front = service["spec"]["rayClusterConfig"], programs[name].own
        (worker,) = cluster["workerGroupSpecs"]
        if not worker["minReplicas"] == worker["replicas"] == worker["maxReplicas"] == front["replicas"]:
            yield f"{name}: {front['replicas']} servers on {worker['replicas']} nodes"
        if front["min_ready"] > front["replicas"]:
            yield f"{name}: {front['min_ready']} members must be ready, of {front['replicas']}"
        gpus = by_name[workers_of(name)].container["resources"]["limits"]["nvidia.com/gpu"]
        said = [
            front["gpus"],
            programs[name].serve.sglang.tp_size,
            int(worker["rayStartParams"]["num-gpus"]),
            int(gpus),
        ]
        if len(set(said)) > 1:
            yield f"{name}: GPUs of a server, its ranks, of a node as Ray and as Kubernetes knows it: {said}"
        pinned = {found for lock in (DEPLOY / "locks").glob("*.txt") for found in RAY.findall(lock.read_text())}
        if pinned != {cluster["rayVersion"]}:
            yield f"{name}: Ray {cluster['rayVersion']}, the locks have {sorted(pinned)}"
        if str(front["state_dir"]) not in {m["mountPath"] for m in by_name[workers_of(name)].container["volumeMounts"]}:
            yield f"{name}: servers cannot write their logs to {front['state_dir']}"
        mounted = [
            {mount["mountPath"] for mount in by_name[of].container["volumeMounts"] if "subPath" in mount}
            for of in (name, workers_of(name))
        ]
        if mounted[0] != mounted[1]:
            yield f"{name}: settings of the front {sorted(mounted[0])}, of servers {sorted(mounted[1])}"
