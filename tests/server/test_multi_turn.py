"""The example of multi-turn rollouts: the tool is asked, its answers are in the context, turns find the cache full."""

import json
import re
import subprocess
import sys
from itertools import pairwise
from typing import Any

import httpx
import pytest
from tlt_client import Client, SamplingParams
from tlt_grpo.multi_turn import CALL, Chat, Tokens, Turn, calculated, converse

from tlt_server.demo.reference import Reference
from tlt_server.demo.task import grade, problems

pytestmark = pytest.mark.server("eagle-chain")

SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=256, stop=CALL, no_stop_trim=True, sampling_seed=5)
ASKED = problems(8, seed=2)
Said = list[tuple[str, list[Turn], Any]]


@pytest.fixture(params=[Tokens, Chat])
def said(request: pytest.FixtureRequest, client: Client, url: str) -> Said:
    with httpx.Client(base_url=url, timeout=60) as http:
        given = [client, http] if request.param is Tokens else [http]
        routes = [request.param(*given, problem) for problem in ASKED]
        return [(*converse(route, SAMPLING, most_turns=32), route) for route in routes]


def test_turns_go_on_from_the_tools_answers(said: Said) -> None:
    """Each finds those before it in the cache, and nothing that it asks is ignored."""
    assert sum(len(turns) for _, turns, _ in said) > 3 * len(said)
    for text, turns, _ in said:
        calls = re.findall(r"^(\d+[*+]\d+:.*) so (\d+)", text, re.MULTILINE)
        assert len(calls) == len([turn for turn in turns if turn.calls])
        assert all(value.startswith(str(calculated(line))) for line, value in calls)
    assert sum(grade(problem, text) for problem, (text, *_) in zip(ASKED, said, strict=True)) >= 5
    for _, turns, _ in said:
        for before, after in pairwise(turns):
            assert before.prompt_tokens <= after.cached_tokens < after.prompt_tokens
    assert {turn.ignored for _, turns, _ in said for turn in turns} == {()}


def test_what_the_tool_said_is_no_sampled_token(client: Client, url: str, reference: Reference) -> None:
    with httpx.Client(base_url=url, timeout=60) as http:
        route = Tokens(client, http, ASKED[0])
        text, _ = converse(route, SAMPLING, most_turns=32)
        told = http.post("/detokenize", json={"tokens": route.context}).raise_for_status().json()["text"]
    assert told.removesuffix("<|endoftext|>") == ASKED[0].prompt + text
    answers = "".join(str(calculated(line)) for line in re.findall(r"^(.*) so \d", text, re.MULTILINE))
    assert route.sampled.count(False) == len(reference.tokens(ASKED[0].prompt)) + len(answers)  # a digit is a token


@pytest.mark.parametrize("route", ["tokens", "chat"])
def test_its_command_prints_a_line_for_each_problem(url: str, route: str) -> None:
    command = [sys.executable, "-m", "tlt_grpo.multi_turn", "--url", url, "--route", route, "--count", "2"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert [json.loads(line).keys() for line in lines] == [{"text", "right", "turns"}] * 2
