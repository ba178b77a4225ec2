"""Real installations, by pip and by uv, and what `check` says before and after each.

Nothing is downloaded but uv itself: what the fork requires stands in the environments as bare metadata, and the
installers have no index, so that an attempt to replace any of it fails.
"""

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import packaging
import pytest
from packaging.requirements import Requirement

from tlt_server.errors import ForkError
from tlt_server.fork.build import Built
from tlt_server.fork.environment import Environment, find_uv, has_pip, install_command
from tlt_server.fork.install import install, install_fork
from tlt_server.fork.metadata import CORE, fork_version
from tlt_server.fork.pristine import SGLANG, fetch
from tlt_server.fork.series import load_images, load_series
from tlt_server.fork.status import Verdict, check
from tlt_server.fork.wheelfile import Entry, write_wheel

pytestmark = pytest.mark.slow  # most build or install a fork

REPOSITORY = Path(__file__).parents[2]
ENVIRON = dict(os.environ)
TORCH = "2.13.0+cpu"
PINNED = {"apache-tvm-ffi": "0.1.11", "openai": "2.6.1", "soundfile": "0.13.1", "transformers": "5.12.1"}
PINNED |= {"xgrammar": "0.2.1", "torch": TORCH}
CHECK = "from tlt_server.fork.status import check; status = check(); print(status.verdict.name, status.message)"


