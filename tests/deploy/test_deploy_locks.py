"""The locks name every package that an image needs, by version and hash, and no place to take it from."""

import re
import runpy
from pathlib import Path

import pytest
from deployment import DEPLOY
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCK = runpy.run_path(str(DEPLOY / "lock.py"))
LOCKS = sorted((DEPLOY / "locks").glob("*-*.txt"))
TRAINERS = DEPLOY / "locks/trainers.txt"
each = pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)


def pinned(text: str) -> dict[str, str]:
    return {canonicalize_name(name): version for name, version in re.findall(r"(?m)^([\w.-]+)==(\S+)", text)}


def test_there_is_one_for_each_image_and_for_make_env() -> None:
    assert [path.stem for path in LOCKS] == [
        f"{kind}-{python}" for kind in ("cpu", "dev", "gpu") for python in LOCK["PYTHONS"]
    ]


@pytest.mark.parametrize("path", [*LOCKS, TRAINERS], ids=lambda path: path.stem)
def test_each_package_has_a_version_and_a_hash_and_nothing_else(path: Path) -> None:
    for entry in re.split(r"(?m)^(?=\S)", path.read_text())[1:]:
        first, *hashes = [line.strip(" \\") for line in entry.splitlines()]
        assert re.fullmatch(r"[\w.-]+==[\w.]+", first), first
        assert hashes, first
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", line) for line in hashes), first


@each
def test_it_has_what_the_image_needs(path: Path) -> None:
    kind = path.stem.partition("-")[0]
    found = pinned(path.read_text())
    for requirement in map(Requirement, LOCK["needed"](kind)):
        assert requirement.specifier.contains(found[canonicalize_name(requirement.name)], prereleases=True), requirement
    assert found.get("torch") == ("2.11.0" if kind == "gpu" else None)


def test_trainers_are_pinned_as_asked() -> None:
    lines = (DEPLOY / "trainers.in").read_text().splitlines()
    asked = [Requirement(line.partition("#")[0]) for line in lines if not line.startswith("#")]
    found = pinned(TRAINERS.read_text())
    assert found == {canonicalize_name(each.name): str(each.specifier).removeprefix("==") for each in asked}


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_the_image_installs_by_it(kind: str) -> None:
    dockerfile = (DEPLOY / f"{kind}.Dockerfile").read_text()
    assert f'--require-hashes --requirement "/etc/tlt-server/locks/{kind}-${{PYTHON_VERSION}}.txt"' in dockerfile
