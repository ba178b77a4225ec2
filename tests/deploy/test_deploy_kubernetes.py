"""deploy/kubernetes: valid by the schemas that are published, and of one mind with each other and with our programs.

TLT_CRDS  a folder with the definitions of kinds that are not Kubernetes' own, as their authors publish them (CRDS names
          the files); each is a megabyte, so none is kept here
"""

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from cluster import FOLDER, applied, faults, named
from deployment import DEPLOY

CRDS = {
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io_leaderworkersets.yaml",  # kubernetes-sigs/lws v0.9.0, config/crd/bases
    "RayService": "ray.io_rayservices.yaml",  # ray-project/kuberay v1.7.0, ray-operator/config/crd/bases
}
VERSIONS = ("1.29", "1.37")
"""Of Kubernetes: the first whose pods this needs, and the newest whose schemas there are."""
FILES = sorted(FOLDER.glob("*.yaml"))


def read(*paths: Path) -> list[Any]:
    return [document for path in paths for document in yaml.safe_load_all(path.read_text())]


DOCUMENTS = read(*FILES)
CORE = [document for document in DOCUMENTS if document["kind"] not in CRDS]
OTHERS = [document for document in DOCUMENTS if document["kind"] in CRDS]


def name_of(document: Any) -> str:
    return f"{document['kind']}-{document['metadata']['name']}"


def templates(value: Any) -> Iterator[Any]:
    """Pod templates below."""
    if isinstance(value, dict):
        if "containers" in value.get("spec", ()):
            yield value
        for each in value.values():
            yield from templates(each)
    elif isinstance(value, list):
        for each in value:
            yield from templates(each)


