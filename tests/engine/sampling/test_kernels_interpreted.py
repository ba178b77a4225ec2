"""The GPU's kernels, without a GPU: by Triton's interpreter, in a process of its own: it is chosen at import."""

import os
import subprocess
import sys

import pytest
import torch

from tests.engine.sampling.gpu_kernels import KINDS, Case, error_of, noise_arguments, wrong_rows
from tlt_server.engine.sampling.noise import add_noise, gumbel


@pytest.mark.slow
def test_kernels_agree_with_the_reference() -> None:
    words = [sys.executable, "-m", "tests.engine.sampling.gpu_kernels", "--small"]
    ended = subprocess.run(words, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert all(kind in ended.stdout for kind in KINDS)


@pytest.mark.slow
def test_the_reference_needs_no_triton() -> None:
    """As on machines that have none."""
    program = "import sys; sys.modules['triton'] = None; import tlt_server.engine.sampling.noise"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_token_is_noticed(kind: str) -> None:
    case = Case(kind, 101, bs=3, nodes=2)
    scores, seeds, positions, _ = case.inputs()
    noisy = (scores + gumbel(seeds.repeat_interleave(2), positions, 101)).nan_to_num(nan=float("-inf"))
    right = noisy.argmax(-1)
    assert wrong_rows(case, right) == (0, 0)
    assert wrong_rows(case, right.int()) == (6, 6)
    assert wrong_rows(case, torch.full_like(right, 101)) == (6, 6)
    wrong = right.clone()
    wrong[4] = (right[4] + 1) % 101
    assert wrong_rows(case, wrong) == (1, 1)


def test_wrong_noise_is_noticed() -> None:
    given = noise_arguments("cpu", 11, mapped=True)
    found = add_noise(*given, rows_each=2)
    assert error_of(found, given, 2) == 0
    found[0, 3] += 0.01
    assert error_of(found, given, 2) == pytest.approx(0.01, abs=1e-6)
    found[5, 3] += 1e-6
    assert error_of(found, given, 2) == float("inf")
