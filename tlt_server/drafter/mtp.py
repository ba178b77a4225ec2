"""MTP heads: drafters that are a part of the target's checkpoint, trained and published with it."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tlt_server import files
from tlt_server.drafter import header
from tlt_server.errors import ConfigError
from tlt_server.preflight import model_folder, read_config

HEADS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "MiMoForCausalLM": lambda _: "model.mtp_layers.0.",
    "Glm4MoeForCausalLM": lambda config: f"model.layers.{config.get('num_hidden_layers')}.",
}
"""Targets whose heads are tested here, by architecture, and what their head's tensors are called by."""


COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""Ends of names, of what a head's part of a checkpoint repeats of the target's, which is served in its place."""


def own_names(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Those of a checkpoint's names that are its MTP head's own. config: its config.json."""
    prefix = HEADS[str(config["architectures"][0])](config)
    return [name for name in names if name.startswith(prefix) and not name.endswith(COPIES)]


def require_head(target: str) -> None:
    """Raises ConfigError: the target, a folder or hub name, carries no MTP head that can draft here, and why not."""
    folder = model_folder("target", target)
    config = read_config(folder)
    architecture = str((config.get("architectures") or ["none"])[0])
    if architecture not in HEADS:
        raise ConfigError(
            f"target {target}: MTP heads are tested of {' and '.join(HEADS)} alone, and it is {architecture}. "
            "Give an EAGLE drafter, or --no-speculation"
        )
    if (heads := config.get("num_nextn_predict_layers")) != 1:
        raise ConfigError(
            f"target {target}: its config.json has num_nextn_predict_layers {heads}, where one MTP head is served. "
            "Give an EAGLE drafter, or --no-speculation"
        )
    paths = sorted(folder.glob("*.safetensors"))
    if paths and not own_names(config, (name for path in paths for name in _names(path))):
        raise ConfigError(
            f"target {target}: its config.json names an MTP head, and its weights hold no {HEADS[architecture](config)}"
            "*: whoever saved it left the head out. Take the published checkpoint, or give an EAGLE drafter"
        )


def _names(path: Path) -> list[str]:
    try:
        with files.regular(path) as (file, size):
            return list(header.of(file, size)[0])
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: damaged or incomplete ({error}). Copy or download it again") from error
