"""From a step's spans and its work to figures, and from figures to tables.

A *term* is a part of the step: a phase's group of kernels, or the GPU's idle time. The terms of a step add up to it.
"""

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rich.table import Table

from benchmarks.lib.profiling.kernels import GROUPS
from benchmarks.lib.profiling.limits import Place, Work
from benchmarks.lib.profiling.traces import PHASES, Call, Span, Step
from benchmarks.lib.tables import origin
from tlt_server.errors import ConfigError
from tlt_server.results import Figures, Result

LARGEST = 5
UPSTREAM = "upstream_"
CHOOSING = ("logits", "sampling", "tree")
"""Groups of kernels that choose tokens, in any phase."""
_PHASE_WORDS = {
    "decode": "target",
    "verify": "verify",
    "sampling": "after the logits",
    "extend": "draft-extend",
    "between": "between steps",
    "draft": "draft",
}
_IDLE_WORDS = {
    "graphs": "GPU idle between the kernels of a CUDA graph",
    "launches": "GPU idle between launches, mostly waiting for the CPU",
}
_TERM = re.compile(r"term_ms_([a-z]+)_([a-z]+)_([a-z0-9_]+)_batch_(\d+)")


class Term(NamedTuple):
    """A part of one side's step at one batch size, as read from figures. Milliseconds; gigabytes; teraoperations."""

    phase: str
    group: str
    ms: float
    limit_ms: float
    launches: float
    gigabytes: float
    teraops: float

    @property
    def excess(self) -> float:
        """Milliseconds above the physical limit."""
        return self.ms - self.limit_ms

    @property
    def words(self) -> str:
        if self.phase == "idle":
            return _IDLE_WORDS[self.group]
        return f"{_PHASE_WORDS[self.phase]}: {GROUPS[self.group]}"


def figures_of(
    suffix: str,
    steps: Sequence[Step],
    work: Mapping[Place, Sequence[Work]],
    step_ms: float,
    bandwidth: float,
    peak: float,
) -> Figures:
    """A profile's figures; each is the median over the steps.

    Args:
        suffix: of their names: the side and the batch size.
        step_ms: a step's time while nothing was recorded. The recorder slows the CPU and stretches gaps, not kernels:
            the GPU's idle time is what the kernels leave of this time, not what the trace shows.
        bandwidth, peak: of the card, in TB/s and TFLOP/s.

    Raises:
        ConfigError: there is work for which the trace has no kernel.
    """
    parts = _terms(suffix, steps, work, bandwidth, peak)
    busy, limit = (sum(v for n, v in parts.items() if n.startswith(kind)) for kind in ("term_ms_", "term_limit_ms_"))
    idle = max(0.0, step_ms - busy)
    inside = min(idle, _median(steps, lambda span: span.idle and span.inside_graph))
    return parts | {
        f"term_ms_idle_graphs_{suffix}": inside,
        f"term_ms_idle_launches_{suffix}": idle - inside,
        f"step_ms_{suffix}": step_ms,
        f"busy_ms_{suffix}": busy,
        f"limit_ms_{suffix}": limit,
        f"traced_step_ms_{suffix}": statistics.median(step.period for step in steps) / 1e3,
        **_traced_idle(suffix, steps),
    }


def launching_figures(suffix: str, steps: Sequence[Step], waits: Sequence[Call]) -> Figures:
    """What the CPU does for a step: kernels that it launches, and how long it works and waits, while recorded.

    Args:
        waits: for the GPU, of the whole trace; empty where they were not recorded, and then nothing is said of them.
    """
    began, ended = steps[0].spans[0].start, steps[-1].spans[-1].end
    kernels = [{span.kernel for span in step.spans if not span.idle} for step in steps]
    loose = [sum(kernel.graph is None for kernel in each) for each in kernels]
    figures: Figures = {f"loose_kernels_{suffix}": statistics.median(loose)}
    waited = [
        min(wait.end, ended) - max(wait.start, began) for wait in waits if wait.start < ended and wait.end > began
    ]
    if waits:
        working = ended - began - sum(waited)
        figures |= {
            f"traced_waits_{suffix}": len(waited) / len(steps),
            f"traced_waited_ms_{suffix}": sum(waited) / len(steps) / 1e3,
            f"traced_cpu_ms_{suffix}": working / len(steps) / 1e3,
        }
    return figures


