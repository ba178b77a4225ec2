"""Mistakes at the command line: one line that names the value and the remedy, exit code not 0, no traceback."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tlt_server.cli import main
from tlt_server.demo import default_paths

pytestmark = pytest.mark.server
TARGET, DRAFTER = default_paths()


def run(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "tlt_server", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    ours = [line for line in done.stderr.splitlines() if line.startswith("tlt-server: ")]
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, ours[0] if len(ours) == 1 else done.stderr


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """As `run`, in this process, which imports SGLang once for all: that takes most of a command's time."""

    def run_here(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["tlt-server", *arguments])
        monkeypatch.setattr(os, "environ", os.environ.copy())  # a server's settings go there
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr().err
        ours = [line for line in said.splitlines() if line.startswith("tlt-server: ")]
        code = int(ended.value.code or 0)
        assert len(ours) == (code != 0), said
        return code, ours[0] if ours else said

    return run_here


MISTAKES = {
    "an unknown flag": (["--speculative-topk", "4"], "unknown flag --speculative-topk: did you mean"),
    "a bad value": (["--port", "many"], "argument --port: invalid int value: 'many'"),
    "no such model": (["--model-path", "/no/such/model"], "model /no/such/model: no such folder"),
    "no such drafter": (["--drafter", "/no/such/drafter"], "drafter /no/such/drafter: no such folder"),
    "a target as drafter": (["--drafter", str(TARGET)], "it has no fc.weight, which every EAGLE and EAGLE-3"),
    "not an arm": (["--arm", "3,1"], "arm '3,1': write num_steps,topk,num_draft_tokens"),
    "an impossible arm": (["--arm", "3,1,9"], "arm (3,1,9): a chain verifies num_steps + 1 = 4 tokens"),
    "no such config": (["--tlt-config", "/no/such.toml"], "config file /no/such.toml: No such file or directory"),
    "not a trainer": (["--trainer", "127.0.0.1:7000"], "link 127.0.0.1:7000: write ipc://PATH or tcp://HOST:PORT"),
    "an unsupported pair": (["--speculative-accept-threshold-single", "0.5"], "Relaxed acceptance"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes(run_here: Run, kind: str) -> None:
    flags, message = MISTAKES[kind]
    code, line = run_here("serve", *flags)
    assert code == 2, line
    assert message in line


def test_a_mistake_ends_the_process() -> None:
    flags, message = MISTAKES["no such drafter"]
    code, line = run("serve", *flags)
    assert code == 2
    assert message in line


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size"])
def test_a_drafter_for_another_target(run_here: Run, tmp_path: Path, field: str) -> None:
    shutil.copytree(DRAFTER, tmp_path / "drafter")
    config = json.loads((DRAFTER / "config.json").read_text())
    (tmp_path / "drafter/config.json").write_text(json.dumps(config | {field: 2 * config[field]}))
    code, line = run_here("serve", "--drafter", str(tmp_path / "drafter"))
    assert code == 2
    assert f"{field} is {2 * config[field]}" in line


@pytest.mark.parametrize("damage", ["cut short", "overwritten"])
def test_damaged_weights(run_here: Run, tmp_path: Path, damage: str) -> None:
    shutil.copytree(DRAFTER, tmp_path / "drafter")
    weights = tmp_path / "drafter/model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2] if damage == "cut short" else b"\xff" * 64 + whole[64:])
    code, line = run_here("serve", "--drafter", str(tmp_path / "drafter"))
    assert code == 2
    assert f"{weights}: damaged or incomplete" in line


def test_drafter_init(run_here: Run, tmp_path: Path) -> None:
    command = ["drafter", "init", "--target", str(TARGET), "--out", str(tmp_path / "made"), "--kind", "eagle3"]
    assert run_here(*command, "--draft-vocab", "8") == (
        2,
        "tlt-server: --draft-vocab and --token-counts: give both, or neither",
    )
    assert run_here(*command)[0] == 0
    assert run_here(*command) == (2, f"tlt-server: {tmp_path / 'made'}: exists. Remove it, or name another folder")


@pytest.mark.parametrize("command", [[], ["serve"], ["fork"], ["drafter"], ["demo"]])
def test_help(run_here: Run, command: list[str]) -> None:
    assert run_here(*command, "--help") == (0, "")


def test_version() -> None:
    assert run("--version") == (0, "")
