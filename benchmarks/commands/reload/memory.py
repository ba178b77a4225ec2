"""Does a server whose memory was lent come back as it was, its drafter included?

    python -m benchmarks memory --models models/7b --json benchmarks/results/memory.h200.json

One server with --enable-memory-saver; ROUNDS times what a trainer on the same card does in a step: release all, train,
resume the weights, send the target, resume the rest. Before the first round another drafter is put in force, so that
there is one to go back to. SGLANG_MEMORY_SAVER_CUDA_GRAPH=1 in front releases the CUDA graphs too. On a CPU nothing is
released, and the command shows only that it runs.

Of each parameter a checksum is compared, and of the drafter's also before the target is sent, when they must be right
already, and after a rollback, which needs the copy that was lent too. Then greedy output and accept length.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.lib import command
from benchmarks.lib.command import Models
from benchmarks.lib.reload.trainer import Trainer
from benchmarks.lib.reload.weights import changed
from benchmarks.lib.servers import GPU_FLAGS, Answer, Server, tokens_of
from tlt_server.launch import has_gpu
from tlt_server.process import running_server
from tlt_server.results import Figures, Result

MEASURES = ("tlt_server/engine/weights",)
PROMPTS, TOKENS = 32, 128
GREEDY = 4
Checksums = dict[str, str]
"""Of each parameter by its name; the drafter's begin with `draft.`."""


def seconds(trainer: Trainer, route: str, **fields: Any) -> float:
    """That the server takes to answer."""
    began = time.perf_counter()
    trainer.post(route, **fields).raise_for_status()
    return time.perf_counter() - began


def differing(before: Checksums, trainer: Trainer) -> int:
    """How many of the tensors before are others now, on the first rank."""
    return len(changed([before], trainer.checksums()[:1]))


def own_of_drafter(checksums: Checksums) -> Checksums:
    """Without what it shares with the target, which nobody has sent yet."""
    targets = {checksum for name, checksum in checksums.items() if not name.startswith("draft.")}
    return {
        name: checksum for name, checksum in checksums.items() if name.startswith("draft.") and checksum not in targets
    }


def used_gb() -> float:
    """Of the card, by all its processes."""
    free, total = torch.cuda.mem_get_info() if has_gpu() else (0, 0)
    return float(total - free) / 1e9


def moved(drafter: Path, folder: Path) -> Path:
    """Another drafter, about as good."""
    shutil.copytree(drafter, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in drafter.glob("*.safetensors"):
        save_file({name: tensor * 1.01 for name, tensor in load_file(file).items()}, folder / file.name)
    return folder


def step(trainer: Trainer, target: Path, before: Checksums, round_: int) -> Figures:
    """One step of the trainer; the figures of what was lent and what came back."""
    figures: Figures = {"used_gb_serving": used_gb()}
    figures["release_s"] = seconds(trainer, "/release_memory_occupation")
    figures["used_gb_released"] = used_gb()
    figures["resume_weights_s"] = seconds(trainer, "/resume_memory_occupation", tags=["weights"])
    figures["differs_unsent"] = differing(before, trainer)
    figures["drafter_differs_unsent"] = differing(own_of_drafter(before), trainer)
    figures["send_target_s"] = seconds(trainer, "/update_weights_from_disk", model_path=str(target))
    figures["resume_rest_s"] = seconds(trainer, "/resume_memory_occupation", tags=["kv_cache", "cuda_graph"])
    figures["used_gb_resumed"] = used_gb()
    figures["differs"] = differing(before, trainer)
    return {f"{name}_round_{round_}": value for name, value in figures.items()}


def sampled(server: Server, models: Models) -> tuple[list[Answer | None], float]:
    """Greedy answers, one request at a time, and the mean accept length of many at once."""
    prompts = models.prompts(PROMPTS)
    asked = {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}
    greedy = server.ask([(prompt, asked) for prompt in prompts[:GREEDY]], at_once=1)
    many = server.ask([(prompt, asked | {"temperature": 1.0}) for prompt in prompts], at_once=PROMPTS)
    lengths = [answer["meta_info"]["spec_accept_length"] for answer in many if answer is not None]
    return greedy, sum(lengths) / max(1, len(lengths))


def same(before: Sequence[Answer | None], after: Sequence[Answer | None]) -> int:
    """How many answers are those of before, token for token."""
    return sum(bool(a and b and tokens_of(a) == tokens_of(b)) for a, b in zip(before, after, strict=True))


def measured(models: Models, logs: Path, arguments: argparse.Namespace) -> Figures:
    """All figures."""
    flags = ["--model-path", str(models.target), "--drafter", str(models.drafter), "--arm", "3,1,4"]
    flags += [*GPU_FLAGS, "--enable-memory-saver"] if has_gpu() else []
    with (
        tempfile.TemporaryDirectory() as scratch,
        running_server(flags, logs / "memory.log", start_timeout=400) as url,
    ):
        server = Server(url, 0.0)
        trainer = Trainer(url)
        start = trainer.checksums()[0]
        trainer.drafter(moved(models.drafter, Path(scratch) / "moved")).raise_for_status()
        before, (greedy, length) = trainer.checksums()[0], sampled(server, models)
        figures: Figures = {"accept_length_before": length, "tensors": len(before)}
        for round_ in range(1, 1 + (1 if arguments.smoke else arguments.rounds)):
            figures |= step(trainer, models.target, before, round_)
            again, figures[f"accept_length_round_{round_}"] = sampled(server, models)
            figures[f"same_greedy_round_{round_}"] = same(greedy, again)
        trainer.post("/tlt/v1/drafter/rollback").raise_for_status()
        figures["differs_rolled_back"] = differing(start, trainer)
        return figures | {"requests": server.requests, "failed_requests": server.failed}


def table(result: Result) -> str:
    """The figures as a list."""
    return "\n".join(f"- {name}: {value:,.2f}" for name, value in result.figures.items())


def main(argv: Sequence[str]) -> None:
    command.main("memory", __doc__, argv, measured, table)
