"""What does a decode step cost, and why? Kernel by kernel, with the GPU's idle time, against the physical limit.

    python -m benchmarks profile --arm 3,1,4 --json benchmarks/results/profile.h200.json
    python -m benchmarks profile --from FOLDER      # the same from traces that --traces FOLDER kept, on any machine

1. serves plain decoding; the arm, and off, by one server with a drafter; plain decoding of random weights, as a
   control; with --upstream SGLang's own arm; at each batch size, records some steps under load (recording.py)
2. cuts each trace into steps, phases and groups of kernels (traces.py, kernels.py)
3. counts what each group has to move and to compute (limits.py), and names what lies farthest above (breakdown.py)
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.markdown import Markdown

from benchmarks.lib.command import out, parser, positive, run, workplace
from benchmarks.lib.comparison import PLAIN
from benchmarks.lib.decoding import Load
from benchmarks.lib.profiling import limits
from benchmarks.lib.profiling.breakdown import (
    UPSTREAM,
    as_markdown,
    as_table,
    figures_of,
    launching_figures,
    sampling_ratios,
)
from benchmarks.lib.profiling.limits import BANDWIDTH, PEAK, Shape, step_work
from benchmarks.lib.profiling.recording import NEW_TOKENS, Recordings, Run, load, record
from benchmarks.lib.profiling.traces import PHASES, Step, Trace, busiest_call, cut, read
from benchmarks.lib.sides import Side, Site, name_of
from benchmarks.lib.strategies import fixed
from tlt_server.config import Arm
from tlt_server.errors import ConfigError
from tlt_server.launch import has_gpu
from tlt_server.results import Figures, Result

MEASURES = ("tlt_server/engine/decode", "tlt_server/engine/graphs")


def analyse(recordings: Recordings, folder: Path, bandwidth: float, peak: float) -> Figures:
    """The figures of all recordings; prints each step.

    Args:
        bandwidth, peak: of the card, in TB/s and TFLOP/s.

    Raises:
        ConfigError: a trace that is damaged, or was not made by these models and this arm.
    """
    target = Shape.of(recordings.target)
    drafter = Shape.of(recordings.drafter, target)
    figures: Figures = {"bandwidth_tb_per_s": bandwidth, "peak_tflop_per_s": peak}
    for each in recordings.runs:
        trace = read(each.trace(folder))
        steps = cut(trace.kernels, target.layers)
        _check_passes(each, steps, target, drafter)
        work = step_work(target, drafter, limits.Load(each.arm, each.batch, each.context, each.accept_length))
        figures |= figures_of(each.suffix, steps, work, each.step_ms, bandwidth, peak)
        figures |= launching_figures(each.suffix, steps, trace.waits)
        figures |= {f"context_{each.suffix}": each.context, f"accept_length_{each.suffix}": each.accept_length}
        out.print(as_table(figures, each.side, each.batch))
        _print_waits(steps, trace)
    return figures | sampling_ratios(figures)


def _check_passes(run: Run, steps: Sequence[Step], target: Shape, drafter: Shape) -> None:
    """That each step ran the graphs that its arm runs: what is counted would be another step's otherwise."""
    expected = [target.layers]
    if run.arm is not None:
        drafting = (run.arm.num_steps - 1) * drafter.layers
        expected += [drafter.layers] + ([drafting] if drafting else [])
    for step in steps:
        if list(step.layer_passes) != expected:
            raise ConfigError(
                f"{run.suffix}: the CUDA graphs of a step run through {step.layer_passes} layers, and those of arm "
                f"{run.arm} would through {expected}: the trace is of other models, or not all graphs were captured"
            )


def _print_waits(steps: Sequence[Step], trace: Trace) -> None:
    """What the CPU was doing while the GPU waited for it, and where it waited for the GPU itself."""
    began, ended = steps[0].spans[0].start, steps[-1].spans[-1].end
    waits = [wait for wait in trace.waits if began <= wait.start < ended]
    if waits and (busiest := busiest_call(trace.calls, waits)):
        name, share = busiest
        each = sum(wait.end - wait.start for wait in waits) / len(steps) / 1e3
        out.print(f"while recorded, the CPU waited {each:.2f} ms for the GPU: {share:.0%} of it in {name}")
    for phase in PHASES:
        idle = [s for step in steps for s in step.spans if s.idle and not s.inside_graph and s.phase == phase]
        each = sum(span.end - span.start for span in idle) / len(steps) / 1e3
        if each > 0.1 and (busiest := busiest_call(trace.calls, idle)):
            name, share = busiest
            out.print(f"while recorded, {each:.2f} ms waited for {phase}: {share:.0%} of it the CPU was in {name}")


def _recorded(arguments: argparse.Namespace, argv: Sequence[str]) -> Result:
    """Records and analyses here."""
    if not has_gpu():
        raise ConfigError("no GPU in sight, and a profile is of one: use --from FOLDER for kept traces")
    arm = Arm.parse(arguments.arm)
    with workplace(arguments) as (models, logs):
        folder = arguments.traces or logs
        folder.mkdir(parents=True, exist_ok=True)
        texts = models.prompts(max(arguments.batches), arguments.context)
        loads = [Load(f"batch_{batch}", texts[:batch], NEW_TOKENS) for batch in arguments.batches]
        tokens = max(arguments.batches) * (arguments.context + NEW_TOKENS + 64)
        site = Site(models.target, models.drafter, logs, arguments.batches, tokens, arguments.upstream)
        # weights without the zeros that the embedded model's shape has: whether they cost the same
        control = Side(f"{PLAIN}_random", flags=("--load-format", "dummy"))
        # up to the largest batch, as if it were the arm's only: what an arm among several is captured for is less
        speculative = fixed({arm: max(arguments.batches)}, max(arguments.batches))
        peers = [Side(f"{UPSTREAM}{name_of(arm)}", arm, upstream=True)] if arguments.upstream else []
        recordings = record([Side(PLAIN), *speculative, control, *peers], site, loads, folder)
        return _kept(recordings, folder, arguments, argv)


def _kept(recordings: Recordings, folder: Path, arguments: argparse.Namespace, argv: Sequence[str]) -> Result:
    """What recordings give: a result of the machine and the revision that made them."""
    figures = analyse(recordings, folder, arguments.bandwidth, arguments.peak)
    command = ["python", "-m", "benchmarks", "profile", *argv]
    result = msgspec.structs.replace(recordings.made, argv=command, figures=figures)
    out.print(Markdown(as_markdown(result)))
    return result


def main(argv: Sequence[str]) -> None:
    flags = parser("profile", __doc__)
    flags.add_argument("--arm", default="3,1,4", help="num_steps,topk,num_draft_tokens")
    flags.add_argument("--batches", type=positive, nargs="+", default=[1, 32, 128], help="requests in flight")
    flags.add_argument("--context", type=positive, default=64, help="tokens of each prompt")
    flags.add_argument("--traces", type=Path, metavar="FOLDER", help="keeps the traces")
    flags.add_argument("--from", dest="source", type=Path, metavar="FOLDER", help="reads kept traces: no server")
    flags.add_argument("--bandwidth", type=float, default=BANDWIDTH, help="of the card, TB/s; default an H200's")
    flags.add_argument("--peak", type=float, default=PEAK, help="dense bfloat16, TFLOP/s; default an H200's")
    arguments = flags.parse_args(argv)

    def measure() -> Result:
        if arguments.source:
            return _kept(load(arguments.source), arguments.source, arguments, argv)
        return _recorded(arguments, argv)

    run("profile", arguments, measure)
