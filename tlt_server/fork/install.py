"""Installing the fork into an environment, so that nothing else there is replaced against the user's will."""

import subprocess
import sys
import tempfile
from collections.abc import Iterable
from email import message_from_string
from importlib.metadata import distributions
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

from tlt_server.errors import ForkError
from tlt_server.fork.build import build_fork, is_fork_wheel
from tlt_server.fork.environment import Environment, install_command, reinstall_options
from tlt_server.fork.metadata import GPU, fork_version
from tlt_server.fork.pristine import Host, require_host, require_python
from tlt_server.fork.series import load_images, load_series
from tlt_server.fork.status import Verdict, check


def install_fork(extra: str | None = None, python: Path | None = None, pristine: Path | None = None) -> bool:
    """Build the fork for an interpreter, by default the running one, of a local `pristine` wheel, and install it there.
    Returns False, without building, where it is complete already. Raises what `build_fork` and `install` raise."""
    require_host(Host.here())
    environment = Environment.of(python or Path(sys.executable))
    require_python(environment.python)
    if _complete(environment, extra):
        return False
    with tempfile.TemporaryDirectory(prefix="tlt-fork-") as scratch:
        return install(build_fork(Path(scratch), environment.python, pristine).wheel, extra, python)


def install(wheel: Path, extra: str | None = None, python: Path | None = None) -> bool:
    """Install `wheel`, which `build_fork` made, with `extra` ("gpu" or none) for the interpreter `python`.

    A torch that is there stays, whatever the index offers. Returns False where there was nothing to do. Raises
    ForkError for a wheel that is not this series' fork and for a torch that does not fit, before anything is touched,
    and where the installer fails or what it installed is not what `check` wants.
    """
    environment = Environment.of(python or Path(sys.executable))
    _refuse_wheel(wheel, environment)
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    torch = _kept_torch(environment, _requirements(metadata, extra))
    if _complete(environment, extra):
        return False
    command = install_command(environment.interpreter)
    if check(environment.path).verdict is Verdict.ALTERED:
        _run([*command, *reinstall_options(command), "--no-deps", str(wheel)])
    with tempfile.TemporaryDirectory(prefix="tlt-fork-") as scratch:
        constraints = Path(scratch) / "constraints.txt"
        constraints.write_text(torch)
        name = f"sglang[{extra}]" if extra else "sglang"
        _run([*command, "--constraint", str(constraints), f"{name} @ {wheel.resolve().as_uri()}"])
    status = check(environment.path)
    if not status.ok:
        raise ForkError(f"the installer succeeded, and yet: {status.message}")
    return True


def _complete(environment: Environment, extra: str | None) -> bool:
    """Whether the fork is there, unaltered, with everything that it asks for."""
    if not check(environment.path).ok:
        return False
    (installed, *_) = distributions(name="sglang", path=environment.path)
    return environment.satisfies(_requirements(installed.read_text("METADATA") or "", extra))


def _refuse_wheel(wheel: Path, environment: Environment) -> None:
    expected = fork_version(load_series())
    if not wheel.name.startswith(f"sglang-{expected}-") or not is_fork_wheel(wheel, load_images()):
        raise ForkError(f"{wheel} is not SGLang {expected}: make it with `tlt-server fork build`")
    tag = "cp" + environment.python.replace(".", "")
    if tag not in {each.interpreter for each in parse_wheel_filename(wheel.name)[3]}:
        raise ForkError(
            f"{wheel.name} is not for the Python {environment.python} of {environment.interpreter}: make one with"
            f" `tlt-server fork build --python {environment.python}`"
        )


def _requirements(metadata: str, extra: str | None) -> list[Requirement]:
    """What a METADATA asks for with `extra`. Raises ForkError for an extra that it does not have."""
    headers = message_from_string(metadata)
    extras = headers.get_all("Provides-Extra", [])
    if extra and extra not in extras:
        raise ForkError(f"the fork has no extra {extra!r}: it has {', '.join(sorted(extras))}")
    asked = [Requirement(line) for line in headers.get_all("Requires-Dist", [])]
    return [each for each in asked if not each.marker or each.marker.evaluate({"extra": extra or ""})]


def _kept_torch(environment: Environment, requirements: Iterable[Requirement]) -> str:
    """A constraints file's line that holds the installed torch, or nothing where there is none."""
    installed = environment.versions.get("torch")
    if installed is None:
        return ""
    for each in requirements:
        if each.name == "torch" and not environment.satisfies([each]):
            hint = f", or leave out the extra {GPU!r}" if each.marker else ""
            raise ForkError(
                f"torch {installed} is installed, but the fork needs torch{each.specifier}: install that first{hint}"
            )
    return f"torch=={installed}\n"


def _run(command: list[str]) -> None:
    """Run an installer, its output on the user's terminal: gigabytes may come."""
    done = subprocess.run(command, check=False)
    if done.returncode != 0:
        raise ForkError(f"`{' '.join(command)}` failed with exit code {done.returncode}: what it printed says why")
