"""Routed experts on a GPU, with overlap and CUDA graphs: beside speculation, those that plain decoding tells.

python -m tests.server.gpu_routed_experts

A mixture of experts of random weights, in bfloat16 on a GPU, is served plainly and with arms that change at every step.
Both answer the same requests; of each, rows are compared as far as both sampled the same tokens. Rounding may decide
between two experts that are nearly equal, in a few rows of a hundred; rows of other tokens would nearly all differ.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from tlt_client import Client

from benchmarks.models.families import PROMPTS, SHIFT, SMALL, guessing, tiny
from tests.server.conftest import SEVERAL
from tests.server.test_arms import ANY_ARM
from tests.server.test_routed_experts import EXPERTS, asked, rows_of
from tlt_server.config import DrafterKind
from tlt_server.process import running_server

WIDER = {"hidden_size": 256, "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
MOST = 0.05
"""Share of the rows that may differ."""


def wide(folder: Path) -> Path:
    """As `tiny`, of sizes that a GPU's kernels take."""
    tiny("Qwen3Moe", folder, shift=SHIFT)
    config = transformers.Qwen3MoeConfig(**SMALL | WIDER | {"num_hidden_layers": 4, "decoder_sparse_step": 1})
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.05)
        embedding = model.get_input_embeddings().weight.normal_()
        model.get_output_embeddings().weight.copy_(embedding.roll(-SHIFT, 0))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def answers(arguments: list[str], log: Path, *, speculate: bool) -> list[dict[str, Any]]:
    with running_server([*arguments, *EXPERTS], log, start_timeout=600) as url:
        if speculate:
            with Client(url) as client:
                client.set_strategy(ANY_ARM)
        return asked(url)


def different(one: dict[str, Any], other: dict[str, Any], prompt: list[int]) -> tuple[int, int]:
    """Rows that differ, and rows compared; a row is of a token and layer."""
    same = [a == b for a, b in zip(one["output_ids"], other["output_ids"], strict=True)]
    read = len(prompt) + (same.index(False) if False in same else len(same) - 1)
    rows = [np.sort(rows_of(each, WIDER["num_experts_per_tok"]))[:read] for each in (one, other)]
    return int((rows[0] != rows[1]).any(-1).sum()), rows[0].shape[0] * rows[0].shape[1]


def main() -> int:
    with TemporaryDirectory() as place:
        folder = Path(place)
        target = wide(folder / "target")
        drafter = guessing(target, folder / "drafter", DrafterKind.EAGLE)
        model = ["--model-path", str(target), "--max-total-tokens", "32768"]
        model += ["--attention-backend", "flashinfer"] if torch.cuda.is_available() else []
        plain = answers([*model, "--no-speculation"], folder / "plain.log", speculate=False)
        drafted = answers([*model, "--drafter", str(drafter), *SEVERAL], folder / "arms.log", speculate=True)
    counts = [different(*each) for each in zip(plain, drafted, PROMPTS, strict=True)]
    wrong, compared = (sum(column) for column in zip(*counts, strict=True))
    passes = sum(each["meta_info"].get("spec_verify_ct", 0) for each in drafted)
    sys.stdout.write(f"{wrong} of {compared} rows differ; {passes} passes verified drafts\n")
    return int(wrong > MOST * compared or not passes)


if __name__ == "__main__":
    sys.exit(main())
