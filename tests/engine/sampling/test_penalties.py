"""Penalties of chains and trees, held against upstream's penalizers, which walk each node's whole response."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.sampling import penaltylib

from tlt_server.engine.requests.continued import prompt_length
from tlt_server.engine.sampling.penalties import NEUTRAL, Penalties

VOCAB, SLOTS = 13, 6
PENALIZERS = {
    penaltylib.BatchedFrequencyPenalizer,
    penaltylib.BatchedPresencePenalizer,
    penaltylib.BatchedRepetitionPenalizer,
}
Factors = tuple[float, float, float]
Tokens = list[int]


@pytest.fixture(scope="module", autouse=True)
def uncompiled() -> Iterator[None]:
    """What upstream compiles is run as it is written: a compiler would take longer than all tests."""
    with torch.compiler.set_stance("force_eager"):
        yield


class Request:
    def __init__(self, factors: Factors, prompt: Tokens, slot: int, outputs: Sequence[int] = ()) -> None:
        self.sampling_params = SimpleNamespace(**dict(zip(NEUTRAL, factors, strict=True)), custom_params=None)
        self.origin_input_ids, self.output_ids, self.req_pool_idx = prompt, list(outputs), slot
        self.ended = False

    def finished(self) -> bool:
        return self.ended


class Batch:
    device = "cpu"

    def __init__(self, requests: Sequence[Request]) -> None:
        self.reqs = list(requests)
        self.req_pool_indices = torch.tensor([request.req_pool_idx for request in requests])


def upstream(logits: torch.Tensor, request: Request, response: Tokens) -> torch.Tensor:
    """Its plain decoding's logits, [vocab], after a response, each of whose tokens it has counted."""
    batch = Batch([request])
    penalties = penaltylib.BatchedPenalizerOrchestrator(VOCAB, batch, PENALIZERS)  # type: ignore[arg-type]
    for token in response:
        penalties.cumulate_output_tokens(torch.tensor([token]))
    penalised = logits.clone()[None]
    additive = torch.zeros_like(penalised)
    penalties.accumulate_additive_penalties(additive)
    penalised += additive
    scaling = penalties.accumulate_scaling_penalties()
    if scaling is not None:
        penaltylib.repetition_penalty.apply_scaling_penalties(penalised, scaling)
    return penalised[0]


token = st.integers(0, VOCAB - 1)
tokens = st.lists(token, max_size=12)
# Of few bits, so that a sum of penalties is the same in any order, and equality is of bits.
addend = st.integers(-128, 128).map(lambda number: number / 64)
factors = st.just(tuple(NEUTRAL.values())) | st.tuples(addend, addend, st.floats(0.25, 2))


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, list[int]]:
    """Branches, and of each node but the root its parent, which comes before it."""
    topk = draw(st.integers(1, 4))
    parents: list[int] = []
    for _ in range(draw(st.integers(0, 7))):
        free = [node for node in range(len(parents) + 1) if parents.count(node) < topk]
        parents.append(free[-1] if topk == 1 else draw(st.sampled_from(free)))
    return topk, parents


def verify_input(topk: int, parents: Sequence[list[int]], drafts: Sequence[Tokens]) -> SimpleNamespace:
    """As upstream's, of trees by each node's parent. drafts: tokens, the root's first."""
    nodes = len(drafts[0])
    links = torch.full((2, len(drafts), nodes), -1)
    steps = 0
    for request, above in enumerate(parents):
        for node in range(nodes):
            children = [child for child, parent in enumerate(above, start=1) if parent == node]
            children.reverse()  # in any order: kernels differ
            for place, child in zip([(0, request, node), *((1, request, c) for c in children)], children, strict=False):
                links[place] = child
            steps = max(steps, len(path_to(above, node)))
    return SimpleNamespace(
        draft_token=torch.tensor(drafts).flatten(),
        retrieve_next_token=links[0],
        retrieve_next_sibling=links[1],
        topk=topk,
        spec_steps=max(steps, 1),
        draft_token_num=nodes,
    )


def path_to(parents: list[int], node: int) -> list[int]:
    """The nodes from below the root down to a node."""
    path: list[int] = []
    while node:
        path, node = [node, *path], parents[node - 1]
    return path


def check(penalties: Penalties, requests: Sequence[Request], responses: Sequence[Tokens]) -> None:
    """After the newest token of each."""
    logits = torch.randn(len(requests), VOCAB)
    found = logits.clone()
    penalties.apply(found, Batch(requests))
    for row, request in enumerate(requests):
        assert torch.equal(found[row], upstream(logits[row], request, responses[row]))


