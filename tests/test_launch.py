"""From settings and flags to SGLang's argv."""

import socket
from pathlib import Path

import pytest
from msgspec.structs import replace

from tlt_server.config import AUTO, MTP, NONE, Arm, DrafterKind, ServerConfig
from tlt_server.demo import default_paths, eagle3_path
from tlt_server.errors import ConfigError
from tlt_server.keys import Keys
from tlt_server.launch import CPU_FLAGS, compose, keep_drafter, parse, serve
from tlt_server.preflight import (
    HOST,
    PORT,
    check_experts,
    check_models,
    check_named_port,
    check_port,
    check_threads,
    drafter_algorithm,
)

TARGET, DRAFTER = map(str, default_paths())
MODEL = ["--model-path", "some/model"]


def values(argv: list[str]) -> dict[str, str]:
    """Flag to the word behind it."""
    return {flag: word for flag, word in zip(argv, [*argv[1:], ""], strict=True) if flag.startswith("--")}


def test_nothing_named_serves_the_embedded_model() -> None:
    flags = values(compose(ServerConfig(), [], gpu=True))
    assert (flags["--model-path"], flags["--speculative-draft-model-path"]) == (TARGET, DRAFTER)
    assert flags["--speculative-algorithm"] == "EAGLE"
    assert [flags[f"--speculative-{name}"] for name in ("num-steps", "eagle-topk", "num-draft-tokens")] == [
        "3",
        "1",
        "4",
    ]


@pytest.mark.parametrize("named", [MODEL, ["--model", "m"], ["--model-path=m"], ["--config", "f.yaml"]])
def test_a_named_model_brings_no_drafter(named: list[str]) -> None:
    argv = compose(ServerConfig(), named, gpu=True)
    assert argv == [*named, "--enable-metrics"]


def test_a_drafter_brings_its_algorithm_and_the_arm() -> None:
    config = ServerConfig(drafter=str(eagle3_path()), arms=(Arm(5, 4, 16),))
    flags = values(compose(config, MODEL, gpu=True))
    assert flags["--speculative-algorithm"] == "EAGLE3"
    assert flags["--speculative-num-draft-tokens"] == "16"


def test_the_users_own_speculation_is_left_alone() -> None:
    own = [*MODEL, "--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", "d"]
    assert compose(ServerConfig(drafter=DRAFTER), own, gpu=True) == [*own, "--enable-metrics"]


@pytest.mark.parametrize("algorithm", ["NEXTN", "EAGLE"])
def test_without_a_drafter_it_is_the_targets_own_head(algorithm: str) -> None:
    flags = values(compose(ServerConfig(), [*MODEL, "--speculative-algorithm", algorithm], gpu=True))
    assert flags["--speculative-draft-model-path"] == flags["--model-path"]
    made = values(compose(ServerConfig(drafter=MTP), MODEL, gpu=True))
    assert (made["--speculative-algorithm"], made["--speculative-draft-model-path"]) == ("EAGLE", made["--model-path"])


def test_history_alone_loads_no_drafter() -> None:
    """By EAGLE's verification; what asks for a drafter is refused."""
    config = ServerConfig(drafter=NONE, arms=(Arm.history(7), Arm.history(3)))
    flags = values(compose(config, MODEL, gpu=True))
    assert flags["--speculative-algorithm"] == "EAGLE"
    assert "--speculative-draft-model-path" not in flags
    sizes = [flags[f"--speculative-{name}"] for name in ("num-steps", "eagle-topk", "num-draft-tokens")]
    assert sizes == ["7", "1", "8"]
    with pytest.raises(ConfigError, match="drop one of the two"):
        compose(config, [*MODEL, "--speculative-algorithm", "EAGLE"], gpu=True)
    assert compose(replace(config, speculation=False), MODEL, gpu=True) == [*MODEL, "--enable-metrics"]


def test_no_speculation() -> None:
    argv = compose(ServerConfig(drafter=DRAFTER, speculation=False), MODEL, gpu=True)
    assert not [word for word in argv if word.startswith("--speculative")]


