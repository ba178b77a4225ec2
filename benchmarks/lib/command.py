"""What the commands of benchmarks/ have in common: their flags, the models that they measure, how they end."""

import argparse
import logging
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.markdown import Markdown
from tokenizers import Tokenizer

from benchmarks.models import shapes
from benchmarks.models.workloads import WORKLOADS, Workload
from tlt_server import results
from tlt_server.demo.lossless import Tokens
from tlt_server.demo.task import problems, solve, training_problems
from tlt_server.errors import ConfigError, ServerFailed, TltError
from tlt_server.launch import has_gpu
from tlt_server.preflight import check_models, read_config
from tlt_server.results import Figures, Result

SEED = 2026
CPU_SHAPE = "50m"
EMBEDDED = "embedded"
"""The shape of the embedded models themselves."""
MUST_BE_ZERO = (
    *("mismatched_outputs", "unexpected_checksums", "unexpected_versions", "wrong_states", "missing_states"),
    *("server_ended", "answers_5xx", "control_mismatches", "aborts_beyond_end", "aborted_without_rollout"),
    *("trainer_ended", "trainer_stalled", "offload_hung", "offload_wrong", "offload_refused_wrongly"),
    *("gadgets_run", "legitimate_refused", "stale_prefixes", "soak_failed_requests", "soak_mismatches"),
    *("rollouts_lost", "sampled_twice", "stale_served", "torn_fleet", "wrong_tokens"),
    *("steps_failed", "stale_rollouts", "crashes", "silently_useless", "differs", "non_tie_divergences"),
)
out = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Models:
    """The target and the EAGLE drafter that a benchmark serves, and what it asks them."""

    target: Path
    drafter: Path
    workload: Workload = WORKLOADS["demo"]

    def with_eagle3(self) -> "Models":
        """By the EAGLE-3 drafter that lies beside the other."""
        return replace(self, drafter=self.drafter.with_name("drafter_eagle3"))

    def prompts(self, count: int, length: int | None = None) -> list[Tokens]:
        """Problems of the workload, as this target's tokens; `length` puts solved ones in front of each.

        Prompts differ within their first problem, and a longer one begins as a shorter one does, but for the problem at
        the end: a server's cache serves both.
        """
        path = self.target / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"model {self.target}: it has no tokenizer.json, so no prompt can be made for it")
        tokenizer = Tokenizer.from_file(str(path))
        asked = [tokenizer.encode(problem.prompt).ids for problem in problems(count, SEED, self.workload.task)]
        if length is None:
            return [tuple(prompt) for prompt in asked]
        return [(*self._solved(tokenizer, i, length - len(prompt)), *prompt) for i, prompt in enumerate(asked)]

    def _solved(self, tokenizer: Tokenizer, seed: int, length: int) -> list[int]:
        """So many tokens of solved problems, one after another; each ends as a response does, if by a single token."""
        end, rng = read_config(self.target).get("eos_token_id"), random.Random(f"{SEED} {seed}")
        ends, tokens, task = [end] if isinstance(end, int) else [], list[int](), self.workload.task
        while len(tokens) < length:
            [problem] = training_problems(1, rng.randrange(1 << 30), task)
            tokens += [*tokenizer.encode(problem.prompt + solve(problem, rng, task)).ids, *ends]
        return tokens[:length]


Measure = Callable[[Models, Path, argparse.Namespace], Figures | Iterator[Figures]]
"""From models, a folder for logs, and flags to figures; or to those of one round, of two, and so on, all whole."""


def positive(text: str) -> int:
    """A whole number from 1 on, as argparse reads one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, 1 or more")
    return int(text)


def parser(name: str, description: str | None, *, compares: bool = True) -> argparse.ArgumentParser:
    """The flags that every table's command has; `compares` adds those of one that measures sides in rounds."""
    parser, gpu = parser_of_one(name, description), has_gpu()
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keeps the servers' logs")
    parser.add_argument(
        "--shape", default="qwen2.5-7b" if gpu else CPU_SHAPE, help=f"one of {', '.join((EMBEDDED, *shapes.SHAPES))}"
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="demo", help="embedded models and their problems")
    parser.add_argument("--models", type=Path, metavar="FOLDER", help="where models of that shape are made and kept")
    parser.add_argument("--model-path", type=Path, metavar="FOLDER", help="a real target instead")
    parser.add_argument("--drafter", type=Path, metavar="FOLDER", help="its EAGLE drafter")
    if compares:
        often = "how often each side is measured (default: %(default)s)"
        parser.add_argument("--rounds", type=positive, default=3, help=often)
    if compares and gpu:
        parser.add_argument(
            "--upstream",
            type=Path,
            metavar="FOLDER",
            help="SGLang 0.5.17 as its authors ship it, by pip install --no-deps --target: the peers (default: none)",
        )
    else:
        parser.set_defaults(upstream=None)  # upstream does not run EAGLE on a CPU
    return parser


