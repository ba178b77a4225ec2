"""What works together with speculation, in one table: read at start, by a test and by docs/support.md.

Without speculation all is upstream's, and nothing is refused here. With it, what no test of ours exercises is refused:
not tested is not "works".
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from tlt_server.errors import UnsupportedError

Args = Any  # upstream's ServerArgs: this module imports nothing of SGLang's


class Feature(NamedTuple):
    """A row of the matrix. flags: SGLang's, that turn it on. used: whether a server's settings use it. refusal: why it
    is refused with speculation; None where it works. promise: what is, where that is not plain."""

    name: str
    flags: str
    used: Callable[[Args], bool]
    refusal: str | None = None
    promise: str | None = None

    @property
    def verdict(self) -> str:
        """In a word, and why."""
        if self.refusal is not None:
            return f"refused: {self.refusal}"
        return "works" if self.promise is None else f"works: {self.promise}"


def _drafts(algorithm: str, tree: bool, args: Args) -> bool:
    return bool(args.speculative_algorithm == algorithm and (args.speculative_eagle_topk > 1) == tree)


def drafts_by_own_head(args: Args) -> bool:
    """Whether the drafter is the target's MTP head. SGLang turns NEXTN into EAGLE with the target's own folder as the
    drafter's."""
    own = args.speculative_draft_model_path in (None, args.model_path)
    return args.speculative_algorithm == "NEXTN" or (args.speculative_algorithm in ("EAGLE", "EAGLE3") and own)


def _deterministic_by_flashinfer(args: Args) -> bool:
    backends = (args.attention_backend, args.prefill_attention_backend, args.decode_attention_backend)
    return bool(args.enable_deterministic_inference and "flashinfer" in backends)


UNTESTED = "not tested with our verification yet"

