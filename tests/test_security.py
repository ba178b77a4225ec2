"""SECURITY.md is true of what runs: its names, ports and routes."""

import re
from pathlib import Path

from tlt_server import keys
from tlt_server.engine.weights.groups import JOIN
from tlt_server.trainer.config import TrainConfig

TEXT = (Path(__file__).parents[1] / "SECURITY.md").read_text()


def test_variables_and_flags_are_those_that_are_read() -> None:
    assert set(re.findall(r"TLT_[A-Z_]+", TEXT)) == {keys.API, keys.ADMIN, keys.PASSWORD}
    named = (Path(__file__).parents[1] / "tlt_server/cli.py").read_text()
    for flag in ("api_key_file", "admin_api_key_file", "insecure"):
        assert f"--{flag.replace('_', '-')}" in TEXT
        assert f"    {flag}: " in named
    assert set(keys.FLAGS) <= set(re.findall(r"--[a-z-]+", TEXT))


def test_ports_are_those_that_are_opened() -> None:
    config = TrainConfig(target="t", folder="f")
    assert (config.listen, config.features_address) == ("tcp://127.0.0.1:30500", "tcp://127.0.0.1:30501")
    assert (config.host, config.port) == ("127.0.0.1", 30502)
    assert {"30000", "30500", "30501", "30502"} == set(re.findall(r"\b30\d{3}\b", TEXT))
    assert f"{JOIN.seconds} s" in TEXT


def test_open_routes_are_those_that_ask_for_nothing() -> None:
    from tlt_server.api.auth import OPEN
    from tlt_server.watch.page import FILES

    (row,) = (line for line in TEXT.splitlines() if line.startswith("| `/health`"))
    assert set(re.findall(r"`(/\w+)/?`", row)) == {path.rstrip("/") for path in OPEN - FILES.keys()}


def test_files_that_it_names_are_there() -> None:
    for path in re.findall(r"`(tlt_server/[\w/.]+)`", TEXT):
        assert (Path(__file__).parents[1] / path).is_file()
