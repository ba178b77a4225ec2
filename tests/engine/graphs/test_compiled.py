"""What Triton would compile in the middle of a rollout: each of upstream's kernels is called as it asks, with every
constant that a step can have. Kernels need a GPU: stand-ins note how they are called."""

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.speculative import cache_locs
from sglang.srt.mem_cache import allocation
from sglang.srt.speculative import spec_utils

from tlt_server.config import Arm
from tlt_server.engine.graphs.compiled import compile_kernels

CHAIN, TREE, HISTORY = Arm(3, 1, 4), Arm(5, 4, 16), Arm.parse("history:7")
WORKER: Any = SimpleNamespace(
    device="cpu",
    req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(4, 64, dtype=torch.int32)),
    token_to_kv_pool_allocator=None,
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, Any]]]:
    found = defaultdict(list)

    def noting(module: Any, name: str) -> Callable[..., None]:
        bind = signature(getattr(module, name)).bind
        return lambda *args, **named: found[name].append(bind(*args, **named).arguments)

    for module, name in (
        (allocation, "assign_req_to_token_pool_func"),
        (cache_locs, "assign_extend_cache_locs_uniform_func"),
        (spec_utils, "move_accept_tokens_to_target_kvcache"),
    ):
        monkeypatch.setattr(module, name, noting(module, name))
    name = "assign_draft_cache_locs_contiguous"
    kernel = getattr(cache_locs, name)
    launched = {(1,): lambda *args: found[name].append(dict(zip(kernel.arg_names, args, strict=True)))}
    monkeypatch.setattr(cache_locs, name, launched)
    return found


def test_every_arm_and_every_size_that_a_batch_is_rounded_up_to(calls: dict[str, list[dict[str, Any]]]) -> None:
    compile_kernels(WORKER, {CHAIN: 100, TREE: 12, HISTORY: 100}, largest=100)
    sizes = [call["batch_size"] for call in calls["assign_req_to_token_pool_func"]]
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 128]
    verified = [call["draft_token_num"] for call in calls["assign_extend_cache_locs_uniform_func"]]
    assert verified == [4, 16, HISTORY.num_draft_tokens]
    drafted = [(call["topk"], call["speculative_num_steps"]) for call in calls["assign_draft_cache_locs_contiguous"]]
    assert drafted == [(1, 3), (4, 5)], "history drafts by no pass"
    moved = [tuple(call["accept_index"].shape) for call in calls["move_accept_tokens_to_target_kvcache"]]
    assert moved == [(1, 6), (2, 6), (4, 6), (8, 6), (16, 6)], "a chain's accepted tokens lie where they belong"
    assert all((call["accept_index"] == -1).all() for call in calls["move_accept_tokens_to_target_kvcache"])


def test_no_request_gets_a_place(calls: dict[str, list[dict[str, Any]]]) -> None:
    compile_kernels(WORKER, {CHAIN: 4}, largest=4)
    for call in calls["assign_req_to_token_pool_func"]:
        assert call["start_offset"].equal(call["end_offset"])


INTERPRETED = """
from types import SimpleNamespace
from tlt_server.engine.cpu.torchvision import mend_torchvision
mend_torchvision()
import torch
from sglang.kernels.ops.speculative import cache_locs, eagle
from sglang.srt.mem_cache import allocation
from sglang.srt.speculative import spec_utils
from tlt_server.config import Arm
from tlt_server.engine.graphs.compiled import compile_kernels

for module in (cache_locs, eagle, allocation, spec_utils):
    module._is_cpu, module._is_cuda = False, True
moved = []
cache = SimpleNamespace(move_kv_cache=lambda to, come_from: moved.append(torch.cat((to, come_from))))
table = torch.zeros(16, 128, dtype=torch.int32)
worker = SimpleNamespace(
    device="cpu",
    req_to_token_pool=SimpleNamespace(req_to_token=table),
    token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: cache),
)
compile_kernels(worker, {Arm(3, 1, 4): 64, Arm(5, 4, 16): 8, Arm(15, 1, 16): 4}, 64)
print(len(moved), table.any().item(), torch.cat(moved).any().item())
"""


@pytest.mark.slow
def test_as_upstreams_kernels_are_written_only_place_0_is_read_and_nothing_is_written() -> None:
    """By Triton's interpreter, which must be there before they are imported."""
    command = [sys.executable, "-W", "ignore", "-c", INTERPRETED]
    ended = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ended.stdout.splitlines()[-1:] == ["4 False False"], ended.stderr
