"""A trainer's drafter for engines that know nothing of us: as drafter/export.py writes it."""

from pathlib import Path

from tlt_server.config import DrafterForm
from tlt_server.drafter import export as forms
from tlt_server.drafter.card import Measured
from tlt_server.drafter.export import Exported
from tlt_server.errors import ConfigError
from tlt_server.trainer import checkpoint
from tlt_server.trainer.learn.loop import AVERAGE
from tlt_server.trainer.learn.network import network
from tlt_server.trainer.publish.folder import Drafter, load_drafter
from tlt_server.trainer.publish.published import Published, metadata


def export(
    folder: Path,
    out: Path,
    *,
    checkpointed: bool = False,
    form: DrafterForm = DrafterForm.SGLANG,
    target: str | None = None,
    measured: Measured | None = None,
) -> dict[str, str]:
    """Writes the drafter that a trainer published last, or that of its last checkpoint, averaged, to a new folder.

    Returns what is known of its weights: target, trained_on (target version), steps, tokens, revision; version,
    temperature and accepted if published. Raises as `drafter.export.export`; ConfigError: there is none.
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
    exported = Exported(drafter.config, drafter.weights(), {"trained": "yes", **provenance})
    forms.export(exported, form, out, target, measured)
    return provenance
