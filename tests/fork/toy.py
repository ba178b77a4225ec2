"""A release of three small modules and a series of three patches, shaped like the real ones."""

import shutil
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from tlt_server.fork.build import Built, build_fork
from tlt_server.fork.pristine import Release, this_python
from tlt_server.fork.refresh import refresh
from tlt_server.fork.series import sha256

VERSION = "__version__ = version = '0.5.17'\n__version_tuple__ = version_tuple = (0, 5, 17)\n"
METADATA = "Metadata-Version: 2.4\nName: sglang\nVersion: 0.5.17\nRequires-Dist: torch==2.11.0\n\nA toy.\n"
ALPHA = "#!/usr/bin/env python\n" + "".join(f"a{i} = {i}\n" for i in range(30))
FILES = {
    "sglang/_version.py": VERSION,
    "sglang/alpha.py": ALPHA,
    "sglang/beta.py": "b = 1\n",
    "sglang/data.txt": "1\n",
    "sglang-0.5.17.dist-info/METADATA": METADATA,
    "sglang-0.5.17.dist-info/RECORD": "stale",
}
HEADER = "Subject: s\nWhy: w\n and why\nSeam: m:f\nTest: t.py::t\n\n"


def diff(path: str, hunk: str, extended: str = "") -> str:
    """A git diff of one hunk."""
    old, new = ("/dev/null" if "new file" in extended else f"a/{path}"), f"b/{path}"
    return f"diff --git a/{path} b/{path}\n{extended}--- {old}\n+++ {new}\n{hunk}"


PATCHES = {
    "0001-one.patch": diff("sglang/alpha.py", "@@ -9,3 +9,4 @@\n a7 = 7\n a8 = 8\n+seam = 8\n a9 = 9\n"),
    "0002-two.patch": diff("sglang/alpha.py", "@@ -21,3 +22,3 @@\n a19 = 19\n-a20 = 20\n+a20 = 0\n a21 = 21\n"),
    "0003-new.patch": diff("sglang/new.py", "@@ -0,0 +1 @@\n+n = 1\n", "new file mode 100644\n"),
}


@dataclass
class Toy:
    """Writes itself under `home`; `build` treats whatever stands there as the release."""

    home: Path
    scratch: Path
    files: dict[str, str | bytes] = field(default_factory=lambda: dict(FILES))

    def __post_init__(self) -> None:
        self.root, self.wheel, self.out = self.home / "patches", self.home / "pristine.whl", self.home / "out"
        self.root.mkdir()
        for name, content in PATCHES.items():
            self.patch(name, content)
        (self.root / "series").write_text("# order\n" + "\n".join(PATCHES) + "\n")
        self.pack()
        self.refresh()

    def patch(self, name: str, content: str) -> None:
        (self.root / name).write_text(HEADER + content)

    def pack(self) -> None:
        """Write the wheel anew from `files`."""
        with zipfile.ZipFile(self.wheel, "w") as archive:
            for path, content in self.files.items():
                archive.writestr(path, content)

    @property
    def release(self) -> Release:
        """The release whose pristine wheel is the one that lies there now."""
        return Release("0.5.17", {this_python(): sha256(self.wheel.read_bytes())})

    def refresh(self) -> None:
        refresh(self.root, self.wheel, self.release)

    def build(self, release: Release | None = None) -> Built:
        return build_fork(self.out, wheel=self.wheel, root=self.root, release=release or self.release)

    def assert_nothing_left(self) -> None:
        assert not self.out.exists() or not list(self.out.iterdir())
        assert not list(self.scratch.iterdir())

    def clear(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
