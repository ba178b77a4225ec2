"""The drafters that were published, as folders: what a restarted trainer offers again and judges by.

    FOLDER/published/drafter-00000007/{config.json, model.safetensors}     as `Drafter.export` writes them

A drafter lies here before it is sent, so that no version ever names two.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, deserialize, safe_open

from tlt_server.errors import ConfigError
from tlt_server.trainer.folder import Drafter, load_drafter
from tlt_server.trainer.network import Network
from tlt_server.wire.update import Tensor

KEPT = 4
"""The one in force, the one before it, which may come back, and two on their way."""


class Edition(NamedTuple):
    """A published drafter. trained_on: target version, as the servers count. steps: of training until then."""

    version: int
    trained_on: int
    steps: int
    folder: Path

    def wired(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Its tensors and its file's metadata, for `Sender.publish`; the same bytes each time."""
        content = deserialize((self.folder / "model.safetensors").read_bytes())  # type: ignore[no-untyped-call]
        tensors = {name: Tensor(each["dtype"], tuple(each["shape"]), bytes(each["data"])) for name, each in content}
        return tensors, self.metadata()

    def metadata(self) -> dict[str, str]:
        """All that is known of it."""
        return _metadata(self.folder)


class Published:
    """All that are kept, of the trainer with this folder; nobody else writes to it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "published"

    def clear_away(self) -> None:
        """Removes what a kill has left in the middle of `add`; for the trainer itself, at its start."""
        for left in self._folder.glob(".drafter-*"):
            shutil.rmtree(left)

    def newest(self) -> Edition | None:
        """Raises:
        ConfigError: it is damaged.
        """
        folders = self._folders()
        return _edition(folders[-1]) if folders else None

    def add(self, drafter: Drafter, version: int, provenance: Mapping[str, str]) -> Edition:
        """Writes a drafter, higher in version than any before; the oldest go.

        Args:
            provenance: of its weights: trained_on and steps, and whatever else is known.
        """
        folder = self._folder / f"drafter-{version:08}"
        drafter.export(folder, {**provenance, "version": str(version)})
        for old in self._folders()[:-KEPT]:
            shutil.rmtree(old)
        return _edition(folder)

    def network(self, version: int) -> Network | None:
        """What a server that has this version in force drafts with; None where it is not kept, or was never ours."""
        folder = self._folder / f"drafter-{version:08}"
        return load_drafter(folder).network if folder.exists() else None

    def _folders(self) -> list[Path]:
        return sorted(self._folder.glob("drafter-*"))


def _edition(folder: Path) -> Edition:
    try:
        said = _metadata(folder)
        return Edition(int(said["version"]), int(said["trained_on"]), int(said["steps"]), folder)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ConfigError(f"{folder}: damaged ({error}). Remove it") from error


def _metadata(folder: Path) -> dict[str, str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return dict(sorted(file.metadata().items()))  # which come in another order each time
