"""patches/0001-bootstrap.patch: the first thing that `import sglang` does, and only where tlt-server asked for it."""

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tlt_server.fork.build import Built

pytestmark = pytest.mark.slow  # most build or install a fork

# Stands where tlt_server.seams does, and tells what was loaded when it was called.
SEAMS = (
    "import sys\ndef install():\n    print('installed after', [m for m in sys.modules if m.startswith('sglang.')])\n"
)
# The rest of sglang is not there: its first import, which follows the seam, ends the script.
SCRIPT = """
import sys
try:
    import sglang
except ModuleNotFoundError as error:
    print("then", error.name)
print([name for name in sys.modules if name.startswith("tlt_server")])
"""


@pytest.mark.parametrize(
    ("config", "printed"),
    [
        (None, ["then sglang.srt", "[]"]),
        (
            "config.toml",
            ["installed after []", "then sglang.srt", "['tlt_server', 'tlt_server.seams']"],
        ),
    ],
)
def test_the_seam_opens_only_for_tlt_server(
    fork: Built, tmp_path: Path, config: str | None, printed: list[str]
) -> None:
    with ZipFile(fork.wheel) as archive:
        archive.extract("sglang/__init__.py", tmp_path)
    seams = tmp_path / "tlt_server/seams.py"
    seams.parent.mkdir(parents=True)
    seams.write_text(SEAMS)
    (seams.parent / "__init__.py").touch()
    env = {name: value for name, value in os.environ.items() if name != "TLT_SERVER_CONFIG"}
    env |= {"PYTHONPATH": str(tmp_path)} | ({"TLT_SERVER_CONFIG": config} if config else {})
    command = [sys.executable, "-S", "-P", "-c", SCRIPT]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == printed