def parser_of_seeds(name: str, description: str | None) -> argparse.ArgumentParser:
    """The flags of a benchmark that is run once for each seed."""
    parser = parser_of_one(name, description)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    return parser


def parser_of_one(name: str, description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}", description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="keeps the figures")
    parser.add_argument("--smoke", action="store_true", help="as little as proves that the command runs")
    return parser


@contextmanager
def workplace(arguments: argparse.Namespace) -> Iterator[tuple[Models, Path]]:
    """The models to measure, made if they are not there, and a folder for logs.

    Raises:
        ConfigError: models that cannot be made, read, or used together.
    """
    if bool(arguments.model_path) != bool(arguments.drafter):
        raise ConfigError("--model-path and --drafter go together: a real target and its drafter")
    if arguments.upstream and not (arguments.upstream / "sglang").is_dir():
        raise ConfigError(
            f"--upstream {arguments.upstream}: no folder sglang in it. Make it with pip install --no-deps --target"
        )
    workload = WORKLOADS[arguments.workload]
    with tempfile.TemporaryDirectory(prefix="tlt-bench-") as scratch:
        logs = arguments.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        if arguments.shape == EMBEDDED and not arguments.model_path:
            models = Models(workload.models / "target", workload.models / "drafter", workload)
        elif arguments.model_path:
            for folder in (arguments.model_path, arguments.drafter):
                read_config(folder)
            models = Models(arguments.model_path, arguments.drafter, workload)
        else:
            if not has_gpu() and arguments.shape in shapes.SHAPES and arguments.shape != CPU_SHAPE:
                raise ConfigError(
                    f"--shape {arguments.shape} needs a GPU, and there is none; {CPU_SHAPE} runs on a CPU"
                )
            dtype = torch.bfloat16 if has_gpu() else torch.float32
            folder = arguments.models or Path(scratch) / "models"
            built = shapes.build(arguments.shape, folder, workload=workload, dtype=dtype)
            torch.cuda.empty_cache()  # the servers need what building took
            models = Models(built.target, built.drafter, workload)
        check_models(models.target, models.drafter)
        yield models, logs


def run(name: str, arguments: argparse.Namespace, measure: Callable[[], Result]) -> None:
    """Measures and keeps the result; ends as a command does: one line for what the user can mend, nothing half done."""
    logging.basicConfig(level=logging.WARNING)
    before = _changed(arguments.json)
    try:
        if arguments.json:
            results.require_place(arguments.json)
        result = measure()
        if arguments.json:
            results.write(result, arguments.json)
        if failed := result.figures.get("failed_requests"):
            raise ServerFailed(f"{failed} requests failed: what they would have given is missing from the figures")
        for figure in MUST_BE_ZERO:
            if wrong := result.figures.get(figure):
                raise ServerFailed(f"{figure} is {wrong}, and must be 0: the server is not correct")
    except TltError as error:
        sys.stderr.write(f"{name}: {error}\n")
        raise SystemExit(error.exit_code) from error
    except KeyboardInterrupt:
        kept = "nothing was kept" if _changed(arguments.json) == before else f"{arguments.json} has its whole rounds"
        sys.stderr.write(f"{name}: interrupted; {kept}\n")
        raise SystemExit(130) from None


def _changed(file: Path | None) -> int | None:
    """When a file was written, in nanoseconds; None where there is none."""
    return file.stat().st_mtime_ns if file and file.exists() else None


def main(
    name: str,
    description: str | None,
    argv: Sequence[str],
    measure: Measure,
    table: Callable[[Result], str],
    flags: argparse.ArgumentParser | None = None,
) -> None:
    """Measures, keeps, and shows a table in Markdown; `flags` are the command's, where it has more than a table's."""
    flags = flags or parser(name, description)
    arguments = flags.parse_args(argv)

    def result() -> Result:
        with workplace(arguments) as (models, logs):
            found = measure(models, logs, arguments)
            for figures in [found] if isinstance(found, dict) else found:
                made = results.measured_here(name, [*flags.prog.split(), *argv], figures)
                if arguments.json:  # after each round: a run that is broken off has kept what it had
                    results.write(made, arguments.json)
        out.print(Markdown(table(made)))
        return made

    run(name, arguments, result)
