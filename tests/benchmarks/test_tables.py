"""Tables and plots of kept results: what they show is what was measured, and what cannot be compared is refused."""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import copyfile

import msgspec
import pytest

from benchmarks.commands.project import plots
from benchmarks.commands.project.docs import NAMES, PAGES, PLOTTED, RESULT_PAGES, TABLES, TOP, block, filled
from benchmarks.commands.speed import accept_length, context, speedup
from benchmarks.lib import tables
from benchmarks.lib.tables import RESULTS
from tlt_server import results
from tlt_server.errors import ConfigError
from tlt_server.results import Figures, Result

SPEEDUPS = {
    ("chain_1", "batch_2"): 1.5,
    ("chain_1", "batch_16"): 1.25,
    ("tree_5_4_16", "batch_2"): 2.125,
    ("upstream_tree_5_4_16", "batch_2"): 2.0,
    ("upstream_chain_1", "batch_16"): 1.0,
    ("upstream_plain", "batch_2"): 0.75,
    ("upstream_adaptive", "batch_16"): 0.5,
}
ACCEPTED = {
    ("chain_1_accept_2", "batch_1"): 1.5,
    ("chain_7_accept_2", "batch_1"): 0.5,
    ("chain_7_accept_8", "batch_1"): 2.0,
    ("chain_7_accept_8", "batch_32"): 1.0,
}
CONTEXTS = {
    ("chain_3", "context_8192_batch_1"): 1.5,
    ("chain_7", "context_8192_batch_1"): 2.0,
    ("chain_3", "context_32768_batch_32"): 2.5,
    ("chain_3_accept_3", "context_32768_batch_32"): 1.25,
    ("bandit", "context_8192_batch_1"): 3.0,
}


def made(name: str, speedups: Mapping[tuple[str, str], float]) -> Result:
    """A result with these speed-ups, a tenth to either side; all steps take 12.5 ms and accept 3 tokens."""
    figures: Figures = {"requests": 4_000, "failed_requests": 2}
    for side, load in [*speedups, *(("plain", load) for _, load in speedups)]:
        figures |= {f"tokens_per_s_{side}_{load}": 1000.0, f"step_ms_{side}_{load}": 12.5}
        figures[f"accept_length_{side}_{load}"] = 3.0
    for (side, load), ratio in speedups.items():
        spread = {"speedup": ratio, "speedup_min": ratio - 0.1, "speedup_max": ratio + 0.1, "break_even": 3 / ratio}
        figures |= {f"{what}_{side}_{load}": value for what, value in spread.items()}
    loads = sorted({load for _, load in speedups})
    if name == "speedup":
        figures |= speedup.best_figures(figures, [tables.numbers_in(load)[0] for load in loads])
    return Result(
        name=name,
        date="2026-01-02T03:04:05+00:00",
        machine="a machine",
        versions={"sglang": "0.5.17"},
        revision="0123456789abcdef",
        argv=["python", "-m", "benchmarks", name, "--logs", "a folder"],
        figures=figures,
    )


MADE = {"speedup": made("speedup", SPEEDUPS), "accept_length": made("accept_length", ACCEPTED)}
MADE |= {"context": made("context", CONTEXTS)}


def rows(markdown: str) -> list[list[str]]:
    """The cells of all tables in a text."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown.splitlines() if line.startswith("| ")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The kept demo and made-up tables."""
    copyfile(RESULTS / "demo.cpu2.json", tmp_path / "demo.cpu2.json")
    for name, result in MADE.items():
        results.write(result, tmp_path / f"{name}.{'cpu2' if name == 'speedup' else 'h200'}.json")
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(TOP)))
def test_a_page_shows_what_the_kept_results_say(page: Path) -> None:
    assert filled(page.read_text(), beside=page.parent) == page.read_text(), "run python -m benchmarks docs"


def test_every_generated_part_has_its_place() -> None:
    places = Counter(re.findall(r"<!-- (\w+) -->\n(?s:.*?)<!-- /\1 -->", "".join(each.read_text() for each in PAGES)))
    assert places == Counter(NAMES)


def test_a_part_follows_its_result(folder: Path) -> None:
    page = (RESULT_PAGES / "speed.md").read_text()
    before = filled(page, folder)
    assert "2.12" in before
    assert "](../../benchmarks/results/plots/speedup.cpu2.svg)" in before
    results.write(made("speedup", SPEEDUPS | {("tree_5_4_16", "batch_2"): 2.25}), folder / "speedup.cpu2.json")
    after = filled(before, folder)
    assert "2.12" not in after
    assert filled(after, folder) == after
    (folder / "speedup.cpu2.json").unlink()
    assert block("speedup_cpu", folder) == "Not measured yet."


