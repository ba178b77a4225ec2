"""The wheel that comes out: upstream's but for what we say we change, the same every time, whole or not there."""

import base64
import csv
import hashlib
import io
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from tests.fork.toy import PATCHES, Toy
from tlt_server.fork.build import Built, build_fork, notice
from tlt_server.fork.metadata import CORE, fork_version
from tlt_server.fork.patching import mark
from tlt_server.fork.series import Patch, Series, load_images, load_series

pytestmark = pytest.mark.slow  # most build or install a fork

REPOSITORY = Path(__file__).parents[2]


def contents(wheel: Path) -> dict[str, bytes]:
    with ZipFile(wheel) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist() if not info.is_dir()}


@pytest.fixture(scope="module")
def files(fork: Built) -> dict[str, bytes]:
    return contents(fork.wheel)


@pytest.fixture(scope="module")
def upstream(pristine: Path) -> dict[str, bytes]:
    return contents(pristine)


def test_its_name_says_what_it_is(fork: Built) -> None:
    name, version, _, tags = parse_wheel_filename(fork.wheel.name)
    assert (name, str(version)) == ("sglang", fork.version)
    assert fork.version == fork_version(load_series())
    assert {str(tag) for tag in tags} == {
        f"cp3{sys.version_info.minor}-cp3{sys.version_info.minor}-manylinux_2_34_x86_64"
    }


def test_nothing_else_changed(fork: Built, files: dict[str, bytes], upstream: dict[str, bytes]) -> None:
    ours = {path.replace(f"-{fork.version}.dist", "-0.5.17.dist"): content for path, content in files.items()}
    info = "sglang-0.5.17.dist-info"
    named = {*load_images(), "sglang/_version.py", f"{info}/METADATA", f"{info}/RECORD", f"{info}/licenses/NOTICE"}
    assert {path for path in ours.keys() | upstream.keys() if ours.get(path) != upstream.get(path)} == named
    assert ours[f"{info}/licenses/NOTICE"] == (REPOSITORY / "NOTICE").read_bytes()


def test_every_changed_file_says_so(files: dict[str, bytes]) -> None:
    for path in load_images():
        changed_by = [p.name for p in load_series().patches if f"+++ b/{path}\n".encode() in p.content]
        assert f"# Modified by tlt-server ({', '.join(changed_by)})" in files[path].decode().split("\n\n", 1)[0]
        compile(files[path], path, "exec")
    assert files["sglang/_version.py"].startswith(b"# Modified by tlt-server (its version)")


def test_its_version_is_what_sglang_reports(fork: Built, files: dict[str, bytes]) -> None:
    names: dict[str, object] = {}
    exec(files["sglang/_version.py"], names)
    assert names["__version__"] == names["version"] == fork.version
    assert names["__version_tuple__"] == (0, 5, 17, fork.version.partition("+")[2])


def test_record_lists_every_file_with_its_hash(fork: Built, files: dict[str, bytes]) -> None:
    record = f"sglang-{fork.version}.dist-info/RECORD"
    rows = {path: (digest, size) for path, digest, size in csv.reader(io.StringIO(files[record].decode()))}
    assert rows.keys() == files.keys()
    assert rows.pop(record) == ("", "")
    for path, (digest, size) in rows.items():
        wanted = base64.urlsafe_b64encode(hashlib.sha256(files[path]).digest()).decode().rstrip("=")
        assert (digest, int(size)) == (f"sha256={wanted}", len(files[path])), path


def headers(files: dict[str, bytes]) -> Message:
    (path,) = (path for path in files if path.endswith(".dist-info/METADATA"))
    return Parser().parsestr(files[path].decode())


def test_metadata_is_valid(fork: Built, files: dict[str, bytes]) -> None:
    raw = files[f"sglang-{fork.version}.dist-info/METADATA"]
    metadata = Metadata.from_email(raw, validate=True)
    assert metadata.version == Version(fork.version)
    assert metadata.license_files == ["LICENSE", "NOTICE"]
    assert "gpu" in (metadata.provides_extra or [])


def required(files: dict[str, bytes]) -> list[str]:
    return headers(files).get_all("Requires-Dist", [])


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_the_extra_gpu_is_upstreams_core(
    files: dict[str, bytes], upstream: dict[str, bytes], machine: str, system: str
) -> None:
    def asked(lines: list[str], extra: str) -> list[str]:
        where = {"platform_machine": machine, "sys_platform": system, "extra": extra}
        found = [Requirement(line) for line in lines]
        return [str(each).partition(";")[0] for each in found if each.marker is None or each.marker.evaluate(where)]

    assert asked([line for line in required(files) if '"gpu"' in line], "gpu") == asked(required(upstream), "")
    assert asked([line for line in required(files) if '"gpu"' in line], "") == []


def test_the_other_extras_are_upstreams(files: dict[str, bytes], upstream: dict[str, bytes]) -> None:
    def extras(lines: list[str]) -> list[str]:
        return [line for line in lines if "extra ==" in line and '"gpu"' not in line]

    assert extras(required(files)) == extras(required(upstream))
    names = headers(files).get_all("Provides-Extra", [])
    assert sorted(names) == sorted(["gpu", *headers(upstream).get_all("Provides-Extra", [])])


