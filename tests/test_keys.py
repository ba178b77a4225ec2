"""Keys come from a file, the environment or, hidden, the command line; and nobody is shown them."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from tlt_server.errors import ConfigError
from tlt_server.keys import ADMIN, API, MASK, PASSWORD, Keys, described, masked, read_private, taken_out
from tlt_server.preflight import check_exposure, check_place, is_loopback
from tlt_server.trainer.config import TrainConfig


def test_a_key_is_read_from_a_file_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (API, ADMIN):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "key"
    path.write_text("one\n")
    path.chmod(0o600)
    assert Keys.read(path, None) == Keys("one", None)
    assert Keys.read(None, path) == Keys(None, "one")
    monkeypatch.setenv(API, "two")
    assert Keys.read(None, None) == Keys("two", None)
    with pytest.raises(ConfigError, match="give the key once"):
        Keys.read(path, None)


@pytest.mark.parametrize("rights", [0o640, 0o604, 0o620, 0o644, 0o601])
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, rights: int) -> None:
    path = tmp_path / "key"
    path.write_text("one")
    path.chmod(rights)
    with pytest.raises(ConfigError, match=f"rights {rights:o}.*chmod 600"):
        read_private(path)


@pytest.mark.parametrize("text", ["", "\n", "one\ntwo", "k" * 5000, "\0"])
def test_a_key_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="one line"):
        read_private(path)


def test_a_folder_is_no_key(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="key file"):
            read_private(path)


def test_secrets_leave_the_command_line() -> None:
    argv = ["python", "-m", "x", "--api-key", "a", "--admin-api-key=b", "--port", "1", "--ssl-keyfile-password", "c"]
    assert taken_out(argv) == (["python", "-m", "x", "--port", "1"], {API: "a", ADMIN: "b", PASSWORD: "c"})
    assert taken_out(["x", "--api-key"]) == (["x", "--api-key"], {})


def test_a_command_line_is_begun_anew_without_them() -> None:
    """What `ps` shows; the process stays the same one."""
    program = (
        "import os, sys; from tlt_server.keys import hide; hide(sys.orig_argv); "
        "print(os.getpid(), os.environ['TLT_API_KEY'], open('/proc/self/cmdline').read())"
    )
    command = [sys.executable, "-c", program, "--api-key", "hunter2", "--port", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        pid, key, shown = child.stdout.read().split(" ", 2)
    assert (int(pid), key) == (child.pid, "hunter2")
    assert "--port" in shown
    assert "hunter2" not in shown.replace(program, "")


@dataclass
class Settings:
    """A part of SGLang's."""

    host: str
    ssl_keyfile_password: str
    hicache_storage_backend_extra_config: str
    kv_url: str
    speculative_token_map: str


def test_what_is_secret_is_masked_wherever_it_stands() -> None:
    extra = '{"url": "redis://user:hunter2@host/", "nested": [{"Secret_Key": "hunter2"}], "tokens": 3}'
    settings = Settings("h", "hunter2", extra, "https://hunter2@host/x", "map.pt")
    said = described(settings)
    assert "hunter2" not in said
    assert f"ssl_keyfile_password={MASK!r}" in said
    assert "map.pt" in said
    assert '"tokens": 3' in said
    assert masked({"internal": [{"api_key": "k", "hf_token": "t", "max_tokens": 5, "eos_token": None}]}) == {
        "internal": [{"api_key": MASK, "hf_token": MASK, "max_tokens": 5, "eos_token": None}]
    }
    assert "hunter2" not in repr(Keys("hunter2", "hunter2"))


def settings(**fields: object) -> SimpleNamespace:
    plain = {
        "host": "127.0.0.1",
        "grpc_port": None,
        "smg_grpc_mode": False,
        "grpc_mode": False,
        "nnodes": 1,
        "disaggregation_mode": "null",
        "encoder_only": False,
        "enable_custom_logit_processor": False,
    }
    return SimpleNamespace(**plain | fields)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_loopback_is_open_without_a_key(host: str) -> None:
    assert is_loopback(host)
    check_exposure(settings(host=host), keyed=False, insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "rollouts.example", ""])
def test_beyond_it_a_key_is_needed(host: str) -> None:
    check_exposure(settings(host=host), keyed=True, insecure=False)
    check_exposure(settings(host=host), keyed=False, insecure=True)
    with pytest.raises(ConfigError, match=r"TLT_API_KEY.*--insecure"):
        check_exposure(settings(host=host), keyed=False, insecure=False)
    with pytest.raises(ConfigError, match=r"TLT_API_KEY.*--insecure"):  # a fleet, a keeper
        check_place(host, 0, keyed=False, insecure=False)


@pytest.mark.parametrize(
    "fields",
    [
        {"nnodes": 2},
        {"disaggregation_mode": "prefill"},
        {"encoder_only": True},
        {"enable_custom_logit_processor": True},
        {"smg_grpc_mode": True},
    ],
)
def test_what_no_key_protects_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        check_exposure(settings(**fields), keyed=True, insecure=False)
    check_exposure(settings(**fields), keyed=True, insecure=True)


def test_a_trainers_status_stays_on_the_machine() -> None:
    with pytest.raises(ConfigError, match="insecure"):
        TrainConfig(target="t", folder="f", host="0.0.0.0")
    TrainConfig(target="t", folder="f", host="0.0.0.0", insecure=True)
