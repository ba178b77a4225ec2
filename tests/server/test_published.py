"""Published drafters, exchanged while a server runs: those that fit, in whatever form; the others refused in words."""

from pathlib import Path

import pytest
from tlt_client import Client, DrafterUpdate
from tlt_client.errors import BadRequest

from benchmarks.models.formats import FORMATS
from tests.server.conftest import PROMPTS
from tests.server.trainer import Trainer

GREEDY = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}


def said(trainer: Trainer) -> list[object]:
    answers = (
        trainer.http.post("/generate", json={"text": PROMPTS, "sampling_params": GREEDY}).raise_for_status().json()
    )
    return [answer["output_ids"] for answer in answers]


@pytest.mark.server("eagle3-tree")
@pytest.mark.parametrize("name", ["EAGLE-3, sharded", "ModelOpt, the target's head, its vocabulary named"])
def test_what_fits_is_read_in_its_own_form(name: str, trainer: Trainer, client: Client, tmp_path: Path) -> None:
    FORMATS[name](tmp_path / "published")
    before = said(trainer)
    found = client.update_drafter(DrafterUpdate(str(tmp_path / "published")))
    assert found.live.version == found.newest
    counted = client.status().counters
    assert said(trainer) == before
    after = client.status().counters
    assert after.accepted_tokens - counted.accepted_tokens > after.drafts - counted.drafts


@pytest.mark.server("eagle3-tree")
@pytest.mark.parametrize(
    ("name", "sha256", "message"),
    [
        ("DFlash", None, "DFlash drafts a block at once"),
        ("vLLM's name", None, "d2t is not a tensor of this drafter"),
        ("EAGLE-3, sharded", "0" * 64, "sha256 cannot be checked"),
        ("yuhuili EAGLE, .bin", None, "architectures is"),
    ],
)
def test_what_does_not_is_refused(name: str, sha256: str | None, message: str, client: Client, tmp_path: Path) -> None:
    FORMATS[name](tmp_path / "published")
    before = client.drafter().live
    with pytest.raises(BadRequest, match=message):
        client.update_drafter(DrafterUpdate(str(tmp_path / "published"), sha256=sha256))
    assert client.drafter().live == before
