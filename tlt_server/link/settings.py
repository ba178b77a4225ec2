"""What the link's process is told, checked in the server's before anything is loaded."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from tlt_server.config import Trainer
from tlt_server.drafter import header
from tlt_server.errors import ConfigError
from tlt_server.wire.addresses import CurveKeys
from tlt_server.wire.messages import READS_TO_SERVER, ModelIdentity
from tlt_server.wire.receiver import lock_folder
from tlt_server.wire.sockets import Link, Outlet

MEMORY = Path("/dev/shm")
DRAFTERS_KEPT = 3
"""At most one whole and one arriving; a third for who else uses the memory."""
UNKNOWN_BYTES = 2 << 30
"""Of a drafter that is not in a folder here."""


class LinkSettings(NamedTuple):
    """All that the link needs to know.

    url, api_key, admin_key: of the server, SGLang's.
    address, name, curve, model: of the link: where the trainer is, who this server is, what its drafters must fit.
    folder: where drafters arrive, this server's alone. most: bytes that one may have.
    """

    url: str
    api_key: str | None
    admin_key: str | None
    address: str
    name: str
    curve: CurveKeys | None
    model: ModelIdentity
    folder: Path
    most: int | None = None


def settle(
    trainer: Trainer, url: str, api_key: str | None, admin_key: str | None, model: ModelIdentity, drafter: Path
) -> LinkSettings:
    """The link's settings, once it is sure that a link can be made of them.

    Args:
        trainer: as it was configured.
        url: where the server will answer.
        drafter: the one that the server starts with; those to come are as large.

    Raises:
        ConfigError: the address, a key or the folder cannot be used.
    """
    place = urlsplit(url).netloc
    name = trainer.name_of(urlsplit(url).port or 0)
    curve = CurveKeys(Path(trainer.key), Path(trainer.trainer_key)) if trainer.key and trainer.trainer_key else None
    folder = Path(trainer.folder) if trainer.folder else _folder_for(place, drafter)
    Link(trainer.address, READS_TO_SERVER, name, curve).close()
    Outlet(trainer.features_address, curve).close()
    os.close(lock_folder(folder))
    with contextlib.suppress(OSError):  # what was left there is for the receiver
        folder.rmdir()
    return LinkSettings(url, api_key, admin_key, trainer.address, name, curve, model, folder, _most_bytes(drafter))


def _most_bytes(drafter: Path) -> int:
    """Of a drafter of the same names and shapes, in whatever dtype."""
    try:
        found = sum(header.nbytes(path) for path in drafter.glob("*.safetensors"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"drafter {drafter}: damaged or incomplete ({error}). Copy or download it again") from error
    return found + header.MOST_HEADER if found else UNKNOWN_BYTES


def _folder_for(place: str, drafter: Path) -> Path:
    """Memory, where the drafters fit: a disk would write what is read once. The name is of the place where the server
    answers, so that the next one there clears away what one that was killed together with its link has left."""
    size = sum(file.stat().st_size for file in drafter.glob("*.safetensors")) or UNKNOWN_BYTES
    fits = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > DRAFTERS_KEPT * size
    folder = (MEMORY if fits else Path(tempfile.gettempdir())) / f"tlt-drafters-{os.getuid()}-{place}"
    if folder.exists() and folder.lstat().st_uid != os.getuid():
        raise ConfigError(f"drafter folder {folder} is another user's: name one, in [trainer] of a --tlt-config file")
    return folder
