"""Reads a torch-profiler trace of SGLang's scheduler, and cuts it into decode steps and phases.

A step goes from the start of the target's pass to the start of its next one. Its phases, on the stream of that pass:

    decode | verify   the target's CUDA graph; of verification also what prepares it, after the tree is built
    sampling          from the target's logits to the tokens: the law, drawing, acceptance
    extend            the drafter's CUDA graph over the accepted tokens, and the choice of the first proposals
    between           handing over to the next step, and preparing it
    draft             the drafter's CUDA graph, and building the tree

Every microsecond of a step belongs to one span: to the kernel that ran (the first to start, where streams overlap), or
to the kernel that the GPU waited for.
"""

import gzip
import json
import re
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lib.profiling.kernels import groups_of, layer_passes
from tlt_server.errors import ConfigError

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
PHASES = ("decode", "verify", "sampling", "extend", "between", "draft")


class Kernel(NamedTuple):
    """A kernel, copy or fill. Times in µs; `graph` is the launch of the CUDA graph that it is part of, if of any."""

    name: str
    start: float
    end: float
    stream: int
    graph: int | None


class Call(NamedTuple):
    """A function of the scheduler's thread, Python's or CUDA's, while it ran. Times in µs."""

    name: str
    start: float
    end: float


class Span(NamedTuple):
    """A stretch of a step, in µs. `kernel` is what ran, or what an idle GPU waited for.

    group: of the kernel (kernels.py); empty where the GPU was idle.
    inside_graph: a CUDA graph was running: no launch was waited for.
    """

    phase: str
    group: str
    kernel: Kernel
    start: float
    end: float
    inside_graph: bool

    @property
    def idle(self) -> bool:
        return not self.group


@dataclass(frozen=True)
class Step:
    """A step's spans, which partition it, and how many layers each of its graphs ran through, the target's first."""

    spans: Sequence[Span]
    layer_passes: Sequence[int]

    @property
    def period(self) -> float:
        """µs."""
        return self.spans[-1].end - self.spans[0].start


class Trace(NamedTuple):
    """What a trace holds: kernels by start; the scheduler's Python functions, where they were recorded; and its waits
    for the GPU, by start: of every step in which it waits for results, and of others where something is wrong."""

    kernels: list[Kernel]
    calls: list[Call]
    waits: list[Call]


def read(path: Path) -> Trace:
    """Reads a trace.

    Raises:
        ConfigError: the file is missing, damaged, or holds no kernel.
    """
    try:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    except (OSError, EOFError, zlib.error, ValueError, KeyError) as error:
        raise ConfigError(f"trace {path}: missing, damaged or incomplete ({error!r}); record it again") from error
    launches = {e["args"]["correlation"] for e in events if e.get("name") == "cudaGraphLaunch"}
    kernels = sorted((_kernel(e, launches) for e in events if e.get("cat") in ON_GPU), key=lambda each: each.start)
    if not kernels:
        raise ConfigError(f"trace {path}: no kernel in it; record it on a GPU, with the activity GPU")
    scheduler = {e["tid"] for e in events if e.get("name") == "cudaGraphLaunch"}
    of_scheduler = [e for e in events if e.get("dur") is not None and e.get("tid") in scheduler]
    calls = [_call(e) for e in of_scheduler if e.get("cat") == "python_function"]
    waits = [_call(e) for e in of_scheduler if e.get("cat") == "cuda_runtime" and "Synchronize" in e["name"]]
    return Trace(kernels, calls, sorted(waits, key=lambda each: each.start))


def _call(event: dict[str, Any]) -> Call:
    return Call(event["name"], event["ts"], event["ts"] + event["dur"])


def _kernel(event: dict[str, Any], graph_launches: set[int]) -> Kernel:
    launch = event["args"]["correlation"]
    start = event["ts"]
    graph = launch if launch in graph_launches else None
    return Kernel(event["name"], start, start + event["dur"], event["args"]["stream"], graph)


def cut(kernels: Sequence[Kernel], layers: int) -> list[Step]:
    """The whole steps of a trace.

    Args:
        kernels: by start.
        layers: of the target; a CUDA graph that runs through as many is a target's pass.

    Raises:
        ConfigError: fewer than two target passes, or a step with more graphs than a target and a drafter run.
    """
    graphs = _graphs(kernels)
    passes = [graph for graph, parts in graphs.items() if layer_passes([each.name for each in parts]) == layers]
    if len(passes) < 2:
        raise ConfigError(
            f"the trace holds {len(passes)} CUDA graphs of {layers} layers, the target's: it takes two to see a step. "
            "Record more steps, at a batch size that CUDA graphs were captured for"
        )
    stream = graphs[passes[0]][0].stream
    return [
        _step([each for each in kernels if begin <= each.start < end], stream, end)
        for begin, end in pairwise(graphs[graph][0].start for graph in passes)
    ]