@pytest.mark.parametrize(("kind", "algorithm"), [(DrafterKind.EAGLE, "EAGLE"), (DrafterKind.EAGLE3, "EAGLE3")])
@pytest.mark.parametrize("argv", [[], ["--model-path", TARGET], [f"--model={TARGET}"]])
def test_auto_makes_a_drafter(
    argv: list[str], kind: DrafterKind, algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = values(compose(ServerConfig(drafter=AUTO, drafter_kind=kind), argv, gpu=True))
    made = Path(flags["--speculative-draft-model-path"])
    assert flags["--speculative-algorithm"] == algorithm
    assert made.parent == tmp_path / "tlt-server/drafters"
    check_models(Path(TARGET), made)


@pytest.mark.parametrize("drafter", [AUTO, MTP])
def test_what_comes_of_the_target_needs_one_and_speculation_of_ours(
    drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="name the target by --model-path"):
        compose(ServerConfig(drafter=drafter), ["--config", "f.yaml"], gpu=True)
    with pytest.raises(ConfigError, match="drop one of the two"):
        compose(ServerConfig(drafter=drafter), [*MODEL, "--speculative-algorithm", "EAGLE"], gpu=True)
    assert compose(ServerConfig(drafter=drafter, speculation=False), MODEL, gpu=True) == [*MODEL, "--enable-metrics"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag", CPU_FLAGS)
def test_a_cpu_gets_its_flags_and_the_users_win(flag: str) -> None:
    value = CPU_FLAGS[flag]
    assert flag in compose(ServerConfig(), [], gpu=False)
    given = [flag] if value is None else [flag, "mine"]
    assert compose(ServerConfig(), given, gpu=False).count(flag) == 1
    assert flag not in compose(ServerConfig(), [], gpu=True)


@pytest.mark.slow
def test_a_drafter_whose_memory_is_released_is_kept(tmp_path: Path) -> None:
    """Wherever the flag stands."""
    file = tmp_path / "settings.yaml"
    file.write_text("enable-memory-saver: true\n")
    for words, kept in (([], False), (["--enable-memory-saver"], True), (["--config", str(file)], True)):
        server_args = parse(compose(ServerConfig(drafter=DRAFTER), ["--model-path", TARGET, *words], gpu=False))
        keep_drafter(server_args)
        assert (server_args.enable_memory_saver, server_args.enable_draft_weights_cpu_backup) == (kept, kept)


@pytest.mark.parametrize("words", [["--device", "cpu"], ["--device=cpu"]])
def test_the_cpu_beside_a_gpu_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        compose(ServerConfig(), words, gpu=True)
    assert compose(ServerConfig(), words, gpu=False)


def test_the_embedded_models_fit() -> None:
    check_models(Path(TARGET), Path(DRAFTER))
    check_models(Path(TARGET), eagle3_path())
    assert drafter_algorithm(DRAFTER) == "EAGLE"


def test_what_is_no_drafter(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        drafter_algorithm("/no/such/folder")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        drafter_algorithm(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        drafter_algorithm(str(tmp_path))


def test_a_port_that_is_not_ours() -> None:
    check_port("127.0.0.1", 0)
    with pytest.raises(ConfigError, match="Choose another with --port"):
        check_port("192.0.2.1", 30000)


def test_a_port_that_is_taken_is_told_before_all_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for argv in (["--port", port], [f"--port={port}", "--host", "127.0.0.1"]):
            with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1: .*Choose another"):
                serve(ServerConfig(), argv, Keys(), insecure=False)
        for ports in ([port, "0"], ["what"]):
            check_named_port([], ports)  # SGLang's parser has the word
    with pytest.raises(ConfigError, match="port 65536: must be below 65536"):
        check_named_port([], ["65536"])


@pytest.mark.slow
def test_where_sglang_listens_if_nothing_is_said() -> None:
    settings = parse(["--model-path", TARGET, "--device", "cpu"])
    assert (settings.host, settings.port) == (HOST, PORT)


def test_threads_are_one_number() -> None:
    check_threads("1")
    check_threads("16")
    for wrong in ("4,2", "", "0", "-1", "two"):
        with pytest.raises(ConfigError, match=f"OMP_NUM_THREADS={wrong}: give one number"):
            check_threads(wrong)


def test_a_target_without_experts_can_return_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"target {TARGET} routes to no experts. Drop the flag"):
        check_experts(TARGET)
    for config in ('{"num_experts_per_tok": 2}', '{"text_config": {"n_routed_experts": 4}}'):
        (tmp_path / "config.json").write_text(config)
        check_experts(str(tmp_path))
