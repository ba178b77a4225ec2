"""`--enable-deterministic-inference`: a response and its logprobs are the same bits, whatever runs beside it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from tlt_client import Client, Rollout, StrategyUpdate

from tests.server.conftest import SEVERAL, Servers
from tests.server.test_arms import ANY_ARM
from tests.server.test_one_sample import asked

pytestmark = pytest.mark.server
FLAG = "--enable-deterministic-inference"
OFF = StrategyUpdate("off")
Bits = list[tuple[tuple[int, ...], tuple[float, ...]]]


def bits(rollouts: list[Rollout]) -> Bits:
    return [(rollout.tokens, tuple(rollout.logprobs or ())) for rollout in rollouts]


def test_no_neighbour_and_no_arm_changes_a_bit(servers: Servers) -> None:
    prompts, params = asked(42)
    with Client(servers.get([*SEVERAL, FLAG, "--chunked-prefill-size", "16"])) as client:
        client.set_strategy(OFF)
        with ThreadPoolExecutor(1) as one:
            alone = bits(list(one.map(lambda *each: client.generate(*each, logprobs=True), prompts[:14], params)))
        client.set_strategy(ANY_ARM)
        together = bits(client.generate_batch(prompts, params, logprobs=True))
        assert client.strategy().mode == "paper"
    assert together[:14] == alone
    assert sum(len(tokens) for tokens, _ in together) > 42 * 20
    with Client(servers.get(["--no-speculation", FLAG])) as client:
        assert bits(client.generate_batch(prompts, params, logprobs=True)) == together
