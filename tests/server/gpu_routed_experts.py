"""Routed experts on a GPU, with overlap and CUDA graphs: beside speculation, those that plain decoding tells.

python -m tests.server.gpu_routed_experts

A mixture of experts of random weights, in bfloat16 on a GPU, is served plainly and with arms that change at every step.
Both answer the same requests; of each, rows are compared as far as both sampled the same tokens. Rounding may decide
between two experts that are nearly equal, in a few rows of a hundred; rows of other tokens would nearly all differ.
Without a GPU the same runs in float32. Imports no pytest, which a GPU host may lack.
"""

import base64
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
import torch
from tlt_client import Client

from benchmarks.lib.strategies import any_arm
from benchmarks.models.families import PROMPTS, SHIFT, guessing, tiny
from tlt_server.config import Arm, DrafterKind
from tlt_server.process import running_server

EXPERTS = ["--enable-return-routed-experts"]
LENGTHS = (1, 2, 3, 24, 70)
ARMS = (Arm(3, 1, 4), Arm(5, 1, 6), Arm(3, 4, 8), Arm(5, 4, 16))
# heads as of the shapes that are measured: attention need not be compiled for others
WIDE = {"vocab_size": 320, "hidden_size": 256, "head_dim": 128, "num_key_value_heads": 1}
WIDE |= {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
# each arm has graphs at all of these
GPU_FLAGS = ["--attention-backend", "flashinfer", "--dtype", "bfloat16", "--disable-prefill-cuda-graph"]
GPU_FLAGS += ["--max-running-requests", "32", "--cuda-graph-bs-decode", "1", "4", "8", "16", "32"]
MOST = 0.05
"""Share of the rows that may differ."""


def asked(url: str, start: int = 0) -> list[dict[str, Any]]:
    """Greedy and sampled requests of many lengths, all at once."""
    params = [
        {"temperature": row % 2, "max_new_tokens": LENGTHS[row % 5], "ignore_eos": True, "sampling_seed": row}
        for row in range(len(PROMPTS))
    ]
    body = {"input_ids": PROMPTS, "sampling_params": params, "return_routed_experts": True}
    body["routed_experts_start_len"] = start
    answers: list[dict[str, Any]] = httpx.post(f"{url}/generate", json=body, timeout=120).raise_for_status().json()
    return answers


def rows_of(answer: dict[str, Any], experts: int, layers: int = 4) -> np.ndarray[Any, Any]:
    """[tokens, layers, experts of a token]."""
    held = base64.b64decode(answer["meta_info"]["routed_experts"])
    return np.frombuffer(held, np.int32).reshape(-1, layers, experts)


def answers(arguments: list[str], log: Path) -> list[dict[str, Any]]:
    """Those of a server without arms; of one with ARMS, by any of them in turn."""
    with running_server([*arguments, *EXPERTS, "--max-total-tokens", "32768"], log, start_timeout=600) as url:
        if "--arm" in arguments:
            with Client(url) as client:
                client.set_strategy(any_arm(dict.fromkeys(ARMS, 32), 32))
        return asked(url)


def different(one: dict[str, Any], other: dict[str, Any], prompt: list[int]) -> tuple[int, int]:
    """Rows that differ, and rows compared; a row is of a token and layer."""
    same = [a == b for a, b in zip(one["output_ids"], other["output_ids"], strict=True)]
    read = len(prompt) + (same.index(False) if False in same else len(same) - 1)
    rows = [np.sort(rows_of(each, WIDE["num_experts_per_tok"]))[:read] for each in (one, other)]
    return int((rows[0] != rows[1]).any(-1).sum()), rows[0].shape[0] * rows[0].shape[1]


def main() -> int:
    with TemporaryDirectory() as place:
        folder = Path(place)
        target = tiny("Qwen3Moe", folder / "target", shift=SHIFT, sizes=WIDE)
        drafter = guessing(target, folder / "drafter", DrafterKind.EAGLE)
        model = ["--model-path", str(target), *(GPU_FLAGS if torch.cuda.is_available() else [])]
        arms = [word for arm in ARMS for word in ("--arm", f"{arm.num_steps},{arm.topk},{arm.num_draft_tokens}")]
        plain = answers([*model, "--no-speculation"], folder / "plain.log")
        drafted = answers([*model, "--drafter", str(drafter), *arms], folder / "arms.log")
    counts = [different(*each) for each in zip(plain, drafted, PROMPTS, strict=True)]
    wrong, compared = (sum(column) for column in zip(*counts, strict=True))
    passes = sum(each["meta_info"].get("spec_verify_ct", 0) for each in drafted)
    sys.stdout.write(f"{wrong} of {compared} rows differ; {passes} passes verified drafts\n")
    return int(wrong > MOST * compared or not passes)


if __name__ == "__main__":
    sys.exit(main())
