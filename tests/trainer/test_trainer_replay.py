"""Prompts to warm a drafter up with: how a file of them is read, and what cannot be one. A server's part is in
tests/server/test_features.py."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_server.errors import ConfigError
from tlt_server.trainer.data.replay import read

PROMPT = st.text() | st.lists(st.integers(0, 2**31 - 1)).map(tuple)


@pytest.mark.slow
@given(st.lists(PROMPT, min_size=1), st.booleans())
def test_every_prompt_of_a_file_is_read(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[str | tuple[int, ...]], spaced: bool
) -> None:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    between = "\n\n" if spaced else "\n"
    file.write_text(between.join(json.dumps({"prompt": prompt, "answer": 4}) for prompt in prompts))
    assert read(file) == prompts


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "there is none in it"),
        ('{"prompt": "a"}\n{"prompt"', r"line 2: .* Write \{"),
        ('{"text": "a"}', "line 1: .*missing required field `prompt`"),
        ('{"prompt": 3}', "line 1"),
    ],
)
def test_what_is_no_file_of_prompts_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read(file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl: No such file"):
        read(tmp_path / "none.jsonl")
