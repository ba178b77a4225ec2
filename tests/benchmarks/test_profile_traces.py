"""Cutting traces: slices of real ones, and synthetic ones whose every microsecond must be accounted for.

`profile_traces` is a folder of recordings, cut from traces of SGLang 0.5.17 on one H200: 7B shape, bfloat16,
flashinfer, temperature 1, accept length simulated. Kept are the target's second to fourth pass and all kernels between;
of the CPU, the graph launches, and SGLang's and flashinfer's Python functions of more than 30 µs; of an event, what
traces.py reads.
"""

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lib.profiling.breakdown import launching_figures
from benchmarks.lib.profiling.kernels import GROUPS, groups_of
from benchmarks.lib.profiling.traces import Call, Kernel, Step, busiest_call, cut, read
from tlt_server.errors import ConfigError

TRACES = Path(__file__).parent / "profile_traces"
LAYER = ["qkv_gemm", "rope", "PagedKVCache", "o_gemm", "up_gemm", "act_and_mul", "down_gemm"]


def steps_of(name: str) -> list[Step]:
    return cut(read(TRACES / f"{name}.json.gz").kernels, layers=28)


def launches(step: Step) -> Counter[tuple[str, str]]:
    return Counter((span.phase, span.group) for span in step.spans if not span.idle)


def assert_partition(step: Step) -> None:
    assert all(one.end == other.start for one, other in pairwise(step.spans))
    assert all(span.end > span.start for span in step.spans)
    assert sum(span.end - span.start for span in step.spans) == pytest.approx(step.period)


def test_a_plain_step() -> None:
    steps = steps_of("plain-1")
    assert [step.layer_passes for step in steps] == [[28], [28]]
    for step in steps:
        assert_partition(step)
        assert step.period == pytest.approx(4830, abs=10)
        found = launches(step)
        assert found["decode", "attention"] == 2 * 28  # and the merge of its parts
        assert found["decode", "kv"] == 28
        assert found["decode", "mlp"] == 3 * 28  # the second in two kernels
        assert found["decode", "projections"] == 3 * 28
        assert found["decode", "head"] == found["decode", "logits"] == 1
        assert {phase for phase, _ in found} == {"decode", "sampling", "between"}


