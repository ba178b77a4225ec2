"""Without speculation a server serves what SGLang serves: families that cannot say what a drafter would ask of them."""

from pathlib import Path

import pytest

from tests.server.families import FAMILIES, serve_and_update
from tlt_server import results


@pytest.mark.server
@pytest.mark.parametrize("family", ["Olmoe", "Gemma2"])
def test_it_starts_answers_and_is_updated(family: str, tmp_path: Path) -> None:
    """A mixture of experts, and the one that differs most from Llama."""
    serve_and_update(family, tmp_path)


def test_every_family_was_served() -> None:
    assert results.read(Path(__file__).with_name("families.json")).figures == dict.fromkeys(FAMILIES, 1)