@pytest.mark.parametrize(
    ("what", "other"), [("revision", "fedcba9876543210"), ("machine", "another machine"), ("revision", "unknown")]
)
def test_figures_of_several_origins_are_refused(
    what: str, other: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = msgspec.structs.replace(MADE["context"], **{what: other})
    message = f"accept_length is of {what} {getattr(MADE['context'], what)!r}, context of {other!r}: they cannot be"
    with pytest.raises(ConfigError, match=message):
        tables.require_one_origin([MADE["speedup"], MADE["accept_length"], odd])
    assert set(PLOTTED) < set(TABLES)
    monkeypatch.setitem(TABLES, "context", (str, ["context.h200", "speedup.cpu2"]))
    results.write(odd, folder / "context.h200.json")
    with pytest.raises(ConfigError, match="cannot be compared"):
        filled("<!-- context -->\n<!-- /context -->", folder)


def test_figures_of_one_origin_are_not() -> None:
    tables.require_one_origin(MADE.values())
    tables.require_one_origin([])


def test_every_side_is_found_and_named_as_its_arm() -> None:
    accepted = accept_length.sides(accept_length.GPU_PAIRS)
    groups = [*speedup.gpu_groups(True), *speedup.cpu_groups(), context.sides([1, 8]), accepted]
    for side in (side for group in groups for side in group):
        for load in ("batch_16", "context_512_batch_8"):
            assert tables.sides_and_loads({f"tokens_per_s_{side.name}_{load}": 1.0}) == ([side.name], [load])
        if tables.arms_of([side.name], "upstream_" if side.upstream else ""):
            arm = side.arm or (side.strategy and side.strategy.pinned)
            assert arm
            numbers = f"{arm.num_steps},{arm.topk},{arm.num_draft_tokens}"
            assert tables.label(side.name).split()[-1] == numbers


def test_numbers_order_arms_and_loads() -> None:
    assert tables.sides_and_loads(made("speedup", SPEEDUPS).figures)[1] == ["batch_2", "batch_16"]
    assert tables.sides_and_loads(made("context", CONTEXTS).figures)[0] == [
        *("bandit", "chain_3", "chain_7", "chain_3_accept_3", "plain"),
    ]


def test_caption_says_where_the_figures_are_from() -> None:
    assert tables.caption(MADE["speedup"]) == (
        "`python -m benchmarks speedup --logs 'a folder'`\n\n"
        "a machine; sglang 0.5.17; revision 012345678; 2026-01-02. 2 of 4,000 requests failed. "
        "Between rounds, a speed-up varies by ±0.10 in the median cell, by ±0.10 at most."
    )
    wide = MADE["speedup"].figures | {"speedup_max_chain_1_batch_2": 3.5}
    dirty = msgspec.structs.replace(MADE["speedup"], revision="0123456789abcdef+", figures=wide)
    assert "revision 012345678 with uncommitted changes;" in tables.caption(dirty)
    assert "±0.10 in the median cell, by ±1.05 at most" in tables.caption(dirty)
    single = dict.fromkeys(MADE["speedup"].figures, 1)
    assert tables.caption(msgspec.structs.replace(dirty, figures=single)).endswith(
        "One round: its spread is not known."
    )
    some = msgspec.structs.replace(dirty, figures=single | {"rounds_plain": 3, "rounds_bandit": 2})
    assert tables.caption(some).endswith("Medians of 2 to 3 rounds.")


def test_speedup() -> None:
    assert rows(tables.speedup(MADE["speedup"])) == [
        ["speed-up", "batch 2", "batch 16"],
        ["---", "--:", "--:"],
        ["chain 1,1,2", "1.50", "**1.25**"],
        ["tree 5,4,16", "**2.12**", ""],
        ["SGLang, its best arm", "2.00", "1.00"],
        ["SGLang, adaptive", "", "0.50"],
        ["SGLang, plain", "0.75", ""],
        ["plain, tokens/s", "1,000", "1,000"],
        ["plain, ms per step", "12.5", "12.5"],
        ["accept length: needed / reached", "batch 2", "batch 16"],
        ["---", "--:", "--:"],
        ["chain 1,1,2", "2.00 / 3.00", "2.40 / 3.00"],
        ["tree 5,4,16", "1.41 / 3.00", ""],
    ]
    alone = {pair: ratio for pair, ratio in SPEEDUPS.items() if not pair[0].startswith("upstream_")}
    assert "SGLang" not in tables.speedup(made("speedup", alone))


def test_headline() -> None:
    ratios = SPEEDUPS | {("bandit", "batch_2"): 2.25, ("upstream_adaptive", "batch_16"): 0.5}
    assert rows(tables.headline(made("strategy", ratios)))[2:] == [
        ["2", "1,000", "2.00 (5,4,16)", "2.12 (5,4,16)", "", "2.25"],
        ["16", "1,000", "1.00 (1,1,2)", "1.25 (1,1,2)", "0.50", ""],
    ]


def test_accept_length() -> None:
    assert rows(tables.accept_length(MADE["accept_length"])) == [
        ["speed-up at accept length", "arm", "batch 1", "batch 32"],
        ["---", "--:", "--:", "--:"],
        ["2", "chain 1,1,2", "1.50", ""],
        ["8", "chain 7,1,8", "2.00", "1.00"],
        ["breaks even", "chain 1,1,2", "2.00", ""],
        ["breaks even", "chain 7,1,8", "1.50", "3.00"],
        ["ms per step", "batch 1", "batch 32"],
        ["---", "--:", "--:"],
        ["chain 1,1,2", "12.50", ""],
        ["chain 7,1,8", "12.50", "12.50"],
    ]
    natural = {
        "accept_length_natural_chain_3": 3.57,
        "accept_length_chain_3_at_1024": 3.5,
        "accept_length_at_1024": 3.5,
    }
    both = msgspec.structs.replace(MADE["accept_length"], figures=MADE["accept_length"].figures | natural)
    assert rows(tables.accept_length(both))[2:4] == [["natural chain 3", "3.57"], ["chain 3 at 1024", "3.50"]]


def test_context() -> None:
    header, _, *cells = rows(tables.context(MADE["context"]))
    assert header[3:] == [
        *("chain 3,1,4", "needed / reached"),
        *("chain 7,1,8", "needed / reached"),
        *("chain 3,1,4 at accept length 3", "needed / reached"),
        "bandit",
    ]
    assert cells == [
        ["8,192", "1", "12.5", "1.50", "2.00 / 3.00", "2.00", "1.50 / 3.00", "", "", "3.00"],
        ["32,768", "32", "12.5", "2.50", "1.20 / 3.00", "", "", "1.25", "2.40 / 3.00", ""],
    ]


def lines(result: Result) -> dict[str, tuple[Sequence[float], Sequence[float]]]:
    """The curves of a picture, by their labels."""
    return {str(line.get_label()): (*line.get_data(),) for line in plots.draw(result).axes[0].lines}


def test_plots_show_the_figures() -> None:
    drawn = {label: [list(values) for values in data] for label, data in lines(MADE["speedup"]).items()}
    assert drawn["chain 1,1,2"] == [[2, 16], [1.5, 1.25]]
    assert drawn["tree 5,4,16"] == [[2], [2.125]]
    assert drawn["SGLang, adaptive"] == [[16], [0.5]]
    drawn = {label: [list(values) for values in data] for label, data in lines(MADE["context"]).items()}
    assert drawn["bandit, batch 1"] == [[8192], [3.0]]
    assert drawn["chain 3,1,4 accepting 3, batch 32"] == [[32_768], [1.25]]


def test_plots_have_bands_from_the_slowest_round_to_the_fastest() -> None:
    band = plots.draw(MADE["speedup"]).axes[0].collections[0].get_paths()[0].get_extents()
    assert (band.x0, band.x1, band.y0, band.y1) == pytest.approx((2, 16, 1.15, 1.6))


@pytest.mark.slow
def test_plots_are_the_same_each_time(folder: Path) -> None:
    for path in plots.plotted(folder):
        plots.write(path, folder / "once")
        plots.write(path, folder / "twice")
    once, twice = ({each.name: each.read_bytes() for each in (folder / name).iterdir()} for name in ("once", "twice"))
    assert once == twice
    assert once.keys() == {f"{name}.{end}" for name in ("speedup.cpu2", "context.h200") for end in ("png", "svg")}


@pytest.mark.parametrize("result", plots.plotted(RESULTS), ids=lambda path: path.name)
def test_kept_plots_show_the_kept_results(result: Path) -> None:
    source = hashlib.sha256(result.read_bytes()).hexdigest().encode()
    for end in ("png", "svg"):
        picture = RESULTS / "plots" / f"{result.stem}.{end}"
        assert picture.exists(), "run python -m benchmarks plots"
        assert source in picture.read_bytes(), "run python -m benchmarks plots"


def test_the_page_of_benchmarks_is_short() -> None:
    assert len((TOP / "benchmarks/README.md").read_text().splitlines()) <= 150
