"""The trainer's numbers for targets, whatever the servers count and whenever they are started anew."""

from hypothesis import given
from hypothesis import strategies as st

from tlt_server.trainer.data.targets import UNNAMED, Targets


def test_servers_that_count_alike_serve_the_same() -> None:
    targets = Targets()
    assert targets.newest == -1
    assert targets.of("a", 0) is None
    for count in range(3):
        assert targets.hear("a", count, UNNAMED) == targets.hear("b", count, UNNAMED) == count == targets.newest
    assert targets.of("b", 2) == 2
    assert targets.hear("b", 2, UNNAMED) == 2


def test_a_server_that_counts_anew_is_told_apart() -> None:
    targets = Targets()
    for count in range(4):
        targets.hear("a", count, UNNAMED)
    targets.hear("b", 3, UNNAMED)
    assert targets.hear("b", 0, UNNAMED) == 4
    assert targets.of("b", 3) is None
    assert targets.hear("a", 4, UNNAMED) == 5
    assert targets.hear("b", 1, UNNAMED) == 6
    assert targets.count_of(6) == 1


def test_a_name_says_that_a_late_server_serves_the_same() -> None:
    targets = Targets()
    targets.hear("a", 0, UNNAMED)
    assert targets.hear("a", 7, "step 7") == 1
    targets.hear("b", 0, UNNAMED)
    assert targets.hear("b", 1, "step 7") == 1
    assert targets.count_of(1) == 7


def test_an_old_name_for_a_new_publication_is_another_target() -> None:
    targets = Targets()
    assert [targets.hear("a", count, "policy") for count in range(3)] == [0, 1, 2]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.sampled_from([UNNAMED, "x", "y"])), max_size=20))
def test_numbers_grow_for_each_server(heard: list[tuple[str, int, str]]) -> None:
    targets = Targets()
    last: dict[str, tuple[int, int]] = {}
    for server, count, name in heard:
        number = targets.hear(server, count, name)
        assert 0 <= number <= targets.newest
        assert targets.of(server, count) == number
        count_before, number_before = last.get(server, (-1, -1))
        if count > count_before:
            assert number > number_before
        last[server] = count, number
