"""A server that begins without a drafter, and gets one while it serves; and that finds its arms itself."""

from pathlib import Path

import pytest
from tlt_client import Client, DrafterUpdate, SamplingParams, StrategyUpdate

from tests.server.conftest import PROMPTS, Servers
from tlt_server.config import CANDIDATES
from tlt_server.demo import default_paths
from tlt_server.demo.lossless import Tokens
from tlt_server.process import running_server
from tlt_server.strategy.settings import from_client

pytestmark = pytest.mark.server

GREEDY = SamplingParams(temperature=0, max_new_tokens=96)


def test_a_drafter_comes_later(
    servers: Servers, expected: list[Tokens], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # the drafter is made anew, by the process that is forked,
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # which must not do so with several threads
    servers.close()
    flags = ["--drafter", "auto", "--arm", "auto", "--random-seed", "7"]
    with running_server(flags, tmp_path / "log") as url, Client(url) as client:

        def lengths() -> set[float | None]:
            rollouts = client.generate_batch(PROMPTS, GREEDY)
            assert [rollout.tokens for rollout in rollouts] == expected
            return {rollout.accept_length for rollout in rollouts}

        assert "the drafter has learnt nothing yet" in client.status().help
        assert lengths() == {None}
        client.update_drafter(DrafterUpdate(str(default_paths()[1])))
        found = client.strategy()
        assert (found.on, found.mode) == (True, "bandit")
        assert set(map(from_client, found.arms)) <= set(CANDIDATES)
        assert found.selection is not None
        placed = {arm for bucket in found.selection.buckets for arm in (each.arm for each in bucket.arms)}
        assert placed <= {None, *found.arms}
        client.set_strategy(StrategyUpdate("pinned", pinned=found.arms[-1]))
        assert min(length or 0 for length in lengths()) > 1.5
        client.roll_back_drafter()
        assert not client.strategy().on
        assert lengths() == {None}
