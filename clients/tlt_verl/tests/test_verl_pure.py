"""What needs verl's classes, and neither Ray nor a server."""

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import tomllib
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # verl's import takes seconds

PACKAGE = Path(__file__).parents[1]
FRESH = """
from verl.workers.rollout.replica import RolloutReplicaRegistry, get_rollout_replica_class
from verl.checkpoint_engine.base import CheckpointEngineRegistry

print(get_rollout_replica_class("tlt").__name__, RolloutReplicaRegistry._registry["sglang"].__module__)
print(CheckpointEngineRegistry.get("tlt").__name__)
"""


@pytest.fixture
def metadata(tmp_path: Path) -> Path:
    """A folder in which this package is installed, as far as plugins are found."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    folder = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in of.items()) for group, of in project["entry-points"].items()
    ]
    (folder / "entry_points.txt").write_text("".join(lines))
    return tmp_path


@pytest.mark.parametrize("hook", ["entry point", "external module"])
def test_a_fresh_process_of_verl_finds_it(hook: str, metadata: Path) -> None:
    paths = [str(PACKAGE), os.environ.get("PYTHONPATH", "")]
    plugins = {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "tlt_verl"}
    if hook == "entry point":
        plugins, paths = {}, [str(metadata), *paths]
    mended = "from tlt_server.engine.cpu.torchvision import mend_torchvision\nmend_torchvision()\n"
    environment = os.environ | plugins | {"PYTHONPATH": ":".join(filter(None, paths))}
    ran = subprocess.run(
        [sys.executable, "-c", mended + FRESH], check=False, env=environment, capture_output=True, text=True
    )
    assert ran.stdout.split() == ["AttachedReplica", "tlt_verl", "ServerCheckpointEngine"], ran.stderr


@settings(deadline=None)  # the first one imports verl
@given(sizes=st.lists(st.integers(1, 40), max_size=30), most=st.integers(1, 100))
def test_buckets_hold_all_tensors_in_order(sizes: list[int], most: int) -> None:
    from tlt_verl.weights import in_buckets

    tensors = [(str(i), torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate(sizes)]

    async def each() -> AsyncIterator[Any]:
        for pair in tensors:
            yield pair

    async def all_of() -> list[Any]:
        return [bucket async for bucket in in_buckets(each(), most)]

    buckets = asyncio.run(all_of())
    assert [pair for bucket in buckets for pair in bucket] == tensors
    for bucket in buckets:
        assert bucket
        assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= most
    for bucket, following in itertools.pairwise(buckets):
        assert sum(tensor.nbytes for _, tensor in [*bucket, following[0]]) > most


def test_settings_are_words() -> None:
    from tlt_verl.flags import words

    flags = {"a_b": 1, "yes": True, "no": False, "none": None, "arm": ["3,1,4", "5,4,16"], "path": Path("/x")}
    assert list(words(flags)) == [
        *("--a-b", "1", "--yes", "--arm", "3,1,4", "--arm", "5,4,16", "--path", "/x"),
    ]