@given(st.data())
def test_each_node_is_penalised_as_plain_decoding_would(data: st.DataObject) -> None:
    """In batches of which not all ask, after a prefill and steps of several shapes."""
    requests = [
        Request(data.draw(factors), data.draw(st.lists(token, min_size=1, max_size=5)), slot, data.draw(tokens))
        for slot in data.draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=4, unique=True))
    ]
    penalties, batch = Penalties(SLOTS, VOCAB, "cpu"), Batch(requests)
    for request in requests:  # the last ids of its input were sampled before
        known = data.draw(st.integers(0, len(request.origin_input_ids) - 1))
        request.sampling_params.custom_params = {"generated_tokens": known}
    responses = [[*request.origin_input_ids[prompt_length(request) :], *request.output_ids] for request in requests]
    penalties.begin(batch)
    for _ in range(data.draw(st.integers(1, 3))):
        # what the step before gave; the host learns it later
        given_tokens = [data.draw(st.lists(token, min_size=1, max_size=3)) for _ in requests]
        padded = torch.tensor([[*some, 7, 7, 7][:3] for some in given_tokens])
        penalties.count(batch, padded.flatten(), torch.tensor([len(some) for some in given_tokens]))
        responses = [[*before, *some] for before, some in zip(responses, given_tokens, strict=True)]
        topk, parents = data.draw(trees())
        drafts = [[response[-1], *data.draw(st.tuples(*[token] * len(parents)))] for response in responses]
        tree = verify_input(topk, [parents] * len(requests), drafts)
        logits = torch.randn(len(requests) * tree.draft_token_num, VOCAB)
        found = logits.clone()
        penalties.apply(found, batch, tree)
        for row in range(len(logits)):
            request, node = divmod(row, tree.draft_token_num)
            response = [*responses[request], *(drafts[request][each] for each in path_to(parents, node))]
            assert torch.equal(found[row], upstream(logits[row], requests[request], response))
        roots = logits[:: tree.draft_token_num].clone()
        penalties.apply(roots, batch)
        assert torch.equal(roots, found[:: tree.draft_token_num])


@given(st.data())
def test_counts_are_of_who_holds_the_slot(data: st.DataObject) -> None:
    """Requests begin, are retracted, resume from what the host knows, and end, in any order, in each other's slots."""
    penalties, free = Penalties(SLOTS, VOCAB, "cpu"), list(range(SLOTS))
    running: dict[Request, Tokens] = {}
    waiting = [Request(data.draw(factors), [3], -1) for _ in range(6)]
    for event in data.draw(st.lists(st.sampled_from(["prefill", "step", "retract", "end"]), min_size=6, max_size=16)):
        chosen = data.draw(st.sampled_from(list(running))) if running else None
        if event == "prefill" and waiting and free:
            begun = [waiting.pop() for _ in range(min(data.draw(st.integers(1, 2)), len(waiting), len(free)))]
            for request in begun:
                request.req_pool_idx = free.pop(data.draw(st.integers(0, len(free) - 1)))
            penalties.begin(Batch(begun))
            firsts = [data.draw(token) for _ in begun]
            penalties.count(Batch(begun), torch.tensor(firsts))
            running |= {request: [*request.output_ids, first] for request, first in zip(begun, firsts, strict=True)}
        elif event == "step" and running:
            news = [data.draw(token) for _ in running]
            penalties.count(Batch(list(running)), torch.tensor(news))
            for response, new in zip(running.values(), news, strict=True):
                response.append(new)
        elif chosen is not None:
            known = running.pop(chosen)
            free.append(chosen.req_pool_idx)
            if event == "retract":  # before the newest was on the host
                chosen.output_ids, chosen.req_pool_idx = known[:-1], None  # type: ignore[assignment]
                waiting.append(chosen)
            chosen.ended = event == "end"
        check(penalties, list(running), list(running.values()))


def test_nothing_is_held_while_nobody_asks() -> None:
    penalties = Penalties(SLOTS, VOCAB, "cpu")
    modest, eager = Request((0.0, 0.0, 1.0), [3], 0), Request((0.5, 0.0, 1.0), [3], 1, [4, 4])
    penalties.begin(Batch([modest]))
    assert penalties.bytes == 0
    penalties.begin(Batch([eager]))
    assert 0 < penalties.bytes < 4096
    eager.ended = True
    penalties.begin(Batch([modest]))
    assert penalties.bytes == 0


@pytest.mark.slow
def test_the_kernel_of_gpus_agrees_by_tritons_interpreter() -> None:
    """In a process of its own: the interpreter is chosen at import."""
    words = [sys.executable, "-m", "tests.engine.sampling.gpu_penalties", "--small"]
    ended = subprocess.run(words, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("right") == 9


@pytest.mark.slow
def test_the_kernel_compiles_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For Hopper: what the interpreter lets pass, the compiler may refuse. Products are not fused with sums."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from tlt_server.engine.sampling.penalty_kernels import BLOCK, _penalise_block

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"logits": "*fp32", "counts": "*i32", "factors": "*fp32", "rows": "*i64", "paths": "*i64"}
    types |= dict.fromkeys(("nodes", "depth", "vocab", "stride"), "i32") | {"BLOCK": "constexpr"}
    source = ASTSource(_penalise_block, types, {(9,): BLOCK})
    ptx = compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False}).asm["ptx"]
    assert "div.rn.f32" in ptx
    assert "fma" not in ptx
