"""Real servers, one at a time: a scheduler busy-polls a core. Tests of one configuration share one server."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from tlt_client import Client

from tlt_server.demo import default_paths, eagle3_path
from tlt_server.demo.lossless import Tokens
from tlt_server.demo.reference import Reference
from tlt_server.demo.task import problems
from tlt_server.process import running_server

PROMPTS = [problem.prompt for problem in problems(16, seed=11)]
EAGLE3 = ["--drafter", str(eagle3_path())]
CONFIGS = {
    "eagle-chain": [],
    "eagle-tree": ["--arm", "5,4,16"],
    "eagle3-chain": [*EAGLE3, "--arm", "3,1,4"],
    "eagle3-tree": [*EAGLE3, "--arm", "4,3,12"],
    "plain": ["--no-speculation"],
}


class Servers:
    """Hands out the URL of a server with the flags asked for; starting another one ends the one before."""

    def __init__(self, logs: Path) -> None:
        self._logs, self._started = logs, 0
        self._flags: Sequence[str] | None = None
        self._stack = contextlib.ExitStack()
        self.url = ""

    def get(self, flags: Sequence[str]) -> str:
        if flags != self._flags:
            self.close()
            log = self._logs / f"server-{self._started}.log"
            self.url = self._stack.enter_context(running_server([*flags, "--random-seed", "7"], log))
            self._flags, self._started = flags, self._started + 1
        return self.url

    def close(self) -> None:
        self._flags = None
        self._stack.close()


@pytest.fixture(scope="package")  # what comes after this folder's tests has the cores for itself
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    pool = Servers(tmp_path_factory.mktemp("servers"))
    yield pool
    pool.close()


@pytest.fixture(scope="session", params=CONFIGS)  # session: pytest then groups the tests by server
def config(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(config: str, servers: Servers) -> Iterator[Client]:
    with Client(servers.get(CONFIGS[config])) as client:
        yield client


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference(default_paths()[0])


def greedy(reference: Reference, prompt: str, count: int) -> Tokens:
    """transformers' greedy continuation, up to and including the end-of-sequence token."""
    tokens, end = reference.tokens(prompt), reference.model.generation_config.eos_token_id
    output = reference.model.generate(
        torch.tensor([tokens]), max_new_tokens=count, do_sample=False, eos_token_id=end, pad_token_id=0
    )
    return tuple(output[0, len(tokens) :].tolist())


@pytest.fixture(scope="session")
def expected(reference: Reference) -> list[Tokens]:
    return [greedy(reference, prompt, 96) for prompt in PROMPTS]
