"""What SGLang's class of a target offers to drafters, read in its source: to import it takes many seconds."""

import ast
import logging
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from tlt_server.config import DrafterKind
from tlt_server.errors import ConfigError

logger = logging.getLogger(__name__)

NEEDED = {
    DrafterKind.EAGLE: ("get_embed_and_head", "give its embedding and head away"),
    DrafterKind.EAGLE3: ("set_eagle3_layers_to_capture", "give the outputs of its middle layers away"),
}
"""A method of the target's class, and what it does."""
BOTH = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Glm4MoeForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
)
TRIED = {DrafterKind.EAGLE: (*BOTH, "Glm4ForCausalLM", "MiMoForCausalLM"), DrafterKind.EAGLE3: BOTH}
"""Targets that tests draft for (`python -m benchmarks models`)."""
UNSHOWN = {
    "linear_attention": "layers with a state in place of keys and values",
    "sliding_attention": "layers with a sliding window",
    "kv_lora_rank": "attention by latent keys and values (MLA)",
}
"""What a config.json calls attention that verification was not shown with, and what it is."""


def require_drafted(config: Mapping[str, Any], kind: DrafterKind, where: str) -> None:
    """Raises ConfigError: a target of this config.json cannot be drafted for by that kind; `where` names it."""
    require_capable(str((config.get("architectures") or [""])[0]), kind, where)
    layers = config.get("layer_types")
    found = {*(layers if isinstance(layers, list) else ()), *(name for name in UNSHOWN if config.get(name))}
    if unshown := [said for name, said in UNSHOWN.items() if name in found]:
        raise ConfigError(f"{where}: {' and '.join(unshown)} were not shown with verification. Use --no-speculation")


def require_capable(architecture: str, kind: DrafterKind, where: str) -> None:
    """Raises ConfigError: no drafter of that kind can be made for, or serve, a target of SGLang's class `architecture`;
    `where` names it."""
    if architecture in TRIED[kind]:
        return
    said = f"{where}: no {kind} drafter for {architecture or 'a target without architectures'}"
    if (models := _models()) is None:
        raise ConfigError(f"{said}: SGLang is not installed here to be asked. Known are {', '.join(TRIED[kind])}")
    if not architecture.endswith("ForCausalLM") or not any(_classes(models, architecture)):
        raise ConfigError(f"{said}: SGLang has no language model of that class. Known are {', '.join(TRIED[kind])}")
    other = next((each for each in DrafterKind if each is not kind and _offers(models, architecture, each)), None)
    if not _offers(models, architecture, kind):
        instead = f"Take an {other} drafter" if other else "Serve it with --no-speculation"
        raise ConfigError(f"{said}: SGLang's class does not {NEEDED[kind][1]} ({NEEDED[kind][0]}). {instead}")
    logger.warning("%s: %s drafters of %s are not tried yet", where, kind, architecture)


def _offers(models: Path, architecture: str, kind: DrafterKind) -> bool:
    wanted = {NEEDED[DrafterKind.EAGLE][0], NEEDED[kind][0]}
    return wanted <= {method for each in _classes(models, architecture) for method in each}


def _models() -> Path | None:
    spec = PathFinder.find_spec("sglang")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "srt" / "models"


def _classes(models: Path, name: str) -> Iterator[frozenset[str]]:
    """The methods of a class and of each that it is made from, of those in SGLang's folder of models."""
    bases, methods = _class(models, name)
    if methods:
        yield methods
    for base in bases:
        yield from _classes(models, base)


@cache
def _class(models: Path, name: str) -> tuple[tuple[str, ...], frozenset[str]]:
    """Names of its bases and methods; none where no file of the folder defines it."""
    begins = re.compile(rf"^class {re.escape(name)}\b", re.MULTILINE)
    for path in sorted(models.glob("*.py")):
        if not begins.search(text := path.read_text()):
            continue
        found = next(each for each in ast.parse(text).body if isinstance(each, ast.ClassDef) and each.name == name)
        bases = tuple(base.id for base in found.bases if isinstance(base, ast.Name))
        return bases, frozenset(each.name for each in found.body if isinstance(each, ast.FunctionDef))
    return (), frozenset()