@dataclass
class Bare:
    """An environment that holds what the fork requires, by name, and nothing more."""

    home: Path

    def __post_init__(self) -> None:
        self.python = self.home / "bin/python"
        self.site = self.home / f"lib/python3.{sys.version_info.minor}/site-packages"

    def make(self, *, pip: bool) -> None:
        venv.create(self.home, with_pip=pip, symlinks=True)
        for line in CORE:
            name = Requirement(line).name
            self.pretend(name, PINNED.get(name, "99.0"))

    def forget(self, name: str) -> None:
        for info in self.site.glob(f"{name.replace('-', '_')}-*.dist-info"):
            shutil.rmtree(info)

    def pretend(self, name: str, version: str) -> None:
        self.forget(name)
        info = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text("")
        (info / "INSTALLER").write_text("test\n")

    def verdict(self, tmp_path: Path, *path: Path) -> tuple[str, str]:
        """What `check` says in this environment, in a process of its own: its verdict and its message."""
        libraries = tmp_path / "libraries"
        if not libraries.exists():
            libraries.mkdir()
            (libraries / "packaging").symlink_to(Path(packaging.__file__).parent)
        env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*path, REPOSITORY, libraries]))}
        done = subprocess.run([self.python, "-W", "error", "-c", CHECK], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        verdict, _, message = done.stdout.strip().partition(" ")
        return verdict, message


@pytest.fixture(autouse=True)
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    for name in ("PIP_NO_INDEX", "PIP_NO_COMPILE", "PIP_DISABLE_PIP_VERSION_CHECK", "UV_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


@pytest.fixture(scope="module")
def with_pip(tmp_path_factory: pytest.TempPathFactory) -> Bare:
    bare = Bare(tmp_path_factory.mktemp("with-pip"))
    bare.make(pip=True)
    return bare


@pytest.fixture(scope="module")
def slim(fork: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fork with none but its changed files: the same to an installer that is slow with four thousand."""
    wheel = tmp_path_factory.mktemp("slim") / fork.wheel.name
    info = f"sglang-{fork.version}.dist-info"
    with ZipFile(fork.wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith(info)} - {f"{info}/RECORD"} | set(load_images())
        write_wheel(wheel, info, [Entry(name, archive.read(name)) for name in names])
    return wheel


@pytest.fixture
def uv(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """uv on PATH: the machine's own, or one that is installed once into pytest's cache."""
    if shutil.which("uv") is None:
        kept = pytestconfig.cache.mkdir("uv")
        if not (kept / "bin/uv").is_file():
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(kept), "uv"]
            subprocess.run(command, env=ENVIRON, check=True)
        monkeypatch.setenv("PATH", f"{kept / 'bin'}{os.pathsep}{os.environ['PATH']}")


def test_a_life_with_pip(with_pip: Bare, fork: Built, slim: Path, tmp_path: Path) -> None:
    verdict, message = with_pip.verdict(tmp_path)
    assert (verdict, message.endswith(": run `tlt-server fork install`")) == ("MISSING", True)

    assert install(slim, python=with_pip.python)
    assert with_pip.verdict(tmp_path) == ("OURS", f"SGLang {fork.version} is installed")
    assert Environment.of(with_pip.python).versions["torch"] == TORCH
    before = sorted(with_pip.site.iterdir()), (with_pip.site / "sglang").stat().st_ctime_ns
    assert not install(slim, python=with_pip.python)
    assert not install_fork(python=with_pip.python)  # without a build, hence without an index
    assert (sorted(with_pip.site.iterdir()), (with_pip.site / "sglang").stat().st_ctime_ns) == before

    other = tmp_path / "checkout"
    (other / "sglang").mkdir(parents=True)
    (other / "sglang/__init__.py").touch()
    verdict, message = with_pip.verdict(tmp_path, other)
    assert (verdict, str(other) in message) == ("SHADOWED", True)


@pytest.mark.usefixtures("uv")
def test_a_life_with_uv(slim: Path, pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    bare = Bare(tmp_path / "with-uv")
    bare.make(pip=False)
    assert not has_pip(bare.python)
    assert install(slim, python=bare.python)
    assert bare.verdict(tmp_path)[0] == "OURS"

    altered = bare.site / next(iter(load_images()))
    with altered.open("ab") as file:  # in place, hence in uv's cache too
        file.write(b"# a quick fix\n")
    verdict, message = bare.verdict(tmp_path)
    assert (verdict, str(altered) in message) == ("ALTERED", True)
    assert install(slim, python=bare.python)
    assert bare.verdict(tmp_path)[0] == "OURS"

    command = [*install_command(bare.python), "--quiet", "--no-deps", str(pristine)]
    subprocess.run(command, check=True)  # what `pip install -U sglang` does
    verdict, message = bare.verdict(tmp_path)
    assert verdict == "UPSTREAM"
    assert message.startswith("SGLang 0.5.17 is not")
    assert message.endswith(": run `tlt-server fork install`")

    assert install_fork(python=bare.python, pristine=pristine)
    assert bare.verdict(tmp_path)[0] == "OURS"
    assert Environment.of(bare.python).versions["torch"] == TORCH
    assert not install_fork(python=bare.python)


def test_a_torch_that_is_there_stays(
    with_pip: Bare, slim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a missing requirement has a newest version that wants another torch, an older one is taken."""
    for name, version, requires in [
        ("torch", "2.14.0", ""),
        ("torchvision", "0.29.0", "Requires-Dist: torch==2.14.0\n"),
        ("torchvision", "0.28.0", "Requires-Dist: torch==2.13.0\n"),
    ]:
        info = f"{name}-{version}.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"
        wheel = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        entries = [Entry(f"{info}/METADATA", metadata.encode()), Entry(f"{info}/WHEEL", wheel.encode())]
        write_wheel(tmp_path / f"{name}-{version}-py3-none-any.whl", info, entries)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with_pip.forget("torchvision")
    assert install(slim, python=with_pip.python)
    versions = Environment.of(with_pip.python).versions
    assert (versions["torch"], versions["torchvision"]) == (TORCH, "0.28.0")


@pytest.mark.parametrize(
    ("version", "verdict", "words"),
    [
        ("0.5.17", Verdict.UPSTREAM, "SGLang 0.5.17 is not"),
        ("0.5.23", Verdict.UPSTREAM, "SGLang 0.5.23 is not"),
        ("0.5.17+tlt.a00000000", Verdict.OTHER_SERIES, "0.5.17+tlt.a00000000 was built from other patches"),
        (fork_version(load_series()), Verdict.ALTERED, "sglang/__init__.py is not the file"),
    ],
)
def test_metadata_alone_decides_what_it_can(tmp_path: Path, version: str, verdict: Verdict, words: str) -> None:
    bare = Bare(tmp_path)
    bare.site.mkdir(parents=True)
    bare.pretend("sglang", version)
    status = check([str(bare.site)])
    assert (status.verdict, status.installed, status.ok) == (verdict, version, False)
    assert words in status.message
    assert fork_version(load_series()) in status.message
    assert "\n" not in status.message
    assert status.message.endswith("run `tlt-server fork install`")


def test_what_does_not_fit_is_refused_before_anything_is_touched(
    with_pip: Bare, fork: Built, pristine: Path, tmp_path: Path
) -> None:
    other_python = tmp_path / fork.wheel.name.replace(f"cp3{sys.version_info.minor}", "cp399")
    shutil.copy(fork.wheel, other_python)
    altered = tmp_path / fork.wheel.name
    altered.write_bytes(fork.wheel.read_bytes()[:-100])
    before = sorted(with_pip.site.iterdir())
    for wheel, extra, words in [
        (pristine, None, "make it with `tlt-server fork build`"),
        (tmp_path / "none.whl", None, r"none\.whl is not SGLang"),
        (altered, None, "is not SGLang"),
        (other_python, None, "is not for the Python 3"),
        (fork.wheel, "gqu", "no extra 'gqu': it has all, .*gpu"),
        (fork.wheel, "gpu", r"torch 2\.13\.0\+cpu is installed, but the fork needs torch==2\.11\.0: .*leave out"),
    ]:
        with pytest.raises(ForkError, match=words):
            install(wheel, extra, with_pip.python)
    with pytest.raises(ForkError, match="is not a Python that runs"):
        install(fork.wheel, python=tmp_path / "python")
    with_pip.pretend("torch", "2.10.0")
    with pytest.raises(ForkError, match=r"torch 2\.10\.0 is installed, but the fork needs torch>=2\.11: install that"):
        install(fork.wheel, python=with_pip.python)
    with_pip.pretend("torch", TORCH)
    assert sorted(with_pip.site.iterdir()) == before


def test_an_installer_that_fails_is_reported(with_pip: Bare, slim: Path) -> None:
    with_pip.forget("loguru")
    with pytest.raises(ForkError, match=r"-m pip install .* failed with exit code 1"):
        install(slim, python=with_pip.python)
    with_pip.pretend("loguru", "99.0")


def test_an_environment_with_neither_installer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ForkError, match=r"has no pip and there is no uv on PATH: run .* -m ensurepip"):
        find_uv(tmp_path / "python")


def test_the_pristine_wheel_is_downloaded(
    fork: Built, pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From an index that has our fork too, which `==0.5.17` would match and prefer."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    python = f"3.{sys.version_info.minor}"
    with pytest.raises(ForkError, match=r"could not download .*--wheel(.|\n)*No matching distribution"):
        fetch(SGLANG, python, None, tmp_path)
    for wheel, name in ((fork.wheel, fork.wheel.name), (pristine, SGLANG.wheel_name(python))):
        (index / name).symlink_to(wheel)
    got = fetch(SGLANG, python, None, tmp_path)
    assert (got.parent, got.read_bytes()) == (tmp_path, pristine.read_bytes())


def test_the_command_for_those_who_write_patches(tmp_path: Path) -> None:
    wheel = tmp_path / "other.whl"
    wheel.write_bytes(b"")
    command = [sys.executable, "-m", "tlt_server.fork.refresh", str(wheel)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (ForkError.exit_code, "")
    assert done.stderr.startswith(f"error: {wheel} has sha256 e3b0c44298fc")
