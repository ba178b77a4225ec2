"""Every error that tlt-server raises on purpose, grouped by what the caller does next.

TltError                 anything of ours; its message names the value and the remedy
├── BadRequest           a client's request cannot be served: it is answered 400 with the message, which names the field
├── ConfigError          the user wrote what we cannot run: correct the flag, file or model that the message names
├── DiskFailed           something could not be written: make room where the message says; nothing half-written stays
├── DemoFailed           the demo ran, and what it found is wrong: report it, with its figures
├── RankLost             a process of a trainer of several ended: the others end too; start them again
├── ServerFailed         a server that we started ended, or never answered: its last log lines, in the message, say why
├── UnsupportedError     a combination of features that would not work: drop one of the two that the message names
├── UpdateRefused        weights that do not fit: nothing was changed; send others, the message says what is wrong
│   ├── OutOfTurn        it comes at the wrong time: ask what is active, and decide anew
│   └── TargetIncomplete a publication ended without all of the target; what it wrote is active: send the whole again
├── WireError            what a peer sent is not as agreed, or may not be sent: drop it; the message says what is wrong
└── ForkError            the fork is not installed, or could not be made: run the command that the message names
    └── PatchError       upstream's file or our patch is not what the series was written for: the message names the file

The command line prints the message alone and exits with `exit_code`; a traceback means a bug of ours.
"""

from collections.abc import Sequence


class TltError(Exception):
    """Base of all; never raised itself."""

    exit_code = 1


class BadRequest(TltError):
    """A request that is answered 400."""


class ConfigError(TltError):
    """A flag, a config file or a model that cannot be used as given."""

    exit_code = 2


class DiskFailed(TltError):
    """A checkpoint or a drafter that could not be written."""


class DemoFailed(TltError):
    """Requests of the demo failed, or speculation was not lossless."""


class RankLost(TltError):
    """A process of a trainer that runs on several GPUs is gone."""


class ServerFailed(TltError):
    """A server that we started ended early, or did not answer in time; the message ends with its last log lines."""


class UnsupportedError(TltError):
    """A combination of features that would not work, refused at start."""

    exit_code = 2


class UpdateRefused(TltError):
    """An update of weights that was not made."""


class OutOfTurn(UpdateRefused):
    """An update that another one overtook, or that is held back."""


class TargetIncomplete(UpdateRefused):
    """A publication of the target that lacks some of its tensors."""


class WireError(TltError):
    """A message or a drafter that is malformed, corrupted, or older than what the other side has."""


class ForkError(TltError):
    """The fork of SGLang is missing, wrong, or could not be built or installed."""

    exit_code = 3


class PatchError(ForkError):
    """A file of the pristine wheel, or a patch of the series, is not what it should be."""


def listed(found: Sequence[str], between: str = ", ") -> str:
    """The first three of what was found, and how many more there are."""
    return between.join(found[:3]) + (f" (and {len(found) - 3} more)" if len(found) > 3 else "")
