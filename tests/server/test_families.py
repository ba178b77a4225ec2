"""Without speculation a server serves what SGLang serves: families that cannot say what a drafter would ask of them.
With it, those that drafters are made for. All of them: `python -m benchmarks models`."""

from pathlib import Path

import pytest

from benchmarks.models.families import draft_and_update, serve_and_update
from tests.server.warm import warm_server
from tlt_server.config import DrafterKind


@pytest.mark.server
@pytest.mark.parametrize("family", ["Olmoe", "Gemma2"])
def test_it_starts_answers_and_is_updated(family: str, tmp_path: Path) -> None:
    """A mixture of experts, and the one that differs most from Llama."""
    serve_and_update(family, tmp_path, warm_server)


@pytest.mark.server
@pytest.mark.parametrize(("family", "kind"), [("Qwen3Moe", DrafterKind.EAGLE), ("Glm4Moe", DrafterKind.EAGLE3)])
def test_it_is_drafted_for(family: str, kind: DrafterKind, tmp_path: Path) -> None:
    draft_and_update(family, kind, tmp_path, warm_server)
