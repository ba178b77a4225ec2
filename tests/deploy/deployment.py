"""What the files under deploy/ say, and the tools that judge them; the tests of this folder share it."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
RULES = sorted((DEPLOY / "rules").glob("*.yml"))
RULE_TESTS = sorted((DEPLOY / "rules/tests").glob("*.yml"))
DASHBOARDS = sorted((DEPLOY / "grafana/dashboards").glob("*.json"))
DEBIAN_PACKAGE = {"promtool": "prometheus", "prometheus": "prometheus"}


def tool(name: str) -> str:
    """Path of a program. Skips the test where it is one that pip cannot bring."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None and name in DEBIAN_PACKAGE:
        pytest.skip(f"{name} is missing: apt-get install --no-install-recommends {DEBIAN_PACKAGE[name]}")
    assert found, f"{name} is missing: install the extra dev"
    return found


def run(name: str, *args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tool(name), *map(str, args)], capture_output=True, text=True, cwd=ROOT)


def passes(name: str, *args: object) -> None:
    """Runs a program and asserts that it finds nothing, or shows what it found."""
    done = run(name, *args)
    assert done.returncode == 0, done.stdout + done.stderr


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def compose() -> dict[str, Any]:
    found: dict[str, Any] = read_yaml(DEPLOY / "compose.yaml")
    return found


def entrypoint(dockerfile: Path) -> list[str]:
    """What an image runs before the words that come after its name."""
    (line,) = (line for line in dockerfile.read_text().splitlines() if line.startswith("ENTRYPOINT "))
    found: list[str] = json.loads(line.removeprefix("ENTRYPOINT "))
    return found


def rules() -> list[dict[str, Any]]:
    """Every recording rule and alert."""
    return [rule for path in RULES for group in read_yaml(path)["groups"] for rule in group["rules"]]


def dashboard(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def panel_queries(replica: str = ".*") -> Iterator[tuple[str, str]]:
    """(panel, PromQL) of every query on every dashboard, Grafana's variables filled in."""
    for path in DASHBOARDS:
        for panel in dashboard(path)["panels"]:
            for target in panel["targets"]:
                expr = target["expr"].replace("$instance", ".*").replace("$replica", replica)
                yield f"{panel['title']} {target['refId']}", expr.replace("$__rate_interval", "5s")
