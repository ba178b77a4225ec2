"""`--enable-deterministic-inference`: a response and its logprobs are the same bits, whatever runs beside it.

Nothing is a tie here, so that a difference between two servers is a fault of one of them.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
from tlt_client import Client, Rollout, SamplingParams, StrategyUpdate

from tests.server.conftest import PROMPTS, SEVERAL, Servers
from tests.server.test_arms import ANY_ARM
from tests.server.test_one_sample import asked
from tests.server.test_penalties import asked as penalised

pytestmark = pytest.mark.server
FLAG = "--enable-deterministic-inference"
OFF = StrategyUpdate("off")
GRAMMARS = [
    SamplingParams(sampling_seed=i, regex=r"[0-9+ ]*", logit_bias={1: 9.0}, max_new_tokens=40, ignore_eos=True)
    for i in range(8)
]
"""That may end at once, or in any step."""
Bits = list[tuple[tuple[int, ...], tuple[float, ...]]]


def bits(rollouts: list[Rollout]) -> Bits:
    return [(rollout.tokens, tuple(rollout.logprobs or ())) for rollout in rollouts]


def test_no_neighbour_and_no_arm_changes_a_bit(servers: Servers) -> None:
    prompts, params = (a + b for a, b in zip(asked(18), penalised(8), strict=True))
    prompts, params = prompts + PROMPTS[: len(GRAMMARS)], params + GRAMMARS
    with Client(servers.get([*SEVERAL, FLAG, "--chunked-prefill-size", "16"])) as client:
        client.set_strategy(OFF)
        with ThreadPoolExecutor(1) as one:
            alone = bits(list(one.map(lambda *each: client.generate(*each, logprobs=True), prompts[:9], params)))
        client.set_strategy(ANY_ARM)
        together = bits(client.generate_batch(prompts, params, logprobs=True))
        assert client.strategy().mode == "paper"
    assert together[:9] == alone
    assert sum(len(tokens) for tokens, _ in together) > 26 * 20
    with Client(servers.get(["--no-speculation", FLAG])) as client:
        assert bits(client.generate_batch(prompts, params, logprobs=True)) == together
