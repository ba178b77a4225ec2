"""Training steps of several processes are those of one."""

import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.trainer import spread_steps
from tests.trainer.stand_in import torchrun
from tlt_server.trainer.learn.packing import Run, join
from tlt_server.trainer.learn.team import spread


@pytest.fixture(scope="module")
def spread_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes have learnt, by the kind of the drafter."""
    folder = tmp_path_factory.mktemp("spread")
    command = [*torchrun(2), "-m", "tests.trainer.spread_steps", str(folder), "cpu"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240)
    assert done.returncode == 0, done.stdout.decode()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", spread_steps.OBJECTIVES)
def test_steps_of_two_processes_are_those_of_one(tmp_path: Path, spread_out: Path, kind: str) -> None:
    """In some of which the helper is away; the target changes on the way."""
    alone = spread_steps.trainer(kind)
    losses = torch.tensor(spread_steps.train(alone, kind))
    save_file(alone.network.state_dict() | {"losses": losses}, tmp_path / f"{kind}.safetensors")
    together = load_file(spread_out / f"{kind}.safetensors")
    assert torch.allclose(together["losses"], losses, rtol=1e-4)
    # Adam's first steps are nearly signs: rounding may turn a few
    assert spread_steps.furthest(tmp_path, spread_out, kind) < 0.005


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 5))
def test_packs_are_spread_evenly(lengths: list[int], parts: int) -> None:
    """No part has more than another one but for its last pack; the leader's comes first."""
    sizes = [(torch.zeros(length + 1, dtype=torch.int64), torch.zeros(length + 1, 1)) for length in lengths]
    packs = [join([Run(tokens, states, states)]) for tokens, states in sizes]
    shares = spread(packs, parts)
    assert sorted(map(id, packs)) == sorted(id(pack) for share in shares for pack in share)
    rows = [sum(len(pack.tokens) for pack in share) for share in shares]
    for share, count in zip(shares, rows, strict=True):
        assert not share or count - len(share[-1].tokens) <= min(rows)
