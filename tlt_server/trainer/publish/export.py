"""Drafters for engines that know nothing of us: releases of SGLang and vLLM load the folders as they are.

| drafter | SGLang | vLLM                                                                            |
|---------|--------|---------------------------------------------------------------------------------|
| EAGLE   | loads  | cannot: its class has no bias in `fc`, and another name in config.json          |
| EAGLE-3 | loads  | loads, by its source: a layer that the drafter reads counts by its input there, |
|         |        | one higher, under a key of its own. No test of ours runs it                     |
"""

from dataclasses import replace
from pathlib import Path

from tlt_server.drafter.published import AUX_LAYERS
from tlt_server.errors import ConfigError
from tlt_server.trainer import checkpoint
from tlt_server.trainer.learn.loop import AVERAGE
from tlt_server.trainer.learn.network import network
from tlt_server.trainer.publish.folder import Drafter, load_drafter
from tlt_server.trainer.publish.published import Published, metadata


def export(folder: Path, out: Path, *, checkpointed: bool = False) -> dict[str, str]:
    """Writes the drafter that a trainer published last, or that of its last checkpoint, averaged, to a new folder.

    Returns the file's metadata: target, trained_on (target version), steps, tokens, revision; version if published.
    Raises ConfigError: there is none, or `out` exists.
    """
    if checkpointed:
        if (saved := checkpoint.newest(folder / "checkpoints")) is None:
            raise ConfigError(f"{folder / 'checkpoints'}: no checkpoint was saved here yet")
        provenance = dict(saved.facts["provenance"])
        drafter = Drafter(network(saved.facts["config"]), saved.facts["config"])
        averaged = {name: each for name, each in saved.tensors.items() if name.startswith(AVERAGE)}
        drafter.network.load_state_dict({name.removeprefix(AVERAGE): each for name, each in averaged.items()})
    elif (edition := Published(folder).newest()) is not None:
        drafter, provenance = load_drafter(edition.folder), metadata(edition.folder)
    else:
        raise ConfigError(f"{folder}: no drafter was published here yet. --checkpoint takes the one in training")
    config = dict(drafter.config)
    if layers := (config.get("eagle_config") or {}).get(AUX_LAYERS):
        config[AUX_LAYERS] = [layer + 1 for layer in layers]  # vLLM's count; SGLang reads its own in eagle_config
    replace(drafter, config=config).export(out, provenance)
    return provenance
