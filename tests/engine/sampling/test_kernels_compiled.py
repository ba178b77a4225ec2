"""The GPU's kernels, compiled for one without having one: what the interpreter lets pass, the compiler may refuse."""

from pathlib import Path
from typing import Any

import pytest

from tlt_server.engine.sampling import kernels

ARGMAX = {
    "scores": "*fp32",
    "seeds": "*i64",
    "positions": "*i64",
    "temperatures": None,
    "best": "*fp32",
    "tokens": "*i64",
    "nodes": "i32",
    "vocab": "i32",
    "stride": "i32",
    "blocks": "i32",
    "BLOCK": kernels.BLOCK,
}
ADD_NOISE = {
    "logits": "*fp32",
    "noisy": "*fp32",
    "seeds": "*i64",
    "positions": "*i64",
    "inverse_temperatures": "*fp32",
    "noise_scales": "*fp32",
    "tokens": None,
    "rows_each": "i32",
    "n": "i32",
    "stride": "i32",
    "BLOCK": kernels.BLOCK,
}
KERNELS = {
    "argmax": (kernels._best_of_block, ARGMAX),
    "argmax of logits": (kernels._best_of_block, ARGMAX | {"scores": "*bf16", "temperatures": "*fp32"}),
    "add_noise": (kernels._add_to_block, ADD_NOISE),
    "add_noise to half": (kernels._add_to_block, ADD_NOISE | {"logits": "*bf16"}),
    "add_noise to mapped": (kernels._add_to_block, ADD_NOISE | {"tokens": "*i64"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "odd"])
@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles_and_reads_16_bytes_at_a_time(
    name: str, aligned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For Hopper; rows of an odd vocabulary begin anywhere, and are read token by token."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # what 3.6 does; 3.9 warns where it is not said
    kernel, arguments = KERNELS[name]
    types = {each: value if isinstance(value, str) else "constexpr" for each, value in arguments.items()}
    values: dict[Any, Any] = {(i,): value for i, value in enumerate(arguments.values()) if not isinstance(value, str)}
    even = [i for i, value in enumerate(types.values()) if value[0] == "*"]
    even += [list(types).index(each) for each in ("vocab", "n", "stride") if each in types and aligned]
    source = ASTSource(kernel, types, values, attrs={(i,): [["tt.divisibility", 16]] for i in even})
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": kernels.WARPS})
    assert ("ld.global.v4.b32" in compiled.asm["ptx"]) == aligned
