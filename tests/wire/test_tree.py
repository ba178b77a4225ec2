"""The plan of who fetches from whom: everybody is reached, nobody by way of himself, and nobody gives to too many."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.wire.ends import Hands
from tlt_server.wire.tree import DOUBTED, PAYS, Member, Tree

fan_outs = st.integers(0, 5)
counts = st.integers(0, 80)


def member(number: int, door: str | None = None) -> Member:
    return Member(0.0, f"tcp://10.0.0.{number}:7" if door is None else door, b"key %d" % number)


def planted(count: int, fan_out: int, hands: Hands | None = None, without: frozenset[int] = frozenset()) -> Tree:
    """With that many servers, named by their numbers. without: those that have no door."""
    tree = Tree(fan_out, pays=0, clock=hands or Hands())
    for number in range(count):
        tree.members[b"%d" % number] = member(number, "" if number in without else None)
    return tree


def plan(tree: Tree) -> dict[bytes, bytes | None]:
    """Whom each fetches from, of a new drafter; checked for what holds of any plan."""
    doors = {each.door: peer for peer, each in tree.members.items() if each.door}
    sources = {peer: tree.source(peer) for peer in tree.begin(1)}
    above = {peer: doors[source.door] if source else None for peer, source in sources.items()}
    assert above.keys() == tree.members.keys()
    for peer, source in sources.items():
        assert (source.level if source else 0) == len(path(above, peer)) - 1  # which ends: none is above itself
        assert source is None or source.key == tree.members[doors[source.door]].key
    return above


def path(above: dict[bytes, bytes | None], peer: bytes | None) -> list[bytes]:
    found: list[bytes] = []
    while peer is not None:
        assert peer not in found
        found.append(peer)
        peer = above[peer]
    return found


@given(counts, st.integers(1, 5))
def test_all_are_reached_by_few_steps(count: int, fan_out: int) -> None:
    above = plan(planted(count, fan_out))
    below = Counter(above.values())
    assert all(many <= fan_out for many in below.values())
    deepest = max((len(path(above, peer)) for peer in above), default=0)
    assert sum(fan_out**level for level in range(1, deepest)) < count or count == 0  # no level is begun before need


@given(counts)
def test_without_a_fan_out_all_fetch_from_the_trainer(count: int) -> None:
    tree = planted(count, 0)
    assert set(plan(tree).values()) <= {None}
    assert tree.takers == ()


def test_few_servers_are_left_alone() -> None:
    for count in (1, 2):
        tree = planted(count, 2)
        assert tree.takers == ()
        assert set(plan(tree).values()) == {None}
    assert planted(3, 2).takers == (b"key 0", b"key 1", b"key 2")


def test_a_small_drafter_goes_to_all_at_once() -> None:
    tree = Tree(2)
    tree.members |= {b"%d" % number: member(number) for number in range(4)}
    assert [tree.source(peer) for peer in tree.begin(PAYS // 4 - 1)] == [None] * 4
    assert [bool(tree.source(peer)) for peer in tree.begin(PAYS // 4)] == [False, False, True, True]


@given(counts, st.integers(1, 4), st.frozensets(st.integers(0, 79)))
def test_who_has_no_door_gives_to_nobody_and_takes_no_place_of_who_has(
    count: int, fan_out: int, without: frozenset[int]
) -> None:
    tree = planted(count, fan_out, without=without)
    above = plan(tree)
    below = Counter(above.values())
    assert all(below[b"%d" % number] == 0 for number in without)
    assert all(many <= fan_out for peer, many in below.items() if peer is not None)
    doors = sum(bool(each.door) for each in tree.members.values())
    assert below[None] <= max(fan_out, count - fan_out * doors)  # all room is used before the trainer's link is


@given(
    st.lists(
        st.tuples(st.sampled_from(["join", "leave", "fail", "begin", "ask", "wait"]), st.integers(0, 20)), max_size=60
    )
)
def test_whoever_joins_leaves_or_fails(steps: list[tuple[str, int]]) -> None:
    """In the middle of a drafter, in any order."""
    hands = Hands()
    tree, fan_out = Tree(2, 0, hands), 2
    for what, number in steps:
        peer = b"%d" % number
        match what:
            case "join":
                tree.members[peer] = member(number)
            case "leave" if peer in tree.members:
                tree.leave(peer)
            case "fail" if peer in tree.members:
                tree.failed(peer)
            case "begin":
                tree.begin(1)
            case "ask" if peer in tree.members:
                source = tree.source(peer)
                assert tree.source(peer) == source
            case "wait":
                hands.now += number * DOUBTED / 20
        takes = Counter(source.door for each in tree.members if (source := tree.source(each)) is not None)
        assert all(many <= fan_out for many in takes.values())
        assert takes.keys() <= {each.door for each in tree.members.values()}
    plan(tree)


def test_who_could_not_fetch_and_its_source_are_left_alone_for_a_while(hands: Hands) -> None:
    tree = planted(7, 2, hands)
    above = plan(tree)
    assert (above[b"2"], above[b"4"]) == (b"0", b"1")
    tree.failed(b"2")
    tree.failed(b"0")  # which has no source: it fetches from the trainer in any case
    above = plan(tree)
    assert above[b"2"] is None
    assert above[b"0"] is None
    assert not {b"0", b"2"} & set(above.values())
    assert above[b"1"] is None
    hands.now += DOUBTED
    assert plan(tree)[b"2"] == b"0"


def test_who_comes_late_finds_room_below_who_is_here() -> None:
    tree = planted(4, 2)
    plan(tree)
    tree.members[b"late"] = member(9)
    source = tree.source(b"late")
    assert source is not None
    assert source.door == tree.members[b"1"].door
    tree.leave(b"1")
    assert tree.source(b"late") is None  # should it ask again
    tree.members[b"later"] = member(10)
    assert tree.source(b"later") is None  # in the place by the trainer that is free now


def test_only_its_own_machine_fetches_from_a_local_door() -> None:
    tree = Tree(1, 0)
    doors = ("tcp://127.0.0.1:7", "tcp://10.0.0.1:7", "tcp://127.0.0.1:8", "ipc:///dev/shm/x/door", "tcp://10.0.0.2:7")
    tree.members |= {b"%d" % number: member(number, door) for number, door in enumerate(doors)}
    assert plan(tree) == {b"0": None, b"1": None, b"2": b"0", b"3": b"1", b"4": None}
