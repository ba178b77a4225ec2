"""What benchmarks/README.md shows: a question, and the figures of a kept result that answer it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.lib.tables import table
from tlt_server.results import Result


@dataclass(frozen=True)
class Question:
    """page: of docs/results, with the section. figures: in words, then by name; {:...} says how a value is shown."""

    asked: str
    stem: str
    page: str
    figures: Sequence[tuple[str, str, str]]


QUESTIONS = (
    Question(
        "How much faster is decoding with speculation, to natural ends? The bandit over SGLang's plain decoding",
        "strategy.h200",
        "strategy.md#strategy",
        [
            *((f"{n} requests at once", f"speedup_batch_{n}", "{:.2f}") for n in (1, 8, 32, 64, 128, 256)),
            ("at the worst of all batch sizes, over the best arm", "min_ratio_to_best", "{:.3f}"),
            ("likewise, over plain decoding of a server without speculation", "min_ratio_to_plain", "{:.3f}"),
        ],
    ),
    Question(
        "How many tokens does a verify pass give, to natural ends, at temperature 1?",
        "accept_length.h200",
        "speed.md#accept_length",
        [
            ("chain 3,1,4", "accept_length_natural_chain_3", "{:.2f}"),
            ("chain 7,1,8", "accept_length_natural_chain_7", "{:.2f}"),
            ("chain 3,1,4 after 16,384 tokens", "accept_length_at_16384", "{:.2f}"),
            (
                "of what is computed of the same responses, at the least",
                "accept_length_worst_ratio_to_computed",
                "{:.1%}",
            ),
        ],
    ),
    Question(
        "And how much faster with long contexts? The bandit, 8 requests",
        "context.h200",
        "speed.md#context",
        [(f"{n:,} tokens", f"context_speedup_{n}_8", "{:.2f}") for n in (8192, 32768)],
    ),
    Question(
        "How much sooner is a batch of rollouts done, to natural ends?",
        "drain.h200",
        "strategy.md#drain",
        [
            ("bandit over plain decoding, 128 requests", "drain_natural_speedup_128", "{:.2f}"),
            ("bandit over the best arm by itself", "drain_natural_over_static_128", "{:.2f}"),
            ("bandit over plain decoding, 512 requests", "drain_natural_speedup_512", "{:.2f}"),
        ],
    ),
    Question(
        "What do several arms take of the card, and what does a switch cost?",
        "switching.h200",
        "strategy.md#switching",
        [
            ("ms that a switch of arms adds", "switching_ms", "{:.2f}"),
            ("greedy answers that differ, and by no tie", "greedy_non_ties_lottery", "{:,}"),
        ],
    ),
    Question(
        "What does a decode step cost? 32 requests",
        "profile.h200",
        "profile.md#profile",
        [
            ("plain, ms", "step_ms_plain_batch_32", "{:.2f}"),
            ("chain 3,1,4, ms", "step_ms_chain_3_batch_32", "{:.2f}"),
            ("its physical limit, ms", "limit_ms_chain_3_batch_32", "{:.2f}"),
        ],
    ),
    Question(
        "What does a drafter swap under load cost, and what does it change?",
        "swap.h200",
        "reload.md#swap",
        [
            ("decode time lost to a swap, median, ms", "lost_ms_p50", "{:.1f}"),
            ("outputs that differ, and by no tie", "mismatched_outputs", "{:,}"),
        ],
    ),
    Question(
        "Does a publication of the target change the target alone?",
        "publications.h200x2",
        "reload.md#publications",
        [("unexpected checksums", "unexpected_checksums", "{:,}"), ("failed requests", "failed_requests", "{:,}")],
    ),
    Question(
        "What does it cost to send hidden states to a trainer? 32 requests",
        "capture.h200",
        "speed.md#capture",
        [
            ("a step takes longer by", "capture_overhead_default_batch_32", "{:.1%}"),
            ("states that are wrong", "wrong_states", "{:,}"),
        ],
    ),
    Question(
        "Does a drafter that is trained along follow a policy under RL?",
        "adaptation.h200",
        "learning.md#adaptation",
        [
            ("accept length over that of a frozen drafter", "accept_length_gain", "{:.2f}"),
            ("reward less that without speculation", "reward_gap", "{:.3f}"),
        ],
    ),
    Question(
        "How much faster is a whole step of RL? The bandit over plain decoding, drafter as it is, a 7B's cost",
        "step.h200",
        "learning.md#step",
        [
            ("32 responses", "step_speedup_4x8", "{:.2f}"),
            ("drafter trained along", "step_speedup_online_4x8", "{:.2f}"),
            ("what training takes: a step's time with it over that without", "muted_over_frozen_4x8", "{:.2f}"),
        ],
    ),
    Question(
        "How fast does the trainer learn, and how soon does it give a worker back?",
        "trainer.h200",
        "learning.md#trainer",
        [
            ("packed batches over padded ones", "packing_speedup", "{:.2f}"),
            ("share of the card's peak", "mfu", "{:.0%}"),
            ("s until a worker is free, median", "yield_s_p50", "{:.2f}"),
        ],
    ),
    Question(
        "Is it lossless?",
        "lossless.h200",
        "correctness.md#lossless",
        [
            ("p-value of sampled laws, chain 3,1,4", "sampling_p_value_chain", "{:.2f}"),
            ("p-value of sampled laws, tree 5,4,16", "sampling_p_value_tree", "{:.2f}"),
            ("greedy answers of the tree that differ, and by no tie", "greedy_non_ties_tree", "{:,}"),
        ],
    ),
    Question(
        "Is a response the same, token for token, whatever drafts it? Against plain decoding, float32",
        "one_sample.cpu2",
        "correctness.md#one_sample",
        [
            ("sampled responses compared", "responses", "{:,}"),
            ("that differ, and by no tie", "non_tie_divergences", "{:,}"),
        ],
    ),
    Question(
        "And in bfloat16? 64 requests at once",
        "one_sample.h200",
        "correctness.md#one_sample",
        [
            (
                "share of the responses that are the same, with speculation and without",
                "equal_responses_share",
                "{:.1%}",
            ),
            ("without, in batches of other sizes", "equal_responses_share_control", "{:.1%}"),
            ("that differ, and by no tie", "non_tie_divergences", "{:,}"),
        ],
    ),
    Question(
        "What may clients and peers send?",
        "safe.cpu2",
        "correctness.md#safe",
        [
            ("hostile requests", "hostile_requests", "{:,}"),
            ("answers of 500 and above, or none", "answers_5xx", "{:,}"),
            ("pickles that ran", "gadgets_run", "{:,}"),
            ("growth of memory in a soak of half an hour", "soak_memory_growth", "{:.1%}"),
        ],
    ),
    Question(
        "Which models and published drafters work?",
        "models.cpu2",
        "correctness.md#models",
        [
            ("families of models tried", "families", "{:,}"),
            ("that EAGLE drafts for", "families_eagle", "{:,}"),
            ("that EAGLE-3 drafts for", "families_eagle3", "{:,}"),
            ("forms of drafters tried", "formats", "{:,}"),
            ("that are served, and exchanged while serving", "formats_exchanged", "{:,}"),
            ("that training can begin with", "formats_trained", "{:,}"),
            ("silently useless", "silently_useless", "{:,}"),
        ],
    ),
    Question(
        "Which RL trainers work unchanged?",
        "trainers.cpu2",
        "correctness.md#trainers",
        [
            ("trainers looked at", "trainers", "{:,}"),
            ("that take whole steps", "trainers_working", "{:,}"),
            ("samples by other weights than their step's", "stale_rollouts", "{:,}"),
        ],
    ),
)


def answers(kept: Mapping[str, Result]) -> str:
    """A table a question, of those that are measured."""
    return "\n\n".join(_answer(question, kept[question.stem]) for question in QUESTIONS if question.stem in kept)


def _answer(question: Question, result: Result) -> str:
    header = [question.asked, f"[{question.stem}](../docs/results/{question.page})"]
    made = result.figures
    return table(header, [[words, form.format(made[name])] for words, name, form in question.figures if name in made])
