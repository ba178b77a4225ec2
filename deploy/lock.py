"""Pins every package of the images, with hashes: deploy/locks/KIND-PYTHON.txt, for `pip install --require-hashes`.

    python deploy/lock.py         in an environment that has uv and the fork; it asks PyPI, and installs nothing

torch and torchvision for a CPU are not in it: their builds, of an index of their own, have other hashes than PyPI's.
"""

import subprocess
import tomllib
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

HERE = Path(__file__).parent
PYTHONS = ("3.11", "3.12")
OF_TORCH = ("torch", "torchvision")
OURS = ("tlt-client", "tlt-grpo")


def needed(kind: str) -> list[str]:
    """What an image of a kind needs, but for what is built from this repository: of ours, and of the fork's."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    ours = [Requirement(line) for line in project["dependencies"]]
    client = tomllib.loads((HERE.parent / "clients/tlt_client/pyproject.toml").read_text())["project"]
    ours += [Requirement(line) for line in client["dependencies"]]
    environment = {"extra": "gpu" if kind == "gpu" else "", "platform_machine": "x86_64", "sys_platform": "linux"}
    fork = [Requirement(line) for line in requires("sglang") or ()]
    wanted = [*ours, *(each for each in fork if each.marker is None or each.marker.evaluate(environment))]
    for each in wanted:
        each.marker = None
    if kind == "gpu":
        wanted += map(Requirement, project["optional-dependencies"]["gpu"])
    skipped = (*OURS, *OF_TORCH) if kind == "cpu" else OURS
    return sorted({str(each) for each in wanted if each.name not in skipped})


def lock(kind: str, python: str) -> None:
    without = [f"{name}; python_version < '3'" for name in OF_TORCH]
    overrides = HERE / "locks/.without"
    overrides.write_text("\n".join(without))
    held = HERE / f"constraints/{kind}.txt"
    options = ["--override", str(overrides)] if kind == "cpu" else ["--constraint", str(held)]
    target = HERE / f"locks/{kind}-{python}.txt"
    command = [
        "uv",
        "pip",
        "compile",
        "-",
        "--quiet",
        "--generate-hashes",
        "--no-header",
        "--no-annotate",
        "--no-config",
    ]
    command += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_34"]
    command += ["--no-emit-index-url", "--no-emit-find-links", "--output-file", str(target), "--upgrade", *options]
    subprocess.run(command, input="\n".join(needed(kind)), text=True, check=True)
    overrides.unlink()


if __name__ == "__main__":
    (HERE / "locks").mkdir(exist_ok=True)
    for kind in ("cpu", "gpu"):
        for python in PYTHONS:
            lock(kind, python)