def _terms(
    suffix: str, steps: Sequence[Step], work: Mapping[Place, Sequence[Work]], bandwidth: float, peak: float
) -> Figures:
    """The figures of each term that is not idle time."""
    ms = {place: _median(steps, lambda span, place=place: _place(span) == place) for place in _places(steps)}
    if missing := [place for place, parts in work.items() if parts and not ms.get(place)]:
        raise ConfigError(f"{suffix}: the trace has no kernels for {missing}: their names are not known to kernels.py")
    figures: Figures = {}
    for place, time in ms.items():
        parts, name = work.get(place, ()), "_".join((*place, suffix))
        figures |= {
            f"term_ms_{name}": time,
            f"term_limit_ms_{name}": sum(part.limit_ms(bandwidth, peak) for part in parts),
            f"term_launches_{name}": statistics.median(_launches(step)[place] for step in steps),
            f"term_gb_{name}": sum(part.bytes for part in parts) / 1e9,
            f"term_tflop_{name}": sum(part.operations for part in parts) / 1e12,
        }
    return figures


def _place(span: Span) -> Place:
    return span.phase, span.group


def _places(steps: Sequence[Step]) -> list[Place]:
    found = {_place(span) for step in steps for span in step.spans if not span.idle}
    return sorted(found, key=lambda place: (PHASES.index(place[0]), list(GROUPS).index(place[1])))


def _launches(step: Step) -> Counter[Place]:
    return Counter(_place(span) for span in step.spans if not span.idle)


def _median(steps: Sequence[Step], chosen: Callable[[Span], bool]) -> float:
    """Milliseconds of a step's chosen spans."""
    return statistics.median(sum(s.end - s.start for s in step.spans if chosen(s)) for step in steps) / 1e3


def _traced_idle(suffix: str, steps: Sequence[Step]) -> Figures:
    """Where the GPU waited for launches, while recorded: the phase of the kernels that it waited for."""
    idle = {
        phase: _median(steps, lambda span, phase=phase: span.idle and not span.inside_graph and span.phase == phase)
        for phase in PHASES
    }
    return {f"traced_idle_ms_{phase}_{suffix}": time for phase, time in idle.items() if time}


def sampling_ratios(figures: Mapping[str, float]) -> Figures:
    """What choosing tokens takes of a step, milliseconds of kernels: logits copied, laws filtered, tokens drawn, drafts
    chosen and accepted; and of an arm over SGLang's own, in which the sampler is upstream's."""
    made: Figures = {}
    for side, batch in sides(figures):
        chosen = (t.ms for t in terms(figures, side, batch) if t.group in CHOOSING or t[:2] == ("sampling", "copies"))
        made[f"sampling_ms_{side}_batch_{batch}"] = sum(chosen)
    for name, theirs in list(made.items()):
        side, _, batch = name.removeprefix("sampling_ms_").rpartition("_batch_")
        if side.startswith(UPSTREAM):
            ours = made[f"sampling_ms_{side.removeprefix(UPSTREAM)}_batch_{batch}"]
            made[f"sampling_ratio_batch_{batch}"] = ours / theirs
    return made


def sides(figures: Mapping[str, float]) -> list[tuple[str, int]]:
    """The sides and batch sizes that were profiled, in order."""
    found = (re.fullmatch(r"step_ms_([a-z0-9_]+)_batch_(\d+)", name) for name in figures)
    return [(match[1], int(match[2])) for match in found if match]


def terms(figures: Mapping[str, float], side: str, batch: int) -> list[Term]:
    """A step's terms, farthest above the physical limit first."""
    found = []
    for match in filter(None, map(_TERM.fullmatch, figures)):
        phase, group, *of = match.groups()
        if of == [side, str(batch)]:
            name = f"{phase}_{group}_{side}_batch_{batch}"
            rest = [figures.get(f"term_{each}_{name}", 0) for each in ("limit_ms", "launches", "gb", "tflop")]
            found.append(Term(phase, group, figures[match[0]], *rest))
    return sorted(found, key=lambda term: -term.excess)


