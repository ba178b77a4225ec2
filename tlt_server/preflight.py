"""Checks that take milliseconds and spare the user a minute of loading and a traceback."""

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tlt_server import files
from tlt_server.errors import ConfigError

HOST, PORT = "127.0.0.1", 30000
"""Where SGLang listens if nothing is said."""


def read_config(model: Path) -> Mapping[str, Any]:
    """A local model folder's config.json. ConfigError: no such folder, none in it, or not a JSON object."""
    if not model.is_dir():
        raise ConfigError(f"model {model}: no such folder")
    path = model / "config.json"
    try:
        return files.read_object(path)
    except FileNotFoundError as error:
        raise ConfigError(f"model {model}: it has no config.json, so it is not a model's folder") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def drafter_algorithm(drafter: str) -> str:
    """`EAGLE` or `EAGLE3`, by the architecture in the config.json of a folder or hub name. ConfigError: neither."""
    architecture = str((read_config(model_folder("drafter", drafter)).get("architectures") or ["none"])[0])
    if "eagle3" in architecture.lower():
        return "EAGLE3"
    if "eagle" in architecture.lower():
        return "EAGLE"
    raise ConfigError(f"drafter {drafter}: its architecture, {architecture}, is neither EAGLE's nor EAGLE-3's")


def model_folder(role: str, name: str) -> Path:
    """The folder of a model's config.json, downloaded if `name` is the hub's. ConfigError, with `role`: neither."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(hf_hub_download(name, "config.json")).parent
    except HFValidationError as error:
        raise ConfigError(f"{role} {name}: no such folder, and not a name on the hub") from error
    except (HfHubHTTPError, OSError) as error:  # the network's edge
        raise ConfigError(f"{role} {name}: no such folder, and the hub does not give it ({error})") from error


def check_models(target: Path, drafter: Path) -> None:
    """Raises ConfigError for a damaged weight file, or a drafter made for another target; hub names pass."""
    for model in (target, drafter):
        if model.is_dir():
            _check_weights(model)
    if not (target.is_dir() and drafter.is_dir()):
        return
    check_fit(str(target), read_config(target), str(drafter), read_config(drafter))


def read_model_config(role: str, name: str) -> Mapping[str, Any]:
    """The config.json of a folder or hub name. Raises ConfigError, with `role`: there is none."""
    return read_config(model_folder(role, name))


def check_fit(target: str, ours: Mapping[str, Any], drafter: str, theirs: Mapping[str, Any]) -> None:
    """Raises ConfigError: the drafter of one config.json was made for another target than that of the other."""
    pairs = {
        "hidden_size": (ours.get("hidden_size"), theirs.get("target_hidden_size", theirs.get("hidden_size"))),
        "vocab_size": (ours.get("vocab_size"), theirs.get("vocab_size")),
    }
    for name, (wanted, found) in pairs.items():
        if None not in (wanted, found) and wanted != found:
            raise ConfigError(
                f"drafter {drafter} does not fit target {target}: {name} is {found}, the target's is {wanted}. "
                "Use the drafter that was trained for this target"
            )


def check_experts(target: str) -> None:
    """Raises ConfigError: a target, a folder or hub name, whose config.json speaks of no experts."""
    config = read_model_config("target", target)
    if not any("expert" in name for name in {**config, **(config.get("text_config") or {})}):
        raise ConfigError(f"--enable-return-routed-experts: target {target} routes to no experts. Drop the flag")


def _check_weights(model: Path) -> None:
    """Opens every weight file: its header is parsed and compared with the file's length, no tensor is read."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(model.glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: damaged or incomplete ({error}). Copy or download it again") from error


def check_port(host: str, port: int) -> None:
    """Raises ConfigError for a port that is in use, or not ours to take."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OverflowError as error:
            raise ConfigError(f"port {port}: must be below 65536") from error
        except OSError as error:
            raise ConfigError(f"port {port} on {host}: {error.strerror}. Choose another with --port") from error


def check_named_port(hosts: Sequence[str], ports: Sequence[str]) -> None:
    """As `check_port`, by what `--host` and `--port` of SGLang were given; what is no number, or several, it judges."""
    hosts, ports = hosts or [HOST], ports or [str(PORT)]
    if len(hosts) == len(ports) == 1 and ports[0].isdecimal():
        check_port(hosts[0], int(ports[0]))


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach what listens at `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def unkeyed(host: str, *, keyed: bool) -> str | None:
    """What is wrong where other machines reach what listens at `host`, and need show no key; None: nothing."""
    if is_loopback(host) or keyed:
        return None
    return (
        f"--host {host} lets other machines in, and no key is asked for. Give TLT_API_KEY or --api-key-file FILE, "
        "or take --host 127.0.0.1"
    )


def check_place(host: str, port: int, *, keyed: bool, insecure: bool) -> None:
    """Raises ConfigError: others could use what is to listen there, unless `insecure`; or the port is not to be had."""
    refuse([unkeyed(host, keyed=keyed)], insecure=insecure)
    check_port(host, port)


def refuse(faults: Sequence[str | None], *, insecure: bool) -> None:
    """Raises ConfigError, with all ways in that were found, unless `insecure`."""
    if (found := [fault for fault in faults if fault]) and not insecure:
        raise ConfigError(f"{'; '.join(found)}. On a network that you trust with all of this machine: --insecure")


def check_exposure(settings: Any, *, keyed: bool, insecure: bool) -> None:
    """Raises ConfigError where SGLang's settings let others in, unless `insecure`: what is open, and what closes it."""
    local = is_loopback(settings.host)
    grpc = bool(settings.grpc_port or settings.smg_grpc_mode or settings.grpc_mode)
    spread = settings.nnodes > 1 or settings.disaggregation_mode != "null" or settings.encoder_only
    openings = [
        ("gRPC asks for no key: drop its flags, or take --host 127.0.0.1 without a key", grpc and (keyed or not local)),
        (
            "SGLang's processes on several machines (--nnodes, --disaggregation-mode, --encoder-only) run what they "
            "are sent, by whoever can reach their ports",
            spread,
        ),
        (
            "--enable-custom-logit-processor runs code that requests bring: drop it",
            bool(settings.enable_custom_logit_processor),
        ),
    ]
    open_to = [fault for fault, there in openings if there]
    refuse([unkeyed(settings.host, keyed=keyed), *open_to], insecure=insecure)


def check_threads(threads: str) -> None:
    """Raises ConfigError unless OMP_NUM_THREADS is one number; OpenMP takes a list, one for each level of nesting."""
    if not threads.isdecimal() or int(threads) < 1:
        raise ConfigError(f"OMP_NUM_THREADS={threads}: give one number of threads, at least 1, or unset it for 1")
