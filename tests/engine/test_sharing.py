"""What drafters share with the target, written beside the decode loop: of one version, or refused."""

import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tlt_client.schemas import SharedTarget

from tlt_server.engine.publications import Publications
from tlt_server.engine.sharing import Sharing
from tlt_server.errors import OutOfTurn, UpdateRefused


@pytest.fixture
def publications() -> Publications:
    return Publications("default", 0.0, time.monotonic, lambda _: None)


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
    embedding, head = torch.randn(2, 7, 5).to(dtype)[:, :6]
    sharing = Sharing(lambda: (embedding, embedding if is_tied else head), publications)
    publications.wrote("step 1")
    publications.flushed()
    assert when_done(sharing, tmp_path / "a") == SharedTarget(1, str(tmp_path / "a"))
    written = held(tmp_path / "a")
    assert torch.equal(written.pop("model.embed_tokens.weight"), embedding)
    assert torch.equal(written.pop("lm_head.weight"), head) if not is_tied else not written


def test_what_was_written_meanwhile_is_not_told_of(publications: Publications, tmp_path: Path) -> None:
    weight = torch.zeros(3, 2)
    sharing = Sharing(lambda: (weight, weight), publications)
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
        when_done(Sharing(lambda: (weight, weight), publications), tmp_path / "file" / "a")


def test_what_has_not_changed_is_not_written_again(publications: Publications, tmp_path: Path) -> None:
    embedding, head = torch.randn(2, 50, 5)
    sharing = Sharing(lambda: (embedding, head), publications)
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
    sharing = Sharing(lambda: (embedding, head), publications)
    when_done(sharing, tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    when_done(sharing, tmp_path / "b")
    assert held(tmp_path / "b").keys() == {"model.embed_tokens.weight", "lm_head.weight"}
