"""The lossless benchmark's own parts: its laws, the power of its test, its judge of divergences, its bulk client."""

import itertools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lib import servers
from benchmarks.lib.command import Models
from benchmarks.lib.divergences import TIE_ULPS, Divergence, divergence_figures, divergences, first_difference
from benchmarks.lib.laws import Case, cases, law, p_values, rounding_shift
from benchmarks.models import peaked
from benchmarks.models.workloads import WORKLOADS
from tlt_server.demo.lossless import REST, Tokens
from tlt_server.demo.reference import Reference
from tlt_server.engine.sampling.filters import filter_probs

VOCAB, SAMPLES = 48, 4_000


def logits_of(sequences: Sequence[Tokens]) -> torch.Tensor:
    """A toy target: what follows depends on the last two tokens."""
    seeds = [97 * each[-1] + (each[-2] if len(each) > 1 else 0) for each in sequences]
    return torch.stack([3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


LIKELY = logits_of([(7,)])[0].argsort(descending=True).tolist()
CASES = cases(LIKELY)
BY_NAME = {case.name: case for case in CASES}


def draw(case: Case, count: int, length: int, logits: torch.Tensor | None = None) -> list[Tokens]:
    """Responses of a server that knows the case; `logits` of its own, [VOCAB], make it a wrong one."""
    random = torch.Generator().manual_seed(1)
    responses: list[Tokens] = [()] * count
    for place in range(length):
        rows = logits_of([(7, *each) for each in responses]) if logits is None else logits.repeat(count, 1)
        tokens = torch.multinomial(case.probs(rows, place), 1, generator=random)[:, 0].tolist()
        ended = [case.stop is not None and case.stop in each for each in responses]
        responses = [
            each if over else (*each, token) for each, token, over in zip(responses, tokens, ended, strict=True)
        ]
    return responses


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_filters_as_the_server_does(case: Case) -> None:
    probs = (4 * torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(2))).softmax(-1)
    filters = (
        torch.tensor([case.top_k if case.top_k > 0 else 1 << 30] * 64),
        torch.tensor([case.top_p] * 64),
        torch.tensor([case.min_p] * 64),
    )
    torch.testing.assert_close(case._filtered(probs.double()).float(), filter_probs(probs, *filters))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_right_samples_pass(case: Case) -> None:
    laws = {length: law(case, (7,), logits_of, length, 5 / SAMPLES) for length in (2, 4)}
    assert all(sum(each.values()) == pytest.approx(1) for each in laws.values())
    assert min(p_values(case, draw(case, SAMPLES, 4), laws).values()) > 0.001


@pytest.mark.parametrize(
    ("claimed", "done"),
    [
        ("temperature 1", "temperature 0.7"),
        ("top_k 5", "temperature 1"),
        ("top_p 0.8", "top_k 5"),
        ("min_p 0.1", "top_p 0.8"),
        ("logit_bias", "temperature 1"),
        ("min_new_tokens", "temperature 1"),
    ],
)
def test_wrong_samples_fail(claimed: str, done: str) -> None:
    case = BY_NAME[claimed]
    laws = {3: law(case, (7,), logits_of, 3, 5 / SAMPLES)}
    assert p_values(case, draw(BY_NAME[done], SAMPLES, 3), laws)[3] < 1e-6


def test_a_law_that_forgets_the_context_fails() -> None:
    case = BY_NAME["temperature 1"]
    laws = {2: law(case, (7,), logits_of, 2, 5 / SAMPLES)}
    assert p_values(case, draw(case, SAMPLES, 2, logits_of([(7,)])[0]), laws)[2] < 1e-6


def test_stop_token_is_held_back_and_then_ends() -> None:
    case = Case("stop", stop=3, min_new_tokens=2)
    outcomes = [each for each in law(case, (7,), logits_of, 4, 1e-4) if each != REST]
    assert all(3 not in each[:2] for each in outcomes)
    assert any(each[2:] == (3, 3) for each in outcomes)
    assert case.whole((1, 2, 3), 4) == (1, 2, 3, 3)


def test_rounding_shift_predicts_the_statistic() -> None:
    """A coin said to be fair that lands 0.51 raises chi-squared of 10,000 throws by 4; two outcomes' deviation is 2."""
    shift = rounding_shift({(0,): 0.5, (1,): 0.5, REST: 0.0}, {(0,): 0.51, (1,): 0.49, REST: 0.0}, 10_000)
    assert shift == pytest.approx(4 / 2)


def test_params_hold_what_is_not_neutral() -> None:
    assert BY_NAME["temperature 1"].params(7) == {"max_new_tokens": 7, "temperature": 1.0, "ignore_eos": True}
    assert json.loads(json.dumps(BY_NAME["logit_bias"].params(7)))["logit_bias"] == {
        str(LIKELY[0]): -1.5,
        str(LIKELY[40]): 5.0,
    }
    assert BY_NAME["min_new_tokens"].params(7)["stop_token_ids"] == [LIKELY[1]]


@given(st.lists(st.integers(0, 3)).map(tuple), st.lists(st.integers(0, 3)).map(tuple))
def test_first_difference(left: Tokens, right: Tokens) -> None:
    i = first_difference(left, right)
    assert (i is None) == (left == right)
    if i is not None:
        assert left[:i] == right[:i]
        assert left[i : i + 1] != right[i : i + 1]


class Fixed(Reference):
    """Says the same after every sequence."""

    def __init__(self, *logits: float) -> None:
        self._row = torch.tensor([logits])

    @property
    def rounded(self) -> Reference:
        return self

    def logits(self, sequences: Sequence[Tokens]) -> torch.Tensor:
        return self._row.repeat(len(sequences), 1)

    def logits_in_parts(self, sequence: Tokens, size: int) -> torch.Tensor:
        return self._row[0]


def test_divergences_are_measured_in_steps_of_bfloat16() -> None:
    target = Fixed(10.0, 9.875, 2.0)
    found = divergences(target, [(0,)] * 4, [(0, 1), (0, 0), (0,), ()], [(0, 1), (0, 1), (2,), (1,)])
    assert found == [Divergence(0.125, 2**-4), Divergence(8.0, 2**-4)]
    figures = divergence_figures("chain", found)
    assert figures == {"greedy_divergences_chain": 2, "greedy_non_ties_chain": 1, "greedy_largest_gap_ulps_chain": 128}


@pytest.mark.slow
def test_past_the_end_of_a_response_a_tie_is_what_bfloat16_makes_of_it() -> None:
    """Two tokens beyond its end the target is asked for what it never learnt; in bfloat16, read in parts of other
    sizes than the judge reads, it says another token, ten steps less likely."""
    workload = WORKLOADS["demo"]
    target = Reference(workload.models / "target")
    prompt = Models(workload.models / "target", workload.models / "drafter", workload).prompts(23)[-1]
    response = greedy(target, prompt, 67)
    rounded = int(target.rounded.logits_in_parts(prompt + response[:-1], 3).argmax())
    least = int(target.logits([prompt + response[:-1]])[0].argmin())
    ways = [(*response[:-1], rounded), (*response[:-1], least)]
    by_rounding, wrong = divergences(target, [prompt] * 2, [response] * 2, ways)
    assert by_rounding.in_ulps > TIE_ULPS
    assert by_rounding.tie
    assert not wrong.tie


def greedy(target: Reference, prompt: Tokens, count: int) -> Tokens:
    response: Tokens = ()
    while len(response) < count:
        response += (int(target.logits([prompt + response])[0].argmax()),)
    return response


def test_a_response_that_is_the_beginning_of_another_is_an_error() -> None:
    with pytest.raises(ValueError, match="ended after 1 tokens"):
        divergences(Fixed(1.0, 0.0), [(0,)], [(0,)], [(0, 1)])


def test_the_peaked_model_is_peaked_and_its_drafter_is_often_right(tmp_path: Path) -> None:
    made = peaked.make(tmp_path, vocab=1_024, common=64)
    target = Reference(made.target, torch.float32, "cpu")
    prompts = list(itertools.islice(itertools.permutations(made.common, 4), 0, 50_000, 1_000))
    probs = target.logits(prompts).softmax(-1)
    embed = target.model.model.embed_tokens.weight
    drafts = (embed[[prompt[-1] for prompt in prompts]] @ target.model.lm_head.weight.T).argmax(-1)
    right = probs.gather(1, drafts[:, None]).mean()
    assert 0.5 < right < 0.8
    assert probs.topk(6).values.sum(-1).mean() > 0.9
    # another token three places back matters, or attention to a wrong ancestor would go unseen
    swapped = target.logits([(made.common[-1], *prompt[1:]) for prompt in prompts]).softmax(-1)
    assert ((swapped - probs) ** 2 / probs).sum(-1).mean() > 0.01


def test_a_failed_call_fails_its_requests_alone() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        prompts = json.loads(request.content)["input_ids"]
        if [9] in prompts:
            return httpx.Response(500)
        ends = ["abort" if prompt == [8] else "length" for prompt in prompts]
        metas = [{"finish_reason": {"type": end}} for end in ends]
        pairs = zip(prompts, metas, strict=True)
        return httpx.Response(200, json=[{"output_ids": prompt, "meta_info": meta} for prompt, meta in pairs])

    server = servers.Server("http://server", 0.0, http=httpx.Client(transport=httpx.MockTransport(answer)))
    got = server.ask([((token,), {}) for token in (1, 2, 9, 3, 8, 4)], at_once=4, together=2)
    assert [each and servers.tokens_of(each) for each in got] == [(1,), (2,), None, None, None, (4,)]
    assert (server.requests, server.failed) == (6, 3)


def test_plain_sees_what_the_others_gave() -> None:
    def visit(arm: str, others: Mapping[str, Future[str]]) -> str:
        return arm + "".join(done.result() for done in others.values())

    assert servers.on_each_arm(visit) == {"chain": "chain", "tree": "treechain", "plain": "plainchaintreechain"}


def test_stand_ins_import_to_any_depth() -> None:
    """In a process of its own, since they stay in its import system."""
    script = (
        "import benchmarks.gpu.stand_ins; import deep_gemm.utils.layout; from deep_gemm import Buffer\n"
        "class Own(Buffer): pass\n"
        "Own(1, key=2); assert not hasattr(deep_gemm, '__version__')\n"
        "try: import deep_gem\n"
        "except ImportError: pass\n"
        "else: raise SystemExit('a stand-in for anything')\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], check=True)


def test_graphs_are_read_off_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = ["captured verification of 4 tokens", "Prefill batch, cuda graph: False"]
    lines += [f"Decode batch, cuda graph: {used}" for used in (True, False)]
    log.write_text("\n".join(lines))
    figures = servers.graph_figures("tree", log)
    assert figures["graph_verify_tree"] == 1
    assert figures["graph_draft_tree"] == 0
    assert (figures["logged_batches_tree"], figures["logged_batches_without_graph_tree"]) == (2, 1)