def test_the_core_asks_for_what_upstream_asks_where_it_does(
    files: dict[str, bytes], upstream: dict[str, bytes]
) -> None:
    theirs = {Requirement(line).name: line for line in required(upstream) if ";" not in line}
    core = [line for line in required(files) if ";" not in line]
    assert [Requirement(line).name for line in core] == [Requirement(line).name for line in CORE]
    for line in core:
        name = Requirement(line).name
        assert line == ("torch>=2.11" if name == "torch" else theirs.get(name, name))


def test_the_same_inputs_give_the_same_bytes(fork: Built, pristine: Path, tmp_path: Path) -> None:
    again = build_fork(tmp_path / "deep" / "er", wheel=pristine)
    assert again.fresh
    assert again.wheel.read_bytes() == fork.wheel.read_bytes()


def test_a_finished_wheel_is_found(toy: Toy) -> None:
    first = toy.build()
    made = first.wheel.stat().st_mtime_ns
    release = toy.release
    toy.wheel.unlink()  # a second build needs nothing but the patches
    second = toy.build(release)
    assert (first.fresh, second.fresh) == (True, False)
    assert (second.wheel, second.wheel.stat().st_mtime_ns) == (first.wheel, made)
    assert [path.name for path in toy.out.iterdir()] == [first.wheel.name]


BREAKAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[:-30],
    "one bit": lambda content: content[:60] + bytes([content[60] ^ 1]) + content[61:],
}


@pytest.mark.parametrize("breakage", BREAKAGES.values(), ids=BREAKAGES.keys())
def test_a_broken_wheel_is_made_again(toy: Toy, breakage: Callable[[bytes], bytes]) -> None:
    whole = toy.build().wheel
    content = whole.read_bytes()
    whole.write_bytes(breakage(content))
    assert toy.build().fresh
    assert whole.read_bytes() == content


def test_a_wheel_that_cannot_be_written_leaves_nothing(toy: Toy) -> None:
    wheel = toy.build().wheel
    wheel.unlink()
    wheel.mkdir()
    with pytest.raises(IsADirectoryError):
        toy.build()
    assert [path.name for path in toy.out.iterdir()] == [wheel.name]
    assert not list(toy.scratch.iterdir())


def test_patches_build_on_each_other(toy: Toy) -> None:
    files = contents(toy.build().wheel)
    lines = files["sglang/alpha.py"].decode().splitlines()
    assert lines[0] == "#!/usr/bin/env python"
    assert lines[1].startswith("# Modified by tlt-server (0001-one.patch, 0002-two.patch)")
    assert {"seam = 8", "a20 = 0"} <= set(lines)
    assert "a20 = 20" not in lines
    assert files["sglang/new.py"].endswith(b"n = 1\n")
    assert files["sglang/beta.py"] == b"b = 1\n"


@pytest.mark.parametrize(
    ("source", "above"),
    [
        (b"", 0),
        (b"x = 1", 0),
        (b'"""Doc."""\nfrom __future__ import annotations\n', 0),
        (b"#!/bin/sh\nx = 1\n", 1),
        (b"# -*- coding: latin-1 -*-\nx = 1\n", 1),
        (b"#!/bin/sh\n# vim: set fileencoding=latin-1 :\nx = 1\n", 2),
        (b"x = 1\n# coding: latin-1\n", 0),
    ],
)
def test_the_mark_stands_below_shebang_and_encoding(source: bytes, above: int) -> None:
    lines = mark(source, ["a", "b"]).splitlines(keepends=True)
    assert lines.pop(above).startswith(b"# Modified by tlt-server (a, b)")
    assert b"".join(lines) == source


@given(st.lists(st.binary(max_size=8), max_size=4))
def test_a_version_names_its_series(bodies: list[bytes]) -> None:
    def version(contents: list[bytes]) -> str:
        return fork_version(Series(Path(), tuple(Patch(Path(f"{i}.patch"), body) for i, body in enumerate(contents))))

    assert str(Version(version(bodies))) == version(bodies)
    assert re.fullmatch(r"0\.5\.17\+tlt\.[a-f][0-9a-f]{8}", version(bodies))
    assert len({version(bodies), version([*bodies, b""]), version([*bodies, b"x"])}) == 3


def test_an_installed_tlt_server_brings_what_the_builder_reads() -> None:
    wheel = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"patches": "tlt_server/fork/patches", "NOTICE": "tlt_server/fork/NOTICE"}
    assert notice() == (REPOSITORY / "NOTICE").read_bytes()


def test_the_recipe_of_the_readme_works(toy: Toy) -> None:
    """Laid out and committed patch by patch, each commit is the patch that it came from."""
    tree = toy.home / "tree"
    with ZipFile(toy.wheel) as archive:
        archive.extractall(tree, [name for name in archive.namelist() if name.endswith(".py")])

    def git(*arguments: str | Path) -> str:
        command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
        return subprocess.run(command, cwd=tree, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "pristine")
    for name, body in PATCHES.items():
        git("apply", "--index", toy.root / name)
        git("commit", "-qm", name)
        changed = {line for line in body.splitlines() if line.startswith(("+", "-"))}
        assert changed <= set(git("show", "--format=").splitlines())
