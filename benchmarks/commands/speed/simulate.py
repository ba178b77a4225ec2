"""What does a way to choose arms lose, and how soon does it notice a change? Simulated, on what an H200 measured.

    python -m benchmarks simulate --seeds 40 --json benchmarks/results/simulate.cpu2.json

Needs neither a GPU nor a model: benchmarks/simulation/ replays the step costs and accept lengths that lie in results/.
Every scene is played by mode `bandit` and by mode `paper` with the same seeds; then whole batches drain.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.simulation.drain import drain
from benchmarks.simulation.scenes import SCENES, Scene, far, near, passes
from tlt_server.results import Figures, measured_here, write
from tlt_server.strategy.arms import Choice

MEASURES = ("tlt_server/strategy",)
MODES = ("bandit", "paper")
BATCHES = (1, 8, 64, 128)
DRAINED = (32, 128)
out = Console(highlight=False, soft_wrap=True)


def play(scene: Scene, mode: str, batch: int, kind: str, arms: Sequence[Choice], seeds: int) -> Figures:
    """A scene with many seeds: the share that passes, and of each figure the median and the worst."""
    plays = [scene(mode, seed, batch, arms) for seed in range(seeds)]
    name = f"{scene.__name__}_{kind}_batch_{batch}_{mode}"
    found: Figures = {f"pass_rate_{name}": sum(passes(scene, each) for each in plays) / seeds}
    for figure in plays[0]:
        values = [each[figure] for each in plays]
        found |= {f"{figure}_{name}": median(values), f"{figure}_worst_{name}": max(values)}
    return found


def drained(mode: str, requests: int, seeds: int) -> Figures:
    """Batches that drain, each twice: by a server that was just started, and by one that has drained another batch."""
    cold = [drain(mode, seed, requests) for seed in range(seeds)]
    warm = [drain(mode, seeds + seed, requests, learned=cold[seed].learned) for seed in range(seeds)]
    plain = [drain("off", seeds + seed, requests) for seed in range(seeds)]
    name = f"drain_{requests}_{mode}"
    return {
        f"ratio_to_oracle_cold_{name}": median(each.ratio_to_oracle for each in cold),
        f"ratio_to_oracle_{name}": median(each.ratio_to_oracle for each in warm),
        f"speedup_{name}": median(a.seconds / b.seconds for a, b in zip(plain, warm, strict=True)),
    }


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="plays of each scene")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--json", type=Path, help="keep the result here")
    arguments = parser.parse_args(argv)
    figures: Figures = {}
    for batch in arguments.batches:
        for kind, arms in (("near", near(batch)), ("far", far(batch))):
            for scene in SCENES:
                for mode in MODES:
                    found = play(scene, mode, batch, kind, arms, arguments.seeds)
                    out.print("  ".join(f"{name} {value:.3g}" for name, value in found.items() if "worst" not in name))
                    figures |= found
    for requests in DRAINED:
        for mode in MODES:
            found = drained(mode, requests, max(1, arguments.seeds // 5))
            out.print("  ".join(f"{name} {value:.3g}" for name, value in found.items()))
            figures |= found
    if arguments.json:
        write(measured_here("simulate", ["python", "-m", "benchmarks", "simulate", *argv], figures), arguments.json)
