"""Drafters from host to host."""

from pathlib import Path

import pytest

from tests.trainer.test_trainer_hosts import run_on_hosts


@pytest.mark.slow
def test_servers_on_other_hosts_fetch_from_one_another_where_they_can(tmp_path: Path) -> None:
    """With a CURVE key each; who reaches no other fetches from the trainer, the second time at once."""
    run_on_hosts("tests.wire.hosts", tmp_path, 120)
