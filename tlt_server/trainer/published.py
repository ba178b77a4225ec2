"""The drafters that were published, as folders: what a restarted trainer offers again and judges by.

    FOLDER/published/drafter-00000007/{config.json, model.safetensors}     as `Drafter.export` writes them

A drafter lies here before it is sent, so that no version ever names two.
"""

import shutil
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
        return tensors, _metadata(self.folder)


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
        if not folders:
            return None
        try:
            said = _metadata(folders[-1])
            return Edition(int(said["version"]), int(said["trained_on"]), int(said["steps"]), folders[-1])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ConfigError(f"{folders[-1]}: damaged ({error}). Remove it") from error

    def add(self, drafter: Drafter, target: str, version: int, trained_on: int, steps: int) -> Edition:
        """Writes a drafter for this target, higher in version than any before; the oldest go."""
        folder = self._folder / f"drafter-{version:08}"
        facts = {"version": version, "trained_on": trained_on, "steps": steps}
        drafter.export(folder, {"target": target} | {name: str(value) for name, value in facts.items()})
        for old in self._folders()[:-KEPT]:
            shutil.rmtree(old)
        return Edition(version, trained_on, steps, folder)

    def copy(self, out: Path) -> Edition:
        """Copies the newest to a folder.

        Raises:
            ConfigError: there is none, or `out` exists.
        """
        if (edition := self.newest()) is None:
            raise ConfigError(f"{self._folder}: no drafter was published here yet")
        if out.exists():
            raise ConfigError(f"{out}: exists. Remove it, or name another folder")
        shutil.copytree(edition.folder, out)
        return edition

    def network(self, version: int) -> Network | None:
        """What a server that has this version in force drafts with; None where it is not kept, or was never ours."""
        folder = self._folder / f"drafter-{version:08}"
        return load_drafter(folder).network if folder.exists() else None

    def _folders(self) -> list[Path]:
        return sorted(self._folder.glob("drafter-*"))


def _metadata(folder: Path) -> dict[str, str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return dict(sorted(file.metadata().items()))  # which come in another order each time
