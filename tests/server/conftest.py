"""Real servers, one at a time for each worker: one at work takes a core. Tests of one configuration share one server.

A test names it by its marker, `pytest.mark.server("eagle-chain")`, or by a parameter `config` of its own; the fixtures
`url` and `client` lead there. Tests of one server run one after another, whatever files they are in, but where several
workers take a file each. Those that start servers of their own name none, and come last.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from tlt_client import Client
from tlt_client.schemas import Arm

from benchmarks.lib.reload.trainer import Trainer
from tests.server.warm import warm_process
from tlt_server.bench.plan import present
from tlt_server.demo import default_paths, eagle3_path
from tlt_server.demo.lossless import Tokens
from tlt_server.demo.reference import Reference
from tlt_server.demo.task import problems

PROMPTS = [problem.prompt for problem in problems(16, seed=11)]
EAGLE3 = ["--drafter", str(eagle3_path())]
DRAFTING = {"eagle-chain": [], "eagle3-tree": [*EAGLE3, "--arm", "5,4,16"]}
"""Both kinds of drafter, and of draft. EAGLE by a tree and EAGLE-3 by a chain are among the arms of `SWITCHING`."""
ARMS = (Arm(3, 1, 4), Arm(3, 4, 8), Arm(5, 2, 8), Arm(1, 1, 2), Arm(4, 3, 5), Arm(5, 4, 16))
SEVERAL = [word for a in ARMS for word in ("--arm", f"{a.num_steps},{a.topk},{a.num_draft_tokens}")]
TRAINER = "tcp://of.the.tests:1"
"""Stands for an address of `Servers`: of a trainer whose control link nobody listens to; features go without it."""
TAPPED = ["--trainer", TRAINER, "--chunked-prefill-size", "16"]
ALL = ["--random-seed", "7", "--load-snapshot-publish-interval", "1"]
"""Of every configuration; what a server says of its load is then as old as its last step, instead of 15."""
HERE = Path(__file__).parent
SWITCHING = {
    "eagle-arms": [*SEVERAL, *TAPPED],
    "eagle3-arms": [*EAGLE3, *SEVERAL, *TAPPED],
    # prompts of 20 to 60 tokens come in chunks, and a pool that is too small for 16 of them has requests retracted
    # and of the tokens here half are beyond what it drafts of
    "tight-arms": [
        *(*SEVERAL, "--chunked-prefill-size", "16", "--max-total-tokens", "1000"),
        *("--tlt-config", str(HERE / "part.toml")),
    ],
}

HISTORY = ["--arm", "history:7"]
VLLM = ["--tlt-config", str(HERE / "vllm.toml")]
CONFIGS: dict[str, list[str]] = {
    **DRAFTING,
    "plain": ["--no-speculation"],
    **SWITCHING,
    "two-ranks": [*EAGLE3, *SEVERAL, *TAPPED, "--tp-size", "2"],
    "history": ["--drafter", "none", *HISTORY, "--arm", "history:3"],
    "eagle-history": [
        *("--arm", "3,1,4", "--arm", "5,4,16", *HISTORY),
        *("--chunked-prefill-size", "16", "--max-total-tokens", "1500"),
    ],
    "history-ranks": [
        *("--arm", "3,1,4", *HISTORY, "--tp-size", "2"),
        *("--tlt-config", str(HERE / "history.toml")),
    ],
    "vllm": [*VLLM, "--chat-template", str(HERE / "tools.jinja")],
    "vllm-ranks": ["--dialect", "vllm", "--tp-size", "2"],
    "vllm-replicas": ["--dialect", "vllm", "--dp-size", "2"],
    "two-replicas": ["--dp-size", "2", "--tokenizer-worker-num", "2"],
}
UNSPECULATIVE = {name for name, flags in CONFIGS.items() if "--no-speculation" in flags}
RANKS_APART = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.hookimpl(trylast=True)  # after pytest's own reordering
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    servers = [*CONFIGS, None]

    def place(item: pytest.Item) -> int:
        marker = item.get_closest_marker("server")
        here = marker is not None and item.path.parent == HERE
        return servers.index(config_of(item, marker)) if here else len(servers)

    items.sort(key=place)


def config_of(item: pytest.Item, marker: pytest.Mark) -> str | None:
    given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return given.get("config", marker.args[0] if marker.args else None)


class Servers:
    """Hands out the URL of a server with the flags asked for; starting another one ends the one before."""

    def __init__(self, logs: Path) -> None:
        self._logs, self._started = logs, 0
        self._flags: Sequence[str] | None = None
        self._stack = contextlib.ExitStack()
        self.url, self.pid, self.trainer = "", 0, f"ipc://{logs}/control"

    def get(self, flags: Sequence[str]) -> str:
        if flags != self._flags:
            self.close()
            log = self._logs / f"server-{self._started}.log"
            starting = warm_process(
                [*(self.trainer if word == TRAINER else word for word in flags), *ALL],
                log,
                RANKS_APART if "--tp-size" in flags else None,
            )
            self.url, self.pid = self._stack.enter_context(starting)
            self._flags, self._started = flags, self._started + 1
        return self.url

    def close(self) -> None:
        self._flags, self.url = None, ""
        self._stack.close()


@pytest.fixture(scope="package")  # what comes after this folder's tests has the cores for itself
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    pool = Servers(tmp_path_factory.mktemp("servers"))
    yield pool
    pool.close()


@pytest.fixture
def config(request: pytest.FixtureRequest) -> str:
    return str(config_of(request.node, request.node.get_closest_marker("server")))


@pytest.fixture
def url(config: str, servers: Servers) -> Iterator[str]:
    """Of a server that has its strategy of before again when the test is over: others share it."""
    url = servers.get(CONFIGS[config])
    if config in UNSPECULATIVE:
        yield url
        return
    with Client(url) as client:
        before = present(client.strategy())
        yield url
        if servers.url and present(client.strategy()) != before:
            client.set_strategy(before)


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client


@pytest.fixture
def trainer(url: str) -> Iterator[Trainer]:
    trainer = Trainer(url)
    yield trainer
    trainer.close()


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference(default_paths()[0])


@pytest.fixture(scope="session")
def in_double() -> Reference:
    """The target without float32's rounding."""
    return Reference(default_paths()[0], dtype=torch.float64)


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
