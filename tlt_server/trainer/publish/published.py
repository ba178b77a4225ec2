"""The drafters that were published, as folders: what a restarted trainer offers again and judges by.

    FOLDER/published/drafter-00000007/{config.json, model.safetensors}     as `Drafter.export` writes them

A drafter lies here before it is sent, so that no version ever names two.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from tlt_server import files
from tlt_server.errors import ConfigError
from tlt_server.trainer.learn.network import Network
from tlt_server.trainer.publish.folder import Drafter, load_drafter

FILE = "model.safetensors"

MOST_BYTES = 64 << 30
"""Of a drafter's file; ten times what the largest has."""

MOST_VERSION = 1 << 53
"""As messages hold them."""

KEPT = 4
"""The active one, the one before it, which may come back, and two on their way."""


class Edition(NamedTuple):
    """A published drafter. trained_on: target version, as the servers count. steps: of training until then."""

    version: int
    trained_on: int
    steps: int
    folder: Path

    def file(self) -> bytes:
        """For `Sender.publish`. ConfigError: it is damaged."""
        metadata(self.folder)
        try:
            return files.read(self.folder / FILE, MOST_BYTES)
        except OSError as error:
            raise _damaged(self.folder, error) from error


class Published:
    """All that are kept, of the trainer with this folder, which alone writes to it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "published"

    def clear_away(self) -> None:
        """Removes what a kill has left in the middle of `add`; for the trainer itself, at its start."""
        for left in self._folder.glob(".drafter-*"):
            shutil.rmtree(left)

    def newest(self) -> Edition | None:
        """ConfigError: it is damaged."""
        folders = self._folders()
        return _edition(folders[-1]) if folders else None

    def add(self, drafter: Drafter, version: int, provenance: Mapping[str, str]) -> Edition:
        """Writes a drafter, higher in version than any before; the oldest go. DiskFailed: it cannot be written.
        provenance: of its weights: trained_on and steps, and whatever else is known."""
        folder = self._folder / f"drafter-{version:08}"
        drafter.export(folder, {**provenance, "version": str(version)})
        for old in self._folders()[:-KEPT]:
            shutil.rmtree(old)
        return _edition(folder)

    def network(self, version: int) -> Network | None:
        """That of a version; None where it is not kept, or was never ours. ConfigError: it is damaged."""
        folder = self._folder / f"drafter-{version:08}"
        return load_drafter(folder).network if folder.exists() else None

    def _folders(self) -> list[Path]:
        found = self._folder.glob("drafter-*")
        return sorted(found, key=lambda path: (len(path.name), path.name))  # by number, however many digits it has


def _edition(folder: Path) -> Edition:
    said = metadata(folder)
    try:
        version, trained_on, steps = (int(said[name]) for name in ("version", "trained_on", "steps"))
        if not 0 < version < MOST_VERSION or not 0 <= trained_on < MOST_VERSION or steps < 0:
            raise ValueError(f"version {version}, trained on {trained_on}")
    except (KeyError, ValueError) as error:
        raise _damaged(folder, error) from error
    return Edition(version, trained_on, steps, folder)


def metadata(folder: Path) -> dict[str, str]:
    """All that is known of a drafter in a folder. ConfigError: it is damaged."""
    try:
        with files.regular(folder / FILE), safe_open(folder / FILE, framework="pt") as file:
            return dict(sorted((file.metadata() or {}).items()))  # which come in another order each time
    except (OSError, SafetensorError) as error:
        raise _damaged(folder, error) from error


def _damaged(folder: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{folder}: damaged ({error}). Remove it")
