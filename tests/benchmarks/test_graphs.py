"""What benchmarks/commands/speed/graphs.py computes of what servers say of their graphs."""

import pytest
from tlt_client.schemas import Arm, CapturedPass

from benchmarks.commands.speed import graphs
from benchmarks.commands.speed.graphs import ARMS, NAIVE, ONE, POOL, figures_of, ratios
from tests.definitions import undefined
from tlt_server.results import Figures, measured_here
from tlt_server.strategy.arms import DRAFTING, KEYS, PLAIN, VERIFICATION, alike
from tlt_server.strategy.settings import to_client

PLAIN_PASS = CapturedPass(PLAIN, (), (1, 2, 4), 0.5, 0.1, 0.1)


def made(kind: str, gb: float, *sizes: int, arms: tuple[Arm | None, ...]) -> CapturedPass:
    return CapturedPass(kind, tuple(arm for arm in arms if arm), sizes, gb, gb / 4, gb / 8)


def all_figures() -> Figures:
    first, second = map(to_client, ARMS[:2])
    one = [made(VERIFICATION, 1.0, 1, 2, 4, arms=(first,)), PLAIN_PASS]
    naive = [made(VERIFICATION, 1.0, 1, 2, 4, arms=(arm,)) for arm in (first, second)]
    pool = [made(VERIFICATION, 1.0, 1, 2, 4, arms=(first, second)), made(DRAFTING, 0.4, 1, 2, arms=(second,))]
    servers = {ONE: one, NAIVE: [*naive, PLAIN_PASS], POOL: [*pool, PLAIN_PASS]}
    figures: Figures = {}
    for name, passes in servers.items():
        figures |= figures_of(name, passes)
    return figures | ratios(figures)


def test_a_server_takes_what_its_passes_take() -> None:
    figures = all_figures()
    assert [figures[f"graph_gb_{name}"] for name in (ONE, NAIVE, POOL)] == pytest.approx([1.5, 2.5, 1.9])
    assert figures["graph_ratio_pool"] == pytest.approx(1.9 / 1.5)
    assert figures["graph_gb_naive_chain_7"] == 1.0
    assert figures["graph_gb_pool_drafting"] == pytest.approx(0.4)
    assert (figures["graphs_pool"], figures["graphs_one"]) == (8, 6)
    reached = [figures[f"largest_batch_pool_{arm}"] for arm in ("chain_3", "chain_7")]
    assert reached == [4, 2], "an arm goes as far as all its passes do"
    assert not undefined(figures)
    shown = graphs.table(measured_here("graphs", ["x"], figures))
    assert "| pool | 4 | 8 | 1.90 | 1.27 |" in shown
    assert "| chain 7,1,8 |  | 4 | 2 |" in shown


def test_where_nothing_is_captured_nothing_is_claimed() -> None:
    assert figures_of(ONE, ()) == ratios({}) == {}
    assert "No CUDA graph was captured" in graphs.table(measured_here("graphs", ["x"], {}))


@pytest.mark.parametrize("kind", KEYS)
def test_each_arm_has_each_pass_once(kind: str) -> None:
    """Arms that have a pass in common fall into groups."""
    groups = {alike(kind, arm, ARMS) for arm in ARMS}
    assert sorted((arm for group in groups for arm in group), key=str) == sorted(ARMS, key=str)
