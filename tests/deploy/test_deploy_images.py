"""The Dockerfiles: linted, pinned, and keeping what compose and the README say of them."""

import json
import re
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
from deployment import DEPLOY, ROOT, passes

from tlt_server.fork.pristine import SGLANG

DOCKERFILES = sorted(DEPLOY.glob("*.Dockerfile"))
each = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)


class Instruction(NamedTuple):
    word: str
    rest: str


def instructions(path: Path) -> list[Instruction]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    whole = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    return [Instruction(*line.split(maxsplit=1)) for line in whole.splitlines() if line.strip()]


def stages(path: Path) -> dict[str, list[Instruction]]:
    """Instructions by stage; those before the first FROM, which set its arguments, under ""."""
    found: dict[str, list[Instruction]] = {"": []}
    for each in instructions(path):
        if each.word == "FROM":
            found[each.rest.split()[-1]] = []
        list(found.values())[-1].append(each)
    return found


def test_there_is_one_for_a_cpu_and_one_for_a_gpu() -> None:
    assert [path.name for path in DOCKERFILES] == ["cpu.Dockerfile", "gpu.Dockerfile"]


def test_hadolint_finds_nothing() -> None:
    passes("hadolint", "--no-color", "--config", DEPLOY / ".hadolint.yaml", *DOCKERFILES)


@each
def test_every_base_image_has_a_version(path: Path) -> None:
    arguments = dict(each.rest.split("=", 1) for each in stages(path)[""])
    for each in (each for each in instructions(path) if each.word == "FROM"):
        image = re.sub(r"\$\{(\w+)\}", lambda found: arguments[found[1]], each.rest.split()[0])
        assert re.fullmatch(r"[\w./-]+:\d[\w.-]*", image), image
        assert "latest" not in image
    assert arguments["PYTHON_VERSION"] in SGLANG.wheels


@each
def test_the_fork_is_built_where_git_is_and_only_there(path: Path) -> None:
    build, server = (" ".join(each.rest for each in stages(path)[name]) for name in ("wheels", "server"))
    assert "tlt-server fork build" in build
    assert " git " in build
    assert " git " not in server
    assert "tlt-server fork check" in server


@each
def test_the_server_runs_as_compose_expects(path: Path) -> None:
    said = {word: rest for word, rest in stages(path)["server"] if word not in ("RUN", "COPY")}
    assert int(said["USER"]) > 0
    assert said["EXPOSE"] == "30000"
    assert said["VOLUME"] == "/home/tlt/.cache"
    assert json.loads(said["ENTRYPOINT"]) == ["tlt-server", "serve", "--host", "0.0.0.0", "--port", "30000"]
    check = re.fullmatch(
        r"--interval=30s --timeout=(\d+)s --start-period=\d+m --retries=3 CMD (.*)", said["HEALTHCHECK"]
    )
    assert check
    program = json.loads(check[2])
    assert program[:2] == ["python", "-c"]
    compile(program[2], "healthcheck", "exec")
    assert "'http://127.0.0.1:30000/health'" in program[2]
    assert int(check[1]) > 20  # SGLang's own limit for the token that /health asks for


@each
def test_what_is_copied_is_in_the_context(path: Path) -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = [Path(line[1:]) for line in ignore if line.startswith("!")]
    assert "*" in ignore
    copies = [each.rest.split() for each in instructions(path) if each.word == "COPY" and "--from" not in each.rest]
    for source in (Path(word) for words in copies for word in words[:-1]):
        assert (ROOT / source).exists(), source
        assert any(source.is_relative_to(root) for root in let_in), f"{source} is ignored"


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_the_image_has_the_torch_of_the_extra(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (DEPLOY / f"constraints/{extra}.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == project["optional-dependencies"][extra]


@each
def test_the_wheels_can_be_built_from_the_context(path: Path) -> None:
    """pip reads these files of the project when it makes the wheel, and `fork build` what lies in the wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {"patches", "NOTICE"} <= set(wheel["force-include"])
    named = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    named |= {*wheel["force-include"], *wheel["packages"]}
    copied = {word for each in stages(path)["wheels"] if each.word == "COPY" for word in each.rest.split()[:-1]}
    assert named <= copied