def as_table(figures: Mapping[str, float], side: str, batch: int) -> Table:
    """Every term of one step, for a terminal."""
    of = f"{side}_batch_{batch}"
    step, limit = figures[f"step_ms_{of}"], figures[f"limit_ms_{of}"]
    table = Table(title=f"{side}, batch {batch}: {step:.2f} ms a step, physical limit {limit:.2f} ms", show_footer=True)
    table.add_column("term", footer="sum")
    for name, total in (("ms", step), ("limit", limit), ("above", step - limit)):
        table.add_column(name, footer=f"{total:.3f}", justify="right")
    for name in ("launches", "GB", "TFLOP"):
        table.add_column(name, justify="right")
    for term in terms(figures, side, batch):
        numbers = [f"{value:.3f}" for value in (term.ms, term.limit_ms, term.excess)]
        table.add_row(term.words, *numbers, f"{term.launches:.0f}", f"{term.gigabytes:.3f}", f"{term.teraops:.3f}")
    return table


def as_markdown(result: Result) -> str:
    """What a step costs, phase by phase, and its largest terms above the physical limit, from a kept result alone."""
    figures = result.figures
    tables = [_phases_markdown(figures), _launches_markdown(figures), _terms_markdown(figures)]
    return "\n\n".join((origin(result), *filter(None, tables)))


def _phases_markdown(figures: Mapping[str, float]) -> str:
    heads = ["step", "physical limit", *(_PHASE_WORDS[phase] for phase in PHASES), "GPU idle"]
    lines = [_row(["ms", *heads]), _row(["---", *["--:"] * len(heads)])]
    for side, batch in sides(figures):
        by_phase: dict[str, float] = defaultdict(float)
        for term in terms(figures, side, batch):
            by_phase[term.phase] += term.ms
        totals = [figures[f"{name}_{side}_batch_{batch}"] for name in ("step_ms", "limit_ms")]
        parts = [f"{by_phase[phase]:.2f}" if phase in by_phase else "" for phase in (*PHASES, "idle")]
        lines.append(_row([f"{side}, batch {batch}", *(f"{total:.2f}" for total in totals), *parts]))
    return "\n".join(lines)


def _launches_markdown(figures: Mapping[str, float]) -> str:
    """Empty for a profile of before these figures were kept."""
    names = ("loose_kernels", "traced_cpu_ms", "traced_waited_ms", "traced_waits")
    heads = [
        "",
        "GPU idle, ms",
        "kernels outside of CUDA graphs",
        "while recorded: CPU works, ms",
        "waits, ms",
        "waits",
    ]
    lines = [_row(heads), _row(["---", *["--:"] * 5])]
    for side, batch in sides(figures):
        of = f"{side}_batch_{batch}"
        if f"loose_kernels_{of}" in figures:
            idle = figures[f"term_ms_idle_graphs_{of}"] + figures[f"term_ms_idle_launches_{of}"]
            found = [figures.get(f"{name}_{of}") for name in names]
            shown = [
                "" if each is None else f"{each:.{places}f}" for each, places in zip(found, (0, 2, 2, 1), strict=True)
            ]
            lines.append(_row([f"{side}, batch {batch}", f"{idle:.2f}", *shown]))
    return "\n".join(lines) if len(lines) > 2 else ""


def _terms_markdown(figures: Mapping[str, float]) -> str:
    lines = [_row(["", "largest terms above the limit", "ms", "limit", "above"]), _row(["---", "---", *["--:"] * 3])]
    for side, batch in sides(figures):
        for rank, term in enumerate(terms(figures, side, batch)[:LARGEST], 1):
            numbers = [f"{value:.2f}" for value in (term.ms, term.limit_ms, term.excess)]
            lines.append(_row([f"{side}, batch {batch}" if rank == 1 else "", f"{rank}. {term.words}", *numbers]))
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
