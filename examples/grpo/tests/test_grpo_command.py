"""Mistakes at the command line: one line, exit code 2, nothing left behind."""

import sys
from pathlib import Path

import pytest
from tlt_server.demo import default_paths

from tlt_grpo.cli import main
from tlt_grpo.config import Config
from tlt_grpo.errors import GrpoError
from tlt_grpo.log import HeldOut, Log, read

GOOD = {"url": "http://127.0.0.1:9", "model": str(default_paths()[0])}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("steps", 0),
        ("prompts", 0),
        ("group", 1),
        ("updates", 65),
        ("temperature", 0.0),
        ("learning_rate", float("nan")),
        ("clip_low", 1.0),
        ("clip_high", -1.0),
        ("kl", -0.1),
        ("held_out", -1),
        ("max_age", -1),
        ("drafter_steps", 0),
        ("drafter_judged_every", 0),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(setting: str, value: float) -> None:
    with pytest.raises(GrpoError, match=f"^{setting}={value}: must be "):
        Config(out=Path(), **GOOD, **{setting: value})  # type: ignore[arg-type]


def test_a_server_that_samples_keeps_its_memory() -> None:
    with pytest.raises(GrpoError, match=r"^offload=True: must be false"):
        Config(out=Path(), **GOOD, rollouts="partial", offload=True)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--group", "1"], "group=1: must be at least 2"),
        (["--model", "/no/such"], "model=/no/such: "),
        (["--url", "nowhere"], "nowhere"),
    ],
)
def test_mistakes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    said: str,
) -> None:
    out = tmp_path / "out"
    usual = [word for name, value in GOOD.items() for word in (f"--{name}", value)]
    monkeypatch.setattr(sys, "argv", ["tlt-grpo", *usual, "--out", str(out), *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tlt-grpo: ")
    assert said in line
    assert ended.value.code == 2
    assert not (out / "log.jsonl").exists()


def test_a_log_is_never_written_over(tmp_path: Path) -> None:
    line = HeldOut(step=0, problems=3, accuracy=1 / 3)
    with Log(tmp_path / "log.jsonl") as log:
        log.write(line)
        log.write(line)
    with pytest.raises(GrpoError, match="a run was logged here"):
        Log(tmp_path / "log.jsonl")
    path = tmp_path / "log.jsonl"
    path.write_bytes(path.read_bytes() + b'{"kind":"he')
    assert read(path) == [line, line]
