"""The TRL example against a real server: each step is sampled by the weights that it begins with."""

from pathlib import Path

import pytest
from tlt_client import Client

from tests.forks import ran
from tests.server.trainer import Trainer
from tlt_server.demo import default_paths

pytestmark = pytest.mark.server("eagle-chain")
SCRIPT = Path(__file__).parents[2] / "examples/trl/trl_grpo.py"
TARGET = default_paths()[0]


def test_three_steps(url: str, tmp_path: Path) -> None:
    trainer = Trainer(url)
    with Client(url) as client:
        before = client.status().versions.target.version
        flags = ["--url", url, "--model", str(TARGET), "--out", str(tmp_path), "--steps", "3", "--prompts", "2"]
        flags += ["--group", "4", "--max-new-tokens", "96", "--learning-rate", "1e-4"]
        log = tmp_path / "log"
        assert ran(flags, log, SCRIPT, {"TRL_EXPERIMENTAL_SILENCE": "1"}) == 0, log.read_text()[-3000:]
        assert client.status().versions.target.version == before + 3
        assert client.weight_version() == "trl 2"
        rewards = [line for line in log.read_text().splitlines() if line.startswith("step ")]
        assert [line.partition(":")[0] for line in rewards] == ["step 1", "step 2", "step 3"]
        first = trainer.checksums()
        client.update_weights_from_disk(str(tmp_path), "trained")
        assert trainer.checksums() != first
        client.update_weights_from_disk(str(TARGET), "default")
    trainer.close()
