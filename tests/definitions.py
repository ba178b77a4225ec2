"""Which figures docs/results define: those of kept results have to be, and those that commands make."""

import re
from collections.abc import Iterable
from functools import cache

from benchmarks.lib.tables import RESULTS

PAGES = sorted((RESULTS.parents[1] / "docs/results").glob("*.md"))
PLACEHOLDERS = {
    **dict.fromkeys(("ARM", "DTYPE", "X"), "[a-z0-9]+"),
    "RIVAL": "adaptive|best_arm|elastic|table|paper",
    "D": r"\d+",
    "N": r"(natural_)?\d+",
    "CHOICE": r"off|(chain|tree)(_\d+)+",
    **dict.fromkeys(("FROM", "TO"), "[a-z_]+"),
    "OLD": "good|random",
    "WHERE": "running|prefix",
    "ROUTE": r"eagle3?_tp\d+_(disk|tensor|distributed|ipc)",
    "SIDE": r"(upstream_|1500m_|32b_|moe_|fp8_)?(plain(_random)?|adaptive|off|paper|bandit(_cold)?|elastic|table"
    r"|(chain|tree)(_\d+)+(_accept_\d+)?)",
    "CHAIN": r"chain_\d+(_temperature_06|_top_p_095|_noised|_stale|_eagle3)?",
    "SERVER": "one|naive|pool",
    "TURN": "plain|no_drafter|(fresh|stale|unrepeated)_(bandit|history)",
    "EPOCH": "first_epoch|second_epoch|unrepeated",
    "STATE": "fresh|stale",
    "DRAWN": r"off|(chain|history)_\d+",
    "BATCH": r"\d+x\d+(_long)?(_change)?(_apart)?(_offload|_one_step_off|_partial)?",
    "SHAPE": "1500m|32b|moe|fp8",
    "BIN": r"\d\d",
    "BUDGET": "default|everything",
    "WAY": "packed|padded|masked|sorted",
    "PHASE": "decode|verify|sampling|extend|between|draft",
    "GROUP": "[a-z]+",
    "WHEN": "before|last",
    "ESTIMATE": "(accept_length|tokens_per_s|reward|accuracy)_[a-z_]+",
    "TRAINER": "ours|(recipe|code)(_fast)?",
    "LOSS": "cross_entropy|total_variation|lk|lk_hybrid|hits",
    "SIZE": r"\d+[bgm]",
    "LINK": r"\d+g",
    "SPREAD": "star|tree|ring|disk|keeper",
    "LOAD": r"(context_\d+_)?batch_\d+",
}


def undefined(figures: Iterable[str]) -> list[str]:
    """Those that docs/results do not define."""
    return [name for name in figures if not _defined().fullmatch(name)]


@cache
def _defined() -> re.Pattern[str]:
    definitions = re.findall(r"`([a-zA-Z0-9_]+)`", "".join(page.read_text() for page in PAGES))
    return re.compile("|".join(re.sub("[A-Z]+", _placeholder, each) for each in dict.fromkeys(definitions)))


def _placeholder(found: re.Match[str]) -> str:
    return f"(?:{PLACEHOLDERS[found[0]]})" if found[0] in PLACEHOLDERS else found[0]
