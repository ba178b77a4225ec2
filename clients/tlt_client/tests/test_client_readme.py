"""The examples of the READMEs, the client's and that above all, run as they stand but for the address."""

import re
from pathlib import Path

import pytest
from sglang_stand_in import serving

CLIENT = Path(__file__).parent.parent
PAGES = [CLIENT / "README.md", CLIENT.parent.parent / "README.md"]
EXAMPLES = [each for page in PAGES for each in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)]
PRINTED = [
    "9 stop None -0.4",
    "[[1, 2, 3], [4, 5, 6]]",
    "(-0.004, -0.005, -0.006))]\n7\n",
    "Why is the sky blue?\n all well",
    "15 None stop",
]


@pytest.mark.parametrize(("example", "printed"), list(zip(EXAMPLES, PRINTED, strict=True)))
def test_an_example_prints_what_it_should(example: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        exec(compile(example.replace("http://127.0.0.1:30000", server.url), "README.md", "exec"), {})
    assert printed in capsys.readouterr().out