def test_a_step_with_a_tree() -> None:
    steps = steps_of("tree_5_4_16-1")
    assert [step.layer_passes for step in steps] == [[28, 1, 4], [28, 1, 4]]
    for step in steps:
        assert_partition(step)
        found = launches(step)
        passes = {"verify": 28, "extend": 1, "draft": 4}
        assert {phase: found[phase, "attention"] // 2 for phase in passes} == passes
        assert {phase: found[phase, "head"] for phase in passes} == {"verify": 1, "extend": 1, "draft": 4}
        assert {phase: found[phase, "input"] // 2 for phase in passes} == {"verify": 0, "extend": 1, "draft": 4}
        accepting = {s.kernel.name.split("<")[0] for s in step.spans if (s.phase, s.group) == ("sampling", "tree")}
        assert "void flashinfer::sampling::TreeSpeculativeSamplingTargetOnly" in accepting
        assert not [span.kernel.name for span in step.spans if span.group == "other"]


def test_what_the_cpu_did_meanwhile() -> None:
    kernels, calls, _ = read(TRACES / "tree_5_4_16-1.json.gz")
    idle = [
        s for step in cut(kernels, 28) for s in step.spans if s.idle and not s.inside_graph and s.phase == "between"
    ]
    found = busiest_call(calls, idle)
    assert found
    assert found[0] == "sglang/srt/layers/attention/flashinfer_backend.py: common_template"
    assert 1 / 3 < found[1] < 1 / 2
    assert busiest_call([], idle) is None


def test_a_matmul_is_known_by_its_place() -> None:
    names = ["fc_gemm", *LAYER, "splitKreduce", "head_gemm", "direct_copy", "direct_copy", "fc_gemm", *LAYER]
    layer = ["projections", "elementwise", "attention", "projections", "mlp", "elementwise", "mlp"]
    assert groups_of(names) == ["input", *layer, "mlp", "head", "logits", "copies", "input", *layer]
    assert groups_of(["splitKreduce", "never seen"]) == ["other", "other"]
    assert set(groups_of(names)) <= set(GROUPS)


def kernels_from(plan: list[tuple[str, int, int, int, int | None]]) -> list[Kernel]:
    return sorted((Kernel(name, start, start + length, stream, graph) for name, start, length, stream, graph in plan),
                  key=lambda each: each.start)  # fmt: skip


@st.composite
def synthetic(draw: st.DrawFn) -> list[Kernel]:
    """Three steps, each a graph of one layer and its head, loose kernels after it, and some on another stream."""
    plan, now = [], 0
    for graph in range(3):
        for name in [*LAYER, "head_gemm"]:
            plan.append((name, now := now + draw(st.integers(0, 3)), length := draw(st.integers(1, 5)), 1, graph))
            now += max(1, length - draw(st.integers(0, 2)))  # the next may start before this one ends
        for name in ["softmax_SoftMax", "reduce_kernel", "index", "Memcpy"]:
            plan.append((name, now := now + draw(st.integers(0, 20)), length := draw(st.integers(1, 5)), 1, None))
            now += length
    aside = draw(st.lists(st.tuples(st.integers(0, now), st.integers(1, 9)), max_size=8))
    return kernels_from([*plan, *(("Memcpy", start, length, 2, None) for start, length in aside)])


@given(synthetic())
def test_every_microsecond_is_accounted_for_once(kernels: list[Kernel]) -> None:
    starts = [each.start for each in kernels if each.name == LAYER[0]]
    steps = cut(kernels, layers=1)
    assert len(steps) == 2
    for step, (begin, end) in zip(steps, pairwise(starts), strict=True):
        assert_partition(step)
        assert (step.spans[0].start, step.spans[-1].end) == (begin, end)
        within = [each for each in kernels if begin <= each.start < end]
        busy = {tick for each in within for tick in range(int(each.start), int(min(each.end, end)))}
        assert sum(span.end - span.start for span in step.spans if not span.idle) == len(busy)
        by_phase = Counter[str]()
        for span in step.spans:
            by_phase[span.phase] += int(span.end - span.start)
        assert sum(by_phase.values()) == step.period
        head = next(each for each in within if each.name == "head_gemm")
        assert all(span.end <= head.end for span in step.spans if span.idle and span.inside_graph)


def test_an_idle_gpu_waits_for_the_kernel_that_ends_it() -> None:
    layer = [(name, 10 * i, 8, 1, 0) for i, name in enumerate([*LAYER, "head_gemm"])]
    again = [(name, start + 200, length, 1, 1) for name, start, length, _, _ in layer]
    (step,) = cut(kernels_from([*layer, ("SoftMax", 100, 10, 1, None), ("index", 150, 10, 1, None), *again]), 1)
    idle = [(s.phase, s.kernel.name, s.end - s.start) for s in step.spans if s.idle and not s.inside_graph]
    assert idle == [("sampling", "SoftMax", 22), ("between", "index", 40), ("decode", LAYER[0], 40)]
    assert [span.end - span.start for span in step.spans if span.inside_graph and span.idle] == [2] * 7


def test_a_trace_without_the_targets_graphs_is_refused() -> None:
    kernels = kernels_from([("act_and_mul", 10 * i, 5, 1, i) for i in range(4)])
    with pytest.raises(ConfigError, match="0 CUDA graphs of 28 layers"):
        cut(kernels, layers=28)
    two, others = [*LAYER, *LAYER], [(name, 100 + i, 1, 1, i) for i, name in enumerate(LAYER[:4], 1)]
    twice = [(name, start + i, 1, 1, graph) for graph, start in ((0, 0), (9, 200)) for i, name in enumerate(two)]
    with pytest.raises(ConfigError, match="5 CUDA graphs"):
        cut(kernels_from([*twice, *others]), layers=2)


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", gzip.compress(b"[")[:-3], gzip.compress(b"{}"), gzip.compress(b"[")],
    # by name: gzip writes the time down, and pytest's workers would not collect the same tests
    ids=["empty", "no gzip", "cut short", "no events", "no JSON"],
)
def test_a_damaged_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.json.gz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="damaged"):
        read(path)
    with pytest.raises(ConfigError, match="missing"):
        read(tmp_path / "absent")


def test_a_trace_without_a_gpu_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [{"ph": "X", "name": "a", "cat": "cpu_op"}]}).encode()))
    with pytest.raises(ConfigError, match="no kernel"):
        read(path)


def test_waits_for_the_gpu_are_the_schedulers_own(tmp_path: Path) -> None:
    """Another thread's say nothing of a step."""
    thread = {"tid": 1, "cat": "cuda_runtime"}
    events = [
        {"name": "gemm", "cat": "kernel", "ts": 0, "dur": 9, "args": {"correlation": 7, "stream": 1}},
        thread | {"name": "cudaGraphLaunch", "ts": 0, "dur": 2, "args": {"correlation": 7}},
        thread | {"name": "cudaStreamSynchronize", "ts": 5, "dur": 3},
        thread | {"name": "cudaEventSynchronize", "ts": 3, "dur": 1},
        thread | {"name": "cudaLaunchKernel", "ts": 4, "dur": 1},
        thread | {"name": "cudaDeviceSynchronize", "ts": 1, "dur": 8, "tid": 2},
    ]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    assert [tuple(wait) for wait in read(path).waits] == [
        ("cudaEventSynchronize", 3, 4),
        ("cudaStreamSynchronize", 5, 8),
    ]


def test_what_the_cpu_does_for_a_step() -> None:
    steps = steps_of("plain-1")
    began, ended = steps[0].spans[0].start, steps[-1].spans[-1].end
    waits = [
        Call("sync", began - 50, began + 100),
        Call("sync", began + 500, began + 700),
        Call("sync", ended, ended + 9),
    ]
    found = launching_figures("x", steps, waits)
    assert found["loose_kernels_x"] < 40
    assert found["traced_waits_x"] == 1
    assert found["traced_waited_ms_x"] == pytest.approx(0.15)
    assert found["traced_cpu_ms_x"] == pytest.approx((ended - began - 300) / 2 / 1e3)
    assert launching_figures("x", steps, []).keys() == {"loose_kernels_x"}
