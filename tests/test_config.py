"""Settings are checked once, at the door."""

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_server.cli import read_config
from tlt_server.config import (
    AUTO,
    CANDIDATES,
    ENVIRONMENT_VARIABLE,
    Arm,
    Dialect,
    DrafterKind,
    ServerConfig,
    Trainer,
    Watchfulness,
    beside,
    read_toml,
    widest,
)
from tlt_server.config.arm import Source
from tlt_server.errors import ConfigError

steps, branches = st.integers(1, 16), st.integers(1, 16)


@given(steps, branches, st.data())
def test_every_arm_is_read_back_as_written(num_steps: int, topk: int, data: st.DataObject) -> None:
    tree = 1 + topk + (num_steps - 1) * topk**2
    tokens = num_steps + 1 if topk == 1 else data.draw(st.integers(num_steps + 1, tree))
    arm = Arm(num_steps, topk, tokens)
    assert arm.tree_size == tree
    assert Arm.parse(str(arm).strip("()")) == arm


@given(steps, branches, st.integers(-3, 300))
def test_no_other_arm_is_accepted(num_steps: int, topk: int, tokens: int) -> None:
    tree = 1 + topk + (num_steps - 1) * topk**2
    if num_steps + 1 <= tokens <= tree:
        return
    with pytest.raises(ConfigError, match=r"num_draft_tokens must lie|a chain verifies"):
        Arm(num_steps, topk, tokens)


@pytest.mark.parametrize("text", ["", "3", "3,1", "3,1,4,5", "a,b,c", "3,1,4.0"])
def test_what_is_no_arm(text: str) -> None:
    with pytest.raises(ConfigError, match="write num_steps,topk,num_draft_tokens"):
        Arm.parse(text)


def test_arms_of_history() -> None:
    assert Arm.parse("history") == Arm.parse("history:7") == Arm.history(7)
    assert str(Arm.history(3)) == "history:3"
    assert widest([Arm.history(7), Arm(5, 4, 16)]) == Arm(7, 4, 16)
    for text in ("history:0", "history:x", "history:3,1,4", "memory:3"):
        with pytest.raises(ConfigError, match=r"history:|memory:"):
            Arm.parse(text)
    with pytest.raises(ConfigError, match="is a chain"):
        Arm(3, 2, 6, Source.HISTORY)


def test_arms_of_history_beside_those_that_are_found() -> None:
    config = read_config(None, None, ["auto", "history:7", "history:3"])
    assert config.finds_arms
    assert config.to_try == (*CANDIDATES, Arm.history(7), Arm.history(3))
    assert config.keeps_history
    assert not read_config(None, None, ["auto"]).keeps_history
    with pytest.raises(ConfigError, match=r"--arm auto beside \(3,1,4\)"):
        read_config(None, None, ["3,1,4", "auto"])
    with pytest.raises(ConfigError, match="named twice"):
        read_config(None, None, ["auto", "history", "history:7"])


def test_what_needs_no_drafter() -> None:
    config = read_config(None, "none", ["history:7", "history:3"])
    assert (config.without_drafter, config.keeps_history, config.begins_untrained) == (True, True, False)
    assert not ServerConfig().keeps_history
    assert read_config(None, None, ["3,1,4", "history"]).keeps_history
    with pytest.raises(ConfigError, match=r"--drafter none beside arms \(3,1,4\): give --arm history"):
        read_config(None, "none", ["3,1,4", "history"])
    with pytest.raises(ConfigError, match="named twice"):
        read_config(None, None, ["history", "history:7"])
    assert msgspec.json.decode(msgspec.json.encode(config), type=ServerConfig) == config


