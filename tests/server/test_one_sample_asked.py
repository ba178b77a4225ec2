"""What a server says of two tokens, asked again, is what the target says."""

import pytest
from tlt_client import SamplingParams

from benchmarks.lib.one_sample.asking import TOGETHER, ask_again
from benchmarks.lib.one_sample.judging import Compared, parting
from benchmarks.lib.one_sample.requests import Request
from tests.benchmarks.test_one_sample import rollout
from tests.server.conftest import PROMPTS
from tlt_server.demo.reference import Reference


@pytest.mark.server("eagle-chain")
def test_the_gap_that_is_asked_is_the_targets(url: str, reference: Reference) -> None:
    """Of more partings than one call holds."""
    asked, parted = [], []
    for place in range(TOGETHER + 3):
        prompt = reference.tokens(PROMPTS[place % len(PROMPTS)])
        asked.append(Request("", prompt, SamplingParams(temperature=1.0, sampling_seed=place - 5)))
        one, other = rollout(18, 19, 20 + place % 7), rollout(18, 19, 30 + place % 5)
        found = parting(reference.along, asked[-1], one, other, bfloat16=True)
        assert found is not None
        parted.append((place, found))
    said = ask_again(url, asked, Compared(len(asked), 0, tuple(parted)))
    assert [each.in_steps for each in said] == pytest.approx([each.in_steps for _, each in parted], abs=1e-2)