def _graphs(kernels: Iterable[Kernel]) -> dict[int, list[Kernel]]:
    """The kernels of each graph launch, in the order of the launches' first kernels."""
    graphs: dict[int, list[Kernel]] = {}
    for each in kernels:
        if each.graph is not None:
            graphs.setdefault(each.graph, []).append(each)
    return graphs


def _step(kernels: Sequence[Kernel], stream: int, end: float) -> Step:
    main = [each for each in kernels if each.stream == stream]
    names = [each.name for each in main]
    groups = dict(zip(main, groups_of(names), strict=True))
    aside = [each for each in kernels if each.stream != stream]
    groups |= dict(zip(aside, groups_of([each.name for each in aside]), strict=True))
    phases = dict(zip(main, _phases(main, [groups[each] for each in main]), strict=True))
    ran = _graphs(main)
    counted = [layer_passes([each.name for each in parts]) for parts in ran.values()]
    extents = [(parts[0].start, max(each.end for each in parts)) for parts in ran.values()]
    return Step(_spans(kernels, phases, groups, extents, end), counted)


def _phases(main: Sequence[Kernel], groups: Sequence[str]) -> list[str]:
    """The phase of each kernel of the target's stream, in a step."""
    graphs = list(_graphs(main))
    if len(graphs) > 3:
        raise ConfigError(f"a step with {len(graphs)} CUDA graphs: only target, draft-extend and draft are known")
    first = {graph: next(i for i, each in enumerate(main) if each.graph == graph) for graph in graphs}
    last = {graph: max(i for i, each in enumerate(main) if each.graph == graph) for graph in graphs}
    total = len(main)
    drafting = first[graphs[2]] if len(graphs) == 3 else total
    chosen = max((i for i in range(drafting) if groups[i] == "sampling"), default=0) + 1
    if len(graphs) == 1:
        bounds = [(last[graphs[0]] + 1, "decode"), (chosen, "sampling"), (total, "between")]
    else:
        built = max((i for i in range(drafting, total) if groups[i] == "tree"), default=total - 1) + 1
        bounds = [(last[graphs[0]] + 1, "verify"), (first[graphs[1]], "sampling")]
        bounds += [(max(chosen, last[graphs[1]] + 1), "extend"), (drafting, "between")]
        bounds += [(built, "draft"), (total, "verify")]
    phases: list[str] = []
    for bound, phase in bounds:
        phases += [phase] * (bound - len(phases))
    return phases


def _spans(
    kernels: Sequence[Kernel],
    phases: dict[Kernel, str],
    groups: dict[Kernel, str],
    extents: Sequence[tuple[float, float]],
    end: float,
) -> list[Span]:
    """The partition. A kernel of another stream takes the phase in which it starts."""
    spans: list[Span] = []
    now, phase = kernels[0].start, phases[kernels[0]]
    for each in kernels:
        phase = phases.get(each, phase)
        inside = any(begin <= now and each.start <= over for begin, over in extents)
        if each.start > now:
            spans.append(Span(phase, "", each, now, each.start, inside))
            now = each.start
        if (until := min(each.end, end)) > now:
            spans.append(Span(phase, groups[each], each, now, until, each.graph is not None))
            now = until
    if end > now:  # the next step's first kernel is what was waited for
        spans.append(Span(phases[kernels[0]], "", kernels[0], now, end, False))
    return spans


def busiest_call(calls: Sequence[Call], stretches: Sequence[Span | Call]) -> tuple[str, float] | None:
    """What the CPU was doing meanwhile: the innermost function that a third of the time was spent in.

    Args:
        stretches: of time, one after another.

    Returns:
        `file: function` and its share of the time; None where no function is in sight.
    """
    starts, ends = [each.start for each in stretches], [each.end for each in stretches]
    waited = [0.0, *accumulate(each.end - each.start for each in stretches)]

    def waited_until(time: float) -> float:
        i = bisect_right(starts, time)
        return waited[i] - max(0.0, ends[i - 1] - time) if i else 0.0

    shares: dict[str, float] = defaultdict(float)
    for call in calls:
        if not call.name.startswith("<"):
            shares[call.name] += (waited_until(call.end) - waited_until(call.start)) / waited[-1]
    wide = [(share, name) for name, share in shares.items() if share >= 1 / 3]
    if not wide:
        return None
    share, name = min(wide)
    return re.sub(r"\(\d+\)", "", name), share
