"""Which part of a model's pass, or of what goes on around it, a kernel belongs to: by its name and its neighbours'.

A trace of CUDA graphs has no shapes, so that a matmul is known by its place: before attention or after, before the
activation or after.
"""

import re
from collections.abc import Iterator, Sequence

GROUPS = {
    "projections": "q, k, v and output projections",
    "mlp": "MLP's matmuls",
    "input": "drafter's input projection",
    "head": "LM head",
    "attention": "attention",
    "elementwise": "norms, RoPE, activation, embedding",
    "kv": "KV writes and moves",
    "logits": "logits copied to float32",
    "sampling": "softmax, top-k, drawing",
    "tree": "building and accepting drafts",
    "copies": "copies, fills and indices",
    "other": "other kernels",
}
ATTENTION, ACTIVATION, MATMUL = "attention", "activation", "matmul"

# The first that matches decides. Names are of SGLang 0.5.17's kernels, flashinfer's, cuBLAS's, PyTorch's and triton's.
_PATTERNS = [
    (ATTENTION, r"PagedKVCache|PagedAttention|RaggedKV|MergeState|_fwd_grouped_kernel|_fwd_kernel|flash_fwd|FlashAttn"),
    (ATTENTION, r"^(_attend|_merge|_collect_tails)$"),
    (MATMUL, r"nvjet|gemm|gemv|cutlass.*Kernel|splitKreduce"),
    (ACTIVATION, r"act_and_mul"),
    ("elementwise", r"[nN]orm|rope|Rotary|indexSelect|CUDAFunctor_add<c10::BFloat16>"),
    ("kv", r"store_kv|set_kv|kv_cache"),
    ("tree", r"build_tree|TreeSpeculative|ChainSpeculative|verify_tree|PackBits|triton_poi_fused|accept|fill_bonus"),
    ("sampling", r"[sS]oftMax|[tT]op[kKpP]|::sampling::|bitonicSort|radixSort|scan_by_key|distribution_elementwise"),
    ("sampling", r"reduce_kernel|compare_scalar|CompareEq|assert_async|Bitwise|bitwise|DivFunctor|_min_p|multinomial"),
    ("sampling", r"_best_of_block|_add_to_block|_penalise_block"),
    ("copies", r"[mM]em(cpy|set)|copy|Copy|Fill|index|scatter|gather|Gather|scan|arange|multi_tensor_apply"),
    ("copies", r"add<|CUDAFunctorOnSelf|MulFunctor|div_floor|clamp|assign_|compute_position|generate_draft|kv_indices"),
]
_KINDS = [(kind, re.compile(pattern)) for kind, pattern in _PATTERNS]


def _kind(name: str) -> str:
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), "other")


def layer_passes(names: Sequence[str]) -> int:
    """How many layers these kernels run through: each has one activation."""
    return sum(_kind(name) == ACTIVATION for name in names)


def groups_of(names: Sequence[str]) -> list[str]:
    """The group of each kernel of one stream, in the order in which they ran."""
    kinds = [_kind(name) for name in names]
    landmarks = [i for i, kind in enumerate(kinds) if kind in (MATMUL, ATTENTION, ACTIVATION)]
    # a kernel that sums the parts of a split matmul belongs to the one before it
    landmarks = [i for i in landmarks if "splitKreduce" not in names[i]]
    matmuls = dict(_matmuls(landmarks, kinds))
    groups, matmul = list[str](), "other"
    for i, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        if kind == MATMUL:
            groups.append(matmul := matmuls.get(i, matmul))
        elif kind == "copies" and "direct_copy" in name and groups[-1:] == ["head"]:
            groups.append("logits")
        else:
            groups.append("elementwise" if kind == ACTIVATION else kind)
    return groups


def _matmuls(landmarks: Sequence[int], kinds: Sequence[str]) -> Iterator[tuple[int, str]]:
    """The place and the group of each matmul, from the landmarks around it."""
    after_mlp = False
    for n, i in enumerate(landmarks):
        if kinds[i] != MATMUL:
            continue
        before = kinds[landmarks[n - 1]] if n else ""
        after = kinds[landmarks[n + 1]] if n + 1 < len(landmarks) else ""
        if ATTENTION in (before, after):
            group = "projections"
        elif ACTIVATION in (before, after):
            group = "mlp"
        else:
            group = "head" if after_mlp else "input"
        after_mlp = before == ACTIVATION
        yield i, group
