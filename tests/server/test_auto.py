"""A server that begins without a drafter, and gets one while it serves."""

from pathlib import Path

import pytest
from tlt_client import Client, DrafterUpdate, SamplingParams

from tests.server.conftest import PROMPTS, Servers
from tlt_server.demo import default_paths
from tlt_server.demo.lossless import Tokens

pytestmark = pytest.mark.server

GREEDY = SamplingParams(temperature=0, max_new_tokens=96)


def test_a_drafter_comes_later(
    servers: Servers, expected: list[Tokens], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with Client(servers.get(["--drafter", "auto"])) as client:

        def lengths() -> set[float | None]:
            rollouts = client.generate_batch(PROMPTS, GREEDY)
            assert [rollout.tokens for rollout in rollouts] == expected
            return {rollout.accept_length for rollout in rollouts}

        assert "the drafter has learnt nothing yet" in client.status().help
        assert lengths() == {None}
        client.update_drafter(DrafterUpdate(str(default_paths()[1])))
        assert client.strategy().on
        assert min(length or 0 for length in lengths()) > 1.5
        client.roll_back_drafter()
        assert not client.strategy().on
        assert lengths() == {None}
    servers.close()
