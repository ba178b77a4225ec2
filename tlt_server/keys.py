"""The keys that clients show, and what else is secret: where it comes from, and that nobody else gets to see it.

SGLang's own code is given MASK in place of the keys: it logs its settings, answers with them, and hands them to each
process. Processes of a server read the keys from their environment, which the system shows to their user alone.
"""

import dataclasses
import json
import os
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from tlt_server.errors import ConfigError

MASK = "********"
API, ADMIN, PASSWORD = "TLT_API_KEY", "TLT_ADMIN_API_KEY", "TLT_SSL_KEYFILE_PASSWORD"
FLAGS = {"--api-key": API, "--admin-api-key": ADMIN, "--ssl-keyfile-password": PASSWORD}
"""SGLang's flags that are followed by a secret, and the variables that it is read from."""
LONGEST = 4096

_SECRET = re.compile(
    r"(^|_)(passw(or)?d|passphrase|secret|secret_id|credentials?|(api|access|account|private|auth|secret)_?key|apikey"
    r"|token|(auth|access|session|bearer|hf)_?token|authorization)$",
    re.IGNORECASE,
)
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


class Keys(NamedTuple):
    """api: of clients, for every route but health and metrics. admin: for what changes the server; None: `api`."""

    api: str | None = None
    admin: str | None = None

    def __repr__(self) -> str:
        return f"Keys(api={self.api and MASK}, admin={self.admin and MASK})"

    @classmethod
    def from_environment(cls) -> Self:
        return cls(os.environ.get(API) or None, os.environ.get(ADMIN) or None)

    @classmethod
    def read(cls, api: Path | None, admin: Path | None) -> Self:
        """From these files, else from the environment. ConfigError: both say one, or a file cannot be used."""
        given = cls.from_environment()
        for path, key, name in ((api, given.api, API), (admin, given.admin, ADMIN)):
            if path and key:
                raise ConfigError(f"{path} beside {name}, or a key on the command line: give the key once")
        return cls(read_private(api) if api else given.api, read_private(admin) if admin else given.admin)

    def to_environment(self) -> None:
        """For each process that is started from here on."""
        for name, key in ((API, self.api), (ADMIN, self.admin)):
            if key:
                os.environ[name] = key


def read_private(path: Path) -> str:
    """The line of a file that only its owner may read. ConfigError: others may, or it is not one line of text."""
    require_private(path)
    try:
        with path.open("rb") as file:
            text = file.read(LONGEST + 1).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"key file {path}: {error}") from error
    if not text or len(text) > LONGEST or not text.isprintable():
        raise ConfigError(f"key file {path}: must hold one line, the key, of at most {LONGEST} characters")
    return text


def require_private(path: Path) -> None:
    """Raises ConfigError unless it is a file that only its owner may read."""
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"key file {path}: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"key file {path}: not a file")
    if found.st_mode & 0o077:
        rights = stat.S_IMODE(found.st_mode)
        raise ConfigError(f"key file {path}: others than its owner may use it (rights {rights:o}): chmod 600 {path}")


def password() -> str | None:
    """Of the TLS key's file."""
    return os.environ.get(PASSWORD) or None


def taken_out(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """A command line without the secrets that follow FLAGS, and these by their variable."""
    kept: list[str] = []
    secrets: dict[str, str] = {}
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag not in FLAGS:
            kept.append(word)
        elif equals:
            secrets[FLAGS[flag]] = value
        elif (following := next(words, None)) is None:
            kept.append(word)
        else:
            secrets[FLAGS[flag]] = following
    return kept, secrets


def hide(argv: Sequence[str]) -> None:
    """Starts this process anew, with the secrets of the interpreter's command line, which all users of this machine
    can read, in its environment; if there are any. ConfigError: the environment has others."""
    kept, secrets = taken_out(argv)
    for name, value in secrets.items():
        if os.environ.get(name) not in (None, "", value):
            raise ConfigError(f"{name} beside a flag that says something else: give it once")
    if secrets:
        os.environ.update(secrets)
        os.execv(sys.executable, [sys.executable, *kept[1:]])


def masked(value: Any, name: str = "") -> Any:
    """The same with MASK in place of what is secret by its name, in nested maps, lists and JSON too."""
    if isinstance(value, Mapping):
        return {key: masked(each, str(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [masked(each, name) for each in value]
    if not isinstance(value, str) or not value:
        return value
    if _SECRET.search(name):
        return MASK
    try:
        return json.dumps(masked(json.loads(value))) if value.startswith("{") else _USER_IN_URL.sub(MASK, value)
    except ValueError:  # not JSON after all
        return value


def described(settings: Any) -> str:
    """A dataclass as its `repr`, with what is secret masked."""
    said = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return f"{type(settings).__name__}({', '.join(f'{name}={value!r}' for name, value in masked(said).items())})"
