"""Pins every package of the images, and of `make env`, with hashes: deploy/locks/KIND-PYTHON.txt, for pip.

    make lock          asks PyPI, and installs nothing but uv
    make lock KEEP=1   what is pinned stays as it is; what is missing is added

trainers.txt is what tests call of RL trainers (trainers.in), installed without what these ask for.
torch and torchvision for a CPU are not in it: their builds, of an index of their own, have other hashes than PyPI's.
"""

import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

HERE = Path(__file__).parent
PYTHONS = ("3.11", "3.12")
OF_TORCH = ("torch", "torchvision")
OF_UVICORN = ("httptools", "websockets")
"""Ray asks for them; where they are there uvicorn reads requests by them, and no test of ours has."""
OURS = ("tlt-client", "tlt-grpo", "tlt-server")
EXTRAS = {"cpu": ("fleet",), "gpu": ("gpu", "fleet"), "dev": ("trainer", "demo", "fleet", "dev")}
"""Of our package, by kind: `cpu` and `gpu` are the images', `dev` is what `make env` makes."""


def needed(kind: str) -> list[str]:
    """What an environment of a kind needs, but for what is built from this repository: of ours, and of the fork's."""
    project = _project(HERE.parent)
    ours = [*project["dependencies"], *_project(HERE.parent / "clients/tlt_client")["dependencies"]]
    ours += [line for extra in EXTRAS[kind] for line in project["optional-dependencies"][extra]]
    if kind == "dev":
        ours += _project(HERE.parent / "examples/grpo")["dependencies"]
    environment = {"extra": "gpu" if kind == "gpu" else "", "platform_machine": "x86_64", "sys_platform": "linux"}
    fork = [Requirement(line) for line in requires("sglang") or ()]
    wanted = [*map(Requirement, ours), *(each for each in fork if not each.marker or each.marker.evaluate(environment))]
    for each in wanted:
        each.marker = None
    skipped = OURS if kind == "gpu" else (*OURS, *OF_TORCH)
    return sorted({str(each) for each in wanted if each.name not in skipped})


def _project(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return found


def lock(kind: str, python: str, keep: bool) -> None:
    without = OF_UVICORN if kind == "gpu" else (*OF_UVICORN, *OF_TORCH)
    overrides = HERE / "locks/.without"
    overrides.write_text("\n".join(f"{name}; python_version < '3'" for name in without))
    options = ["--override", str(overrides)]
    options += ["--constraint", str(HERE / "constraints/gpu.txt")] if kind == "gpu" else []
    try:
        _compile(f"{kind}-{python}", python, "\n".join(needed(kind)), [*options, *([] if keep else ["--upgrade"])])
    finally:
        overrides.unlink()


def _compile(name: str, python: str, wanted: str, options: list[str]) -> None:
    command = ["uv", "pip", "compile", "-", "--quiet", "--generate-hashes", "--no-header", "--no-annotate"]
    command += ["--no-config", "--no-emit-index-url", "--no-emit-find-links"]
    command += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_34"]
    command += ["--output-file", str(HERE / f"locks/{name}.txt"), *options]
    subprocess.run(command, input=wanted, text=True, check=True)


if __name__ == "__main__":
    (HERE / "locks").mkdir(exist_ok=True)
    for kind in EXTRAS:
        for python in PYTHONS:
            lock(kind, python, keep="--keep" in sys.argv)
    _compile("trainers", PYTHONS[0], (HERE / "trainers.in").read_text(), ["--no-deps"])