FEATURES: Sequence[Feature] = (
    *(
        Feature(
            f"{name}, {'tree' if topk > 1 else 'chain'}",
            f"--speculative-algorithm {algorithm} --speculative-eagle-topk {topk}",
            partial(_drafts, algorithm, topk > 1),
        )
        for name, algorithm in (("EAGLE", "EAGLE"), ("EAGLE-3", "EAGLE3"))
        for topk in (1, 4)
    ),
    Feature("Several tokenizer workers", "--tokenizer-worker-num 2", lambda a: a.tokenizer_worker_num > 1),
    Feature("Tensor parallelism (TP)", "--tp-size 2", lambda a: a.tp_size > 1),
    Feature("Data parallelism (DP)", "--dp-size 2", lambda a: a.dp_size > 1 and not a.enable_dp_attention),
    Feature("DP attention", "--enable-dp-attention", lambda a: a.enable_dp_attention, UNTESTED),
    Feature(
        "Pipeline parallelism (PP)", "--pp-size 2", lambda a: a.pp_size > 1, "SGLang's drafters run in one stage only"
    ),
    Feature(
        "Prefill/decode disaggregation",
        "--disaggregation-mode prefill",
        lambda a: a.disaggregation_mode not in (None, "null"),
        UNTESTED,
    ),
    Feature("LoRA", "--enable-lora", lambda a: bool(a.enable_lora), "the drafter would not follow the adapter"),
    Feature("Quantized target", "--quantization fp8", lambda a: a.quantization is not None, UNTESTED),
    Feature("Memory saver", "--enable-memory-saver", lambda a: a.enable_memory_saver),
    Feature(
        "Deterministic inference",
        "--enable-deterministic-inference",
        lambda a: a.enable_deterministic_inference,
        promise="on a CPU a response and its logprobs are the same bits in any batch, by any arm or none; on a GPU, by "
        "fa3 or triton, SGLang promises that of batches alone, and we have not run it",
    ),
    Feature(
        "Deterministic inference by flashinfer",
        "--enable-deterministic-inference --attention-backend flashinfer",
        _deterministic_by_flashinfer,
        "its verification splits keys as the batch has it. Take --attention-backend fa3 or triton",
    ),
    Feature(
        "On-policy with a trainer, bit for bit",
        "--rl-on-policy-target fsdp",
        lambda a: a.rl_on_policy_target is not None,
        UNTESTED,
    ),
    Feature(
        "Routed experts of a response",
        "--enable-return-routed-experts",
        lambda a: a.enable_return_routed_experts,
    ),
    Feature(
        "Routed experts beside DeepEP",
        "--enable-return-routed-experts --moe-a2a-backend deepep",
        lambda a: a.enable_return_routed_experts and a.moe_a2a_backend == "deepep",
        UNTESTED,
    ),
    Feature("Hierarchical cache", "--enable-hierarchical-cache", lambda a: a.enable_hierarchical_cache, UNTESTED),
    Feature("Pages of several tokens", "--page-size 16", lambda a: (a.page_size or 1) > 1, UNTESTED),
    Feature(
        "NGRAM drafting",
        "--speculative-algorithm NGRAM",
        lambda a: a.speculative_algorithm == "NGRAM",
        "it verifies by upstream's sampler, which ignores min_p",
    ),
    Feature("MTP: a draft head that belongs to the target", "--speculative-algorithm NEXTN", drafts_by_own_head),
    Feature("Several MTP heads", "--enable-multi-layer-eagle", lambda a: bool(a.enable_multi_layer_eagle), UNTESTED),
    Feature(
        "Stand-alone and other drafters",
        "--speculative-algorithm STANDALONE",
        lambda a: a.speculative_algorithm not in ("EAGLE", "EAGLE3", "NGRAM", "NEXTN"),
        UNTESTED,
    ),
    Feature(
        "SGLang's adaptive depth",
        "--speculative-adaptive",
        lambda a: a.speculative_adaptive,
        "it changes the draft depth under our counters",
    ),
    Feature(
        "Rejection sampling with the drafter's probabilities",
        "--speculative-use-rejection-sampling",
        lambda a: a.speculative_use_rejection_sampling,
        UNTESTED,
    ),
    Feature(
        "Relaxed acceptance",
        "--speculative-accept-threshold-single 0.9",
        lambda a: min(a.speculative_accept_threshold_single, a.speculative_accept_threshold_acc) < 1,
        "it changes what is sampled; ours is lossless",
    ),
    Feature(
        "Reduced draft vocabulary for EAGLE",
        "--speculative-token-map FILE",
        lambda a: a.speculative_token_map is not None,
        "ours follows what is sampled, and the target: `draft_vocab` in `--tlt-config`",
    ),
)


def require_supported(args: Args, draft_vocab: int | None = None) -> None:
    """Refuses a server whose settings combine speculation with what does not work with it. draft_vocab: as our settings
    say. Raises UnsupportedError: names every such feature, its reason and its flag."""
    if args.speculative_algorithm is None:
        return
    refused = [f"{f.name} ({f.flags}): {f.refusal}" for f in FEATURES if f.refusal and f.used(args)]
    if refused:
        raise UnsupportedError(
            "refused together with speculation: " + "; ".join(refused) + ". Drop the flag, or add --no-speculation"
        )

    if draft_vocab:
        _require_head(draft_vocab, args)


def _require_head(size: int, args: Args) -> None:
    """Of the target, for a drafter that is to propose of so many tokens. Raises UnsupportedError."""
    if args.speculative_algorithm == "EAGLE3" or drafts_by_own_head(args):
        raise UnsupportedError(f"draft_vocab = {size}: this drafter brings a head of its own. Leave it out")
    if args.tp_size > 1:
        raise UnsupportedError(f"draft_vocab = {size}: the target's head lies on {args.tp_size} GPUs. Leave it out")


def as_markdown() -> str:
    """The matrix as docs/support.md prints it."""
    rows = [f"| {f.name} | `{f.flags}` | {f.verdict} |" for f in FEATURES]
    return "\n".join(["| with speculation | flags | |", "|---|---|---|", *rows])