def strict(schema: Any) -> Any:
    """A structural schema that refuses fields it does not name, which a cluster would drop without a word."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found


@pytest.mark.parametrize("document", CORE, ids=name_of)
@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_it(document: Any, version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("document", OTHERS, ids=name_of)
def test_kubernetes_takes_its_pods(document: Any) -> None:
    found = list(templates(document))
    assert found
    for template in found:
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "template": template}
        kubernetes_validate.validate(pod, VERSIONS[-1], strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("document", OTHERS, ids=name_of)
def test_its_operator_takes_it(document: Any) -> None:
    folder = os.environ.get("TLT_CRDS") or pytest.skip("TLT_CRDS names no folder with what its operator publishes")
    definition = yaml.load((Path(folder) / CRDS[document["kind"]]).read_text(), yaml.CSafeLoader)
    version = document["apiVersion"].partition("/")[2]
    (schema,) = (each["schema"] for each in definition["spec"]["versions"] if each["name"] == version)
    known = strict(schema["openAPIV3Schema"])
    known["properties"]["metadata"].pop("additionalProperties", None)
    jsonschema.validate(document, known, jsonschema.Draft7Validator)


def test_a_field_that_nobody_knows_is_found() -> None:
    known = strict({"properties": {"spec": {"type": "object", "properties": {"size": {"type": "integer"}}}}})
    jsonschema.validate({"spec": {"size": 2}}, known)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"spec": {"sise": 2}}, known)


def test_no_name_is_taken_twice() -> None:
    names = [name_of(document) for document in DOCUMENTS]
    assert len(set(names)) == len(names)


def test_nothing_contradicts_itself(tmp_path: Path) -> None:
    assert faults(DOCUMENTS, tmp_path) == []


@pytest.mark.parametrize("files", applied().values(), ids=applied())
def test_nothing_is_missing_of_what_is_applied_together(files: list[str], tmp_path: Path) -> None:
    assert faults(read(*(FOLDER / name for name in files)), tmp_path) == []


def test_each_file_is_named_where_it_is_told_which_to_take() -> None:
    text = (DEPLOY / "README.md").read_text()
    assert not [path.name for path in FILES if f"`{path.name}`" not in text.replace("kubernetes/", "")]
    assert {name for files in applied().values() for name in files} <= {path.name for path in FILES}


def of(documents: Any, kind: str, name: str) -> Any:
    return named(documents, kind)[name]["spec"]


def server(documents: Any) -> Any:
    return of(documents, "StatefulSet", "tlt-server")["template"]["spec"]


def front(documents: Any) -> Any:
    return of(documents, "Deployment", "tlt-fleet")["template"]["spec"]


def trainer(documents: Any) -> Any:
    return of(documents, "Deployment", "tlt-trainer")["template"]["spec"]


def ray_front(documents: Any) -> Any:
    head = of(documents, "RayService", "tlt-ray")["rayClusterConfig"]["headGroupSpec"]
    return head["template"]["spec"]["containers"][1]


def edited(documents: Any, name: str, file: str, before: str, after: str) -> None:
    data = named(documents, "ConfigMap")[name]["data"]
    assert before in data[file]
    data[file] = data[file].replace(before, after)


def put(value: Any, *path: Any) -> None:
    """value[a][b]... = last of the path."""
    *way, last, new = path
    for step in way:
        value = value[step]
    assert last in value or isinstance(value, list)
    value[last] = new


MISTAKES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "one server more": (lambda d: put(of(d, "StatefulSet", "tlt-server"), "replicas", 3), "tlt-fleet: members"),
    "a member of another name": (lambda d: put(front(d), "containers", 0, "args", 4, "--member=http://x:1"), "members"),
    "more ready than there are": (
        lambda d: put(front(d), "containers", 0, "args", 3, "--min-ready=3"),
        "must be ready",
    ),
    "no flag": (lambda d: server(d)["containers"][0]["args"].append("--drafters=auto"), "unrecognized"),
    "no flag of the fleet's": (lambda d: front(d)["containers"][0]["args"].append("--members=x"), "unrecognized"),
    "no setting": (lambda d: edited(d, "tlt-trainer", "trainer.toml", "insecure", "secure"), "settings of the trainer"),
    "no table": (lambda d: edited(d, "tlt-server", "server.toml", "[trainer]", "[trainers]"), "trainers"),
    "a server for itself": (lambda d: server(d)["containers"][0]["args"].append("--host=127.0.0.1"), "no other pod"),
    "another port": (lambda d: server(d)["containers"][0]["args"].append("--port=30001"), "declares"),
    "another image": (lambda d: put(server(d), "containers", 0, "image", "tlt-server:0.0.1-gpu"), "image"),
    "a probe of no port": (
        lambda d: put(trainer(d), "containers", 0, "livenessProbe", "httpGet", "port", "http"),
        "a probe asks port http",
    ),
    "a claim that nobody makes": (
        lambda d: put(front(d), "volumes", 0, "persistentVolumeClaim", "claimName", "gone"),
        "no persistentVolumeClaim gone",
    ),
    "a volume that nobody mounts": (lambda d: put(server(d), "volumes", 3, "name", "memory"), "mounted"),
    "a secret that nobody makes": (
        lambda d: put(front(d), "containers", 0, "env", 0, "valueFrom", "secretKeyRef", "key", "clients"),
        "no secret tlt-api with clients",
    ),
    "a key that is not copied": (
        lambda d: server(d)["initContainers"][0]["command"].pop(4),
        "not what the README puts",
    ),
    "a key elsewhere": (
        lambda d: edited(d, "tlt-server", "server.toml", "/keys/trainer.key", "/key/trainer.key"),
        "keys",
    ),
    "a trainer elsewhere": (lambda d: edited(d, "tlt-server", "server.toml", "tlt-trainer:", "trainer:"), "control at"),
    "another target": (lambda d: edited(d, "tlt-trainer", "trainer.toml", "2.5-7B", "2.5-14B"), "another target"),
    "another kind": (lambda d: edited(d, "tlt-server", "server.toml", "eagle3", "eagle"), "another kind"),
    "a trainer for itself": (
        lambda d: edited(d, "tlt-trainer", "trainer.toml", '"0.0.0.0"', '"127.0.0.1"'),
        "no other pod",
    ),
    "ready members only": (
        lambda d: put(of(d, "Service", "tlt-servers"), "publishNotReadyAddresses", False),
        "no headless service",
    ),
    "a front that nobody reaches": (
        lambda d: of(d, "Service", "tlt-fleet").pop("publishNotReadyAddresses"),
        "no trainer reaches it",
    ),
    "a front that its servers do not find": (lambda d: put(ray_front(d), "args", 0, "--host=0.0.0.0"), "no other pod"),
    "logs nowhere": (lambda d: put(ray_front(d), "args", 6, "--state-dir=/var/lib/tlt"), "cannot write their logs"),
    "a service of none": (lambda d: put(of(d, "Service", "tlt-fleet"), "selector", "app", "fleet"), "0 workloads"),
    "more servers than nodes": (lambda d: put(ray_front(d), "args", 3, "--replicas=3"), "3 servers on 2 nodes"),
    "more GPUs than Ray knows of": (lambda d: ray_front(d)["args"].append("--tp-size=2"), "GPUs of a server"),
    "a Ray that is not ours": (
        lambda d: put(of(d, "RayService", "tlt-ray"), "rayClusterConfig", "rayVersion", "2.50.0"),
        "Ray 2.50.0",
    ),
    "a service of another port": (
        lambda d: put(of(d, "Service", "tlt-trainer"), "ports", 1, "port", 30503),
        "features",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str, tmp_path: Path) -> None:
    make, said = MISTAKES[mistake]
    documents = copy.deepcopy(DOCUMENTS)
    make(documents)
    assert said in "\n".join(faults(documents, tmp_path))
