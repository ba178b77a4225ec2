"""What drafters share with the target, written beside the decode loop: of one version, or refused."""

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tlt_client.schemas import SharedTarget

from tests.forks import on_ranks
from tlt_server.engine.features.sharing import Sharing
from tlt_server.engine.weights.publications import Publications
from tlt_server.errors import OutOfTurn, UpdateRefused


def fresh() -> Publications:
    return Publications("default", 0.0, time.monotonic, lambda _: None)


@pytest.fixture
def publications() -> Publications:
    return fresh()


def held(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.iterdir() for name, tensor in load_file(file).items()}


def when_done(sharing: Sharing, path: Path) -> SharedTarget:
    while (shared := sharing.share(str(path))) is None:
        time.sleep(0.001)
    return shared


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_file_holds_what_the_model_has(
    publications: Publications, tmp_path: Path, dtype: torch.dtype, is_tied: bool
) -> None:
    embedding, head = torch.randn(2, 7, 5).to(dtype)
    sharing = Sharing(lambda: (embedding, embedding if is_tied else head), 6, publications)
    publications.wrote("step 1")
    publications.flushed()
    assert when_done(sharing, tmp_path / "a") == SharedTarget(1, str(tmp_path / "a"))
    written = held(tmp_path / "a")
    assert torch.equal(written.pop("model.embed_tokens.weight"), embedding[:6])
    assert torch.equal(written.pop("lm_head.weight"), head[:6]) if not is_tied else not written


def test_tensors_of_many_chunks_are_whole(
    publications: Publications, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tlt_server.engine.features.sharing.CHUNK_BYTES", 3 * 5 * 4 + 1)
    embedding, head = torch.randn(5, 7).T, torch.randn(7, 5)
    when_done(Sharing(lambda: (embedding, head), 7, publications), tmp_path / "a")
    written = held(tmp_path / "a")
    assert torch.equal(written["model.embed_tokens.weight"], embedding)
    assert torch.equal(written["lm_head.weight"], head)


def test_what_was_written_meanwhile_is_not_told_of(publications: Publications, tmp_path: Path) -> None:
    weight = torch.zeros(3, 2)
    sharing = Sharing(lambda: (weight, weight), 3, publications)
    publications.paused()
    assert sharing.share(str(tmp_path / "a")) is None
    publications.wrote(None)
    with pytest.raises(OutOfTurn, match="while it was copied"):
        when_done(sharing, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    with pytest.raises(OutOfTurn, match="is under way"):
        sharing.share(str(tmp_path / "b"))
    publications.continued()
    assert when_done(sharing, tmp_path / "b").target_version == 1


def test_a_folder_that_cannot_be_written_is_refused(publications: Publications, tmp_path: Path) -> None:
    weight = torch.zeros(3, 2)
    (tmp_path / "file").touch()
    with pytest.raises(UpdateRefused, match="file/a"):
        when_done(Sharing(lambda: (weight, weight), 3, publications), tmp_path / "file" / "a")


def test_what_has_not_changed_is_not_written_again(publications: Publications, tmp_path: Path) -> None:
    embedding, head = torch.randn(2, 50, 5)
    sharing = Sharing(lambda: (embedding, head), 50, publications)
    when_done(sharing, tmp_path / "a")
    before = {file.name: file.stat() for file in (tmp_path / "a").iterdir()}
    head[7, 3] += 1e-3
    when_done(sharing, tmp_path / "b")
    after = {file.name: file.stat() for file in (tmp_path / "b").iterdir()}
    assert not (tmp_path / "a").exists()
    name = "model.embed_tokens.weight.safetensors"
    assert (after[name].st_ino, after[name].st_mtime_ns) == (before[name].st_ino, before[name].st_mtime_ns)
    assert torch.equal(held(tmp_path / "b")["lm_head.weight"], head)


def test_a_folder_that_somebody_removed_is_written_whole(publications: Publications, tmp_path: Path) -> None:
    embedding, head = torch.randn(2, 50, 5)
    sharing = Sharing(lambda: (embedding, head), 50, publications)
    when_done(sharing, tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    when_done(sharing, tmp_path / "b")
    assert held(tmp_path / "b").keys() == {"model.embed_tokens.weight", "lm_head.weight"}


def rank_main(rank: int, folder: Path) -> list[Any]:
    """One of two ranks, of five rows each, of which the last is padding."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    embedding, head = (each[5 * rank : 5 * rank + 5].clone() for each in shards())
    publications, told = fresh(), list[Any]()
    sharing = Sharing(lambda: (embedding, head), 9, publications, dist.group.WORLD)

    def share(name: str) -> None:
        try:
            told.append(when_done(sharing, folder / name).target_version)
        except (OutOfTurn, UpdateRefused) as refused:
            told.append(str(refused).replace(str(folder), ""))

    (folder / "file").touch()
    share("file/a")
    share("a")
    if rank == 1:
        head += 1
    share("b")
    publications.paused()
    if rank == 1:  # as one that has not noticed yet that a publication is over
        publications.wrote(None)
    share("c")
    dist.destroy_process_group()
    return told


def shards() -> torch.Tensor:
    return torch.arange(2.0 * 10 * 3).reshape(2, 10, 3).to(torch.bfloat16)


@pytest.mark.slow
def test_ranks_share_the_rows_of_all(tmp_path: Path) -> None:
    """What one of them objects to, none of them does; what has changed on one is written whole."""
    told = on_ranks(rank_main, tmp_path)
    assert told[0][1:] == told[1][1:]
    assert "/file/a" in told[0][0]
    assert told[0][1:3] == [0, 0]
    assert "is under way" in told[0][3]
    embedding, head = shards()
    head[5:] += 1
    found = held(tmp_path / "b")
    assert torch.equal(found["model.embed_tokens.weight"], embedding[:9])
    assert torch.equal(found["lm_head.weight"], head[:9])
