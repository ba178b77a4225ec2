"""Does the embedded target in another shape compute what the embedded one computes? By transformers, without a server.

    python -m benchmarks fidelity --json benchmarks/results/fidelity.cpu2.json

Judged at every position of worked solutions of the task, against the embedded target in float32; beside it the embedded
target itself in bfloat16, which is how far rounding alone goes.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.lib.command import CPU_SHAPE, out, run
from benchmarks.models import shapes
from tlt_server import results
from tlt_server.demo import default_paths
from tlt_server.demo.reference import Reference
from tlt_server.demo.training.corpus import collate, worked_solutions
from tlt_server.results import Figures, Result

MEASURES = ("benchmarks/models",)
SOLUTIONS, SEED = 16, 5
AT_ONCE = 4  # solutions in a pass: bounds the memory of a large vocabulary's logits


def read(model: Path, dtype: torch.dtype, tokens: Tensor, meant: Tensor) -> Tensor:
    """A model's logits in float32 where `meant`: [positions, vocab]."""
    reference = Reference(model, dtype)
    with torch.no_grad():
        logits = torch.cat([reference.model(part).logits.float() for part in tokens.split(AT_ONCE)])
    return logits[meant]


def differences(name: str, found: Tensor, wanted: Tensor) -> Figures:
    """How far logits lie from those that they should be; `found` may have more tokens, which nobody should sample."""
    vocab = wanted.shape[1]
    gap = (found[:, :vocab] - wanted).abs()
    figures: Figures = {
        f"logit_difference_max_{name}": float(gap.max()),
        f"logit_difference_rms_{name}": float(gap.square().mean().sqrt()),
        f"argmax_agreement_{name}": float((found.argmax(-1) == wanted.argmax(-1)).float().mean()),
    }
    if found.shape[1] > vocab:
        figures[f"padded_logit_max_{name}"] = float(found[:, vocab:].max())
    return figures


def measured(shape: str, models: Path) -> Figures:
    """All figures."""
    embedded, _ = default_paths()
    texts = worked_solutions(SOLUTIONS, SEED, Tokenizer.from_file(str(embedded / "tokenizer.json")), 1)[:SOLUTIONS]
    tokens = collate(texts, torch.device("cpu")).tokens
    meant = tokens != 0
    wanted = read(embedded, torch.float32, tokens, meant)
    figures: Figures = {"positions": len(wanted)}
    figures |= differences("embedded_bfloat16", read(embedded, torch.bfloat16, tokens, meant), wanted)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        built = shapes.build(shape, models / name, dtype=dtype)
        figures |= differences(f"shape_{name}", read(built.target, dtype, tokens, meant), wanted)
    return figures


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks fidelity", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="keeps the figures")
    parser.add_argument("--shape", default=CPU_SHAPE, help=f"one of {', '.join(shapes.SHAPES)}")
    arguments = parser.parse_args(argv)

    def measure() -> Result:
        with tempfile.TemporaryDirectory(prefix="tlt-bench-") as scratch:
            figures = measured(arguments.shape, Path(scratch))
        for name, value in figures.items():
            out.print(f"{name:44} {value:.6g}")
        return results.measured_here("fidelity", ["python", "-m", "benchmarks", "fidelity", *argv], figures)

    run("fidelity", arguments, measure)
