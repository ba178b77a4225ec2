"""The real pristine wheel and the fork made of it, once per session; and a toy release for all that can go wrong."""

import os
from pathlib import Path

import pytest

from tests.fork.toy import Toy
from tlt_server.fork.build import Built, build_fork
from tlt_server.fork.pristine import SGLANG, fetch, this_python


@pytest.fixture(scope="session")
def pristine(pytestconfig: pytest.Config) -> Path:
    """Upstream's wheel for this Python: TLT_PRISTINE_WHEEL, or downloaded once and kept in pytest's cache."""
    cache = pytestconfig.cache.mkdir("pristine")
    kept = cache / SGLANG.wheel_name(this_python())
    named = os.environ.get("TLT_PRISTINE_WHEEL")
    return fetch(SGLANG, this_python(), Path(named) if named else kept if kept.is_file() else None, cache)


@pytest.fixture(scope="session")
def fork(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_fork(tmp_path_factory.mktemp("fork"), wheel=pristine)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    """A toy release, with every temporary file of the test under its own `scratch`."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    return Toy(tmp_path, scratch)