def test_flags_go_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tlt.toml"
    file.write_text('drafter = "d"\narms = [[5, 4, 16]]\nspeculation = false\n')
    assert read_config(file) == ServerConfig(drafter="d", arms=(Arm(5, 4, 16),), speculation=False)
    assert read_config(file, arms=["3,1,4"], speculation=True) == ServerConfig(drafter="d")
    assert read_config(file, "auto", speculation=True).begins_untrained
    assert not read_config(file, "auto").begins_untrained, "it has no drafter"
    assert read_config(file, drafter_kind=DrafterKind.EAGLE3).drafter_kind is DrafterKind.EAGLE3
    file.write_text('arms = "auto"\n')
    assert read_config(file) == read_config(None, arms=["auto"]) == ServerConfig(arms="auto")
    assert read_config(file).to_try == CANDIDATES
    assert read_config(file, arms=["3,1,4"]).to_try == (Arm(3, 1, 4),)
    file.write_text('drafter = "auto"\ndrafter_kind = "eagle3"\n')
    assert read_config(file) == ServerConfig(drafter=AUTO, drafter_kind=DrafterKind.EAGLE3)
    assert not read_config(file).strict_fields
    assert read_config(file, strict_fields=True).strict_fields
    assert read_config(file, dialect=Dialect.VLLM).dialect is Dialect.VLLM is not ServerConfig().dialect
    observing = read_config(file, watchdog=Watchfulness.OBSERVE)
    assert observing.watchdog is Watchfulness.OBSERVE is not ServerConfig().watchdog


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("arm = 3", "unknown field `arm`"),
        ("arms = []", "length"),
        ("arms = [[3, 1, 4], [3, 1, 4]]", "twice"),
        ("arms = [[3, 1]]", "length"),
        ("arms = [[3, 1, 9]]", "a chain verifies"),
        ("speculation = 1", "Expected `bool`"),
        ("drafter = ", "Invalid value"),
        ('drafter_kind = "medusa"', "Invalid enum value 'medusa'"),
        ('watchdog = "asleep"', "asleep"),
        ('dialect = "tgi"', "Invalid enum value 'tgi'"),
        ("accept_length_floor = 1.0", "> 1.0"),
        ("[features]\nbudget_mb_s = 0", "> 0.0"),
        ("[features]\nshare = 1.5", "<= 1.0"),
        ("[features]\nbudget = 3", "unknown field `budget`"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "tlt.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_toml(file, ServerConfig)


def test_features_are_tapped_for_a_trainer_unless_it_is_said(tmp_path: Path) -> None:
    file = tmp_path / "tlt.toml"
    trainer, off = '[trainer]\naddress = "tcp://127.0.0.1:7"\n', "[features]\non = false\n"
    for text, taps in (("", False), (trainer, True), (trainer + off, False), (off, False)):
        file.write_text(text)
        assert read_config(file).taps == taps


@pytest.mark.parametrize(
    ("address", "given", "features"),
    [
        ("tcp://127.0.0.1:7000", None, "tcp://127.0.0.1:7001"),
        ("tcp://[::1]:7000", None, "tcp://[::1]:7001"),
        ("ipc:///run/t", None, "ipc:///run/t.features"),
        ("tcp://127.0.0.1:7000", "tcp://127.0.0.1:9", "tcp://127.0.0.1:9"),
    ],
)
def test_where_features_go(address: str, given: str | None, features: str) -> None:
    assert Trainer(address=address, features=given).features_address == features


def test_where_features_go_is_not_guessed() -> None:
    with pytest.raises(ConfigError, match=r"link tcp://host:\*: no port to count on from"):
        beside("tcp://host:*")


def test_the_environment_carries_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "")
    config = ServerConfig(drafter="d", arms=(Arm(5, 4, 16),))
    config.to_environment()
    assert os.environ[ENVIRONMENT_VARIABLE]
    assert ServerConfig.from_environment() == config


def test_memory_of_graphs_is_bounded_or_they_are_captured_naively(tmp_path: Path) -> None:
    file = tmp_path / "tlt.toml"
    file.write_text('graph_sharing = "none"\n')
    assert read_config(file).graph_memory_gb is None
    assert read_config(None, graph_memory_gb=1.5).graph_memory_gb == 1.5
    with pytest.raises(ConfigError, match="drop one of the two"):
        read_config(file, graph_memory_gb=1.5)
    with pytest.raises(ConfigError, match="must be more than 0"):
        read_config(None, graph_memory_gb=0.0)
