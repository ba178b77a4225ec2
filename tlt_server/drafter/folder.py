"""A drafter's folder, made for a target: where it was asked for, or in a cache."""

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tlt_server import __version__
from tlt_server.config import DrafterKind
from tlt_server.drafter.config import DrafterConfig, drafter_config
from tlt_server.drafter.layout import initial_weights, most_frequent, read_counts, vocabulary_of
from tlt_server.drafter.published import Published, read
from tlt_server.drafter.target import find_target, read_tensor
from tlt_server.errors import ConfigError
from tlt_server.preflight import model_folder

logger = logging.getLogger(__name__)


def create(
    target: str,
    out: Path,
    kind: DrafterKind = DrafterKind.EAGLE,
    draft_vocab: tuple[int, Path] | None = None,
    seed: int = 0,
) -> DrafterConfig:
    """Writes a drafter that has learnt nothing to a new folder, whole or not at all.

    target: a folder, or a name on the hub. Its weights are read for a draft vocabulary alone.
    draft_vocab: how many tokens the drafter knows, the most frequent ones, by a file that says how often each token of
        the target occurs; its head starts as their rows of the target's. None: all.
    Raises ConfigError: a target that no drafter can be made for, or a folder that cannot be made.
    """
    folder, target_config = find_target(target)
    config = drafter_config(target_config, kind, draft_vocab[0] if draft_vocab else None)
    if out.exists():
        raise ConfigError(f"{out}: exists. Remove it, or name another folder")
    tensors = initial_weights(config, seed)
    if draft_vocab:
        size, counts = draft_vocab
        tokens = most_frequent(read_counts(counts, config.vocab_size), size)
        head = read_tensor(folder, "lm_head.weight", "model.embed_tokens.weight")  # the latter where they are tied
        tensors["lm_head.weight"] = head[tokens].to(tensors["lm_head.weight"])
        tensors |= vocabulary_of(tokens, config.vocab_size)
    provenance = {"trained": "no", "target": target, "seed": str(seed)}
    try:
        write(config.to_json(), tensors, provenance, out)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{out}: cannot be written ({error}). Name another folder") from error
    return config


def cached(target: str, kind: DrafterKind, cache: Path) -> Path:
    """The folder under `cache` of a drafter as `create` makes it, made unless an earlier call did.

    Targets whose drafters have the same config share one. Calls at once, of several processes, do no harm.

    Raises ConfigError: as `create`.
    """
    _, target_config = find_target(target)
    digest = hashlib.sha256(drafter_config(target_config, kind).to_json()).hexdigest()
    folder = cache / f"{kind}-{digest[:16]}"  # SGLang reads more into a path with "eagle" and "mistral" in it
    if not folder.exists():
        try:
            create(target, folder, kind)
        except ConfigError:
            if not folder.exists():  # else another process was faster
                raise
    return folder


def as_served(name: str, cache: Path) -> Path:
    """The folder of a drafter as SGLang loads it: its own, or one under `cache` that is made of it, unless an earlier
    call did. name: a folder, or a name on the hub.

    Raises ConfigError: as `published.read`.
    """
    folder = downloaded(name)
    found = read(folder)
    if not found.changed and not _is_misread(folder):
        return folder
    parts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.iterdir())]
    digest = hashlib.sha256(repr((__version__, folder.resolve(), parts)).encode()).hexdigest()
    out = cache / f"published-{digest[:16]}"
    if not out.exists():
        logger.info("drafter %s is copied as SGLang names it: %s", folder, "; ".join(found.changed) or "its path")
        try:
            write_as_served(found, out)
        except ConfigError:
            if not out.exists():  # else another process was faster
                raise
    return out


def _is_misread(folder: Path) -> bool:
    """Whether SGLang takes a folder for Mistral's own format, by the words in its path, and it is not."""
    path = str(folder).lower()
    return "eagle" in path and "mistral" in path and not (folder / "params.json").exists()


def write_as_served(found: Published, out: Path) -> None:
    """A new folder with a drafter by SGLang's names, whole or not at all. Raises ConfigError: it cannot be made."""
    if out.exists():
        raise ConfigError(f"{out}: exists. Remove it, or name another folder")
    config = json.dumps(found.config, indent=2, sort_keys=True).encode() + b"\n"
    try:
        write(config, found.tensors(), {"drafter": str(found.folder)}, out)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{out}: cannot be written ({error}). Name another folder, or make room there") from error


def downloaded(name: str) -> Path:
    """A drafter's folder, by its folder or hub name, with its weights. Raises ConfigError: there is none."""
    folder = model_folder("drafter", name)
    if Path(name).is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "pytorch_model*.bin"]))
    except (HfHubHTTPError, OSError) as error:  # the network's edge
        raise ConfigError(f"drafter {name}: the hub does not give its weights ({error})") from error


def write(
    config: bytes, tensors: dict[str, Tensor], provenance: Mapping[str, str], out: Path, card: str | None = None
) -> None:
    """config.json, model.safetensors, and README.md if there is a `card`: beside `out`, then moved there. OSError,
    SafetensorError."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        whole = Path(scratch) / "whole"
        whole.mkdir()
        (whole / "config.json").write_bytes(config)
        if card is not None:
            (whole / "README.md").write_text(card)
        made_by = {"format": "pt", "made_by": f"tlt-server {__version__}"}
        save_file(tensors, whole / "model.safetensors", metadata={**made_by, **provenance})
        whole.rename(out)
