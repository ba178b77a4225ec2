"""Parts of the front that need no network: routing, the table of calls, the log, metrics, evidence of a benchmark."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.lib.fleet.evidence import Begin, Published, sampled_twice, stale_served, torn
from benchmarks.lib.fleet.spread import CHUNK, spread
from tlt_server.errors import BadRequest, ConfigError
from tlt_server.fleet.calls import CONTROL, OF_ONE, called, for_ranks, merged, naming, said
from tlt_server.fleet.log import Entry, Log, Past, checksum
from tlt_server.fleet.reads import labelled
from tlt_server.fleet.requests.routing import NOTHING, SLACK, asked, choose, key_of
from tlt_server.fleet.start.replicas import as_reached, ranks
from tlt_server.fleet.transaction import Kind, Publication

NAMES = [f"m{i}" for i in range(5)]


# -- routing --


@given(st.binary(max_size=16), st.integers(1, 5))
def test_a_key_has_one_member_and_keeps_it_when_another_leaves(key: bytes, count: int) -> None:
    names = NAMES[:count]
    first = choose(key, {}, names)
    for gone in set(names) - {first}:
        assert choose(key, {}, [name for name in names if name != gone]) == first


@given(st.lists(st.binary(max_size=8), min_size=1, max_size=200))
def test_nobody_has_much_more_than_the_others(keys: list[bytes]) -> None:
    running: Counter[str] = Counter()
    for key in keys:
        running[choose(key, running, NAMES)] += 1
        assert max(running.values()) <= 1.25 * running.total() / len(NAMES) + SLACK + 1


def test_without_a_key_the_least_busy() -> None:
    assert choose(None, {"m0": 2, "m1": 1}, ["m0", "m1"]) == "m1"


@pytest.mark.parametrize(
    ("body", "key"),
    [
        (b'{"input_ids": [1, 2,3], "session_id": "s"}', b"s"),
        (b'{"input_ids": [1,2]}', b"1,2"),
        (b'{"prompt": [[1,2],[3]]}', b"1,2"),
        (b'{"token_ids": [7]}', b"7"),
        (b'{"text": "abc"}', b'"abc"'),
        (b"{}", None),
        (b"nonsense", None),
    ],
)
def test_keys(body: bytes, key: bytes | None) -> None:
    assert key_of({}, asked(body)) == key
    assert key_of({"X-Session-ID": "h", "X-SMG-Routing-Key": "r"}, asked(body)) == b"h"


def test_a_key_is_of_the_first_256_ids() -> None:
    long = json.dumps({"input_ids": [*range(256), 1]}).encode()
    other = json.dumps({"input_ids": [*range(256), 2]}).encode()
    assert key_of({}, asked(long)) == key_of({}, asked(other))
    assert key_of({}, asked(long)) != key_of({}, asked(b'{"input_ids": [9, 9]}'))


@given(st.binary())
def test_any_body_is_read_or_left_alone(body: bytes) -> None:
    assert asked(body) is NOTHING or isinstance(asked(body).rids, list)


# -- calls --


def test_ranks_follow_one_another() -> None:
    body = b'{"init_info": {"rank_offset": 1, "world_size": 9, "packed": true}}'
    given = [json.loads(each)["init_info"] for each in for_ranks(body, said(body), [2, 4, 2])]
    assert [each.pop("rank_offset") for each in given] == [1, 3, 7]
    assert given == [{"world_size": 9, "packed": True}] * 3
    with pytest.raises(BadRequest, match="rank_offset"):
        for_ranks(b"{}", said(b"{}"), [1])


def test_rpcs_are_what_their_method_is() -> None:
    kinds = {"skyrl_start_weight_update": Kind.OPEN, "update_weights_nccl": Kind.WRITE, "liveness_probe": Kind.PLAIN}
    for method, kind in kinds.items():
        call = called("POST", "/collective_rpc", said(json.dumps({"method": method}).encode()))
        assert call is not None
        assert call.kind is kind
    assert called("POST", "/nothing", said(b"")) is None


def test_answers_are_merged() -> None:
    assert merged("/x", [b"plain"], []) == b"plain"
    assert json.loads(merged("/x", [b'{"success":true}', b"{}"], ["b"])) == {"success": True, "quarantined": ["b"]}
    assert json.loads(merged("/collective_rpc", [b'{"results":[null]}'] * 2, [])) == {"results": [None, None]}


@pytest.mark.parametrize("body", [b"", b"{}", b'{"a": 1}', b'{"weight_version": null}  '])
def test_a_name_is_put_into_a_body(body: bytes) -> None:
    assert json.loads(naming(body, 'v"1'))["weight_version"] == 'v"1'


@pytest.mark.parametrize("body", [b"[]", b"{", b"\xff", b'{"weight_version": 3}'])
def test_a_control_call_is_an_object(body: bytes) -> None:
    with pytest.raises(BadRequest):
        said(body)


def test_a_publication_ends_with_what_was_to_follow_it() -> None:
    none, disk = (None, None), ("/p", "c")
    under_way, over = Publication().after(Kind.WRITE, "v", disk)
    assert (over, under_way.path, under_way.over().holds) == (True, "/p", False)
    paused, over = Publication().after(Kind.PAUSE, None, none)
    assert not over
    for _ in range(2):
        paused, over = paused.after(Kind.WRITE, "v", disk)
        assert not over
    assert paused.path is None, "neither of two folders is the whole"
    ended, over = paused.after(Kind.RESUME, None, none)
    assert (over, ended.named, ended.over()) == (True, "v", Publication())
    assert Publication(paused=True).after(Kind.NAME, "n", none)[1], "another name for the same weights, at once"


# -- the log --


def entry(number: int, phase: str, **what: object) -> Entry:
    given = {"call": "POST /x", "members": ["a"], "version": "v", "publications": 1, "time": 0.0}
    return Entry(number=number, phase=phase, **(given | what))  # type: ignore[arg-type]


def past_of(folder: Path) -> Past:
    log = Log(folder)
    log.close()
    return log.past


def test_a_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.write(entry(1, "apply", version="w"))
    log.write(entry(2, "commit", path="/p", checksum="c", under_way={"paused": True}, setting=("PUT", "/s", "{}")))
    log.write(entry(3, "apply", version="u"))
    log.close()
    past = past_of(tmp_path)
    assert (past.version, past.path, past.checksum, past.under_way) == ("v", "/p", "c", Publication(paused=True))
    assert past.settings == {"PUT /s": ("PUT", "/s", "{}")}
    assert past.doubt is not None
    assert past.doubt.version == "u"


def test_a_line_that_was_cut_short_is_as_good_as_none(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.write(entry(1, "commit"))
    log.close()
    with log.path.open("ab") as file:
        file.write(b'{"number": 2, "phase": "app')
    log = Log(tmp_path)
    assert (log.past.number, log.past.doubt) == (1, None)
    log.write(entry(2, "commit", version="w"))
    log.close()
    assert past_of(tmp_path).version == "w"


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "transactions.jsonl").write_text('{"a": 1}\n{"b": 2}\n')
    with pytest.raises(ConfigError, match="line 1"):
        Log(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--state-dir"):
        Log(tmp_path / "file")


def test_checksums(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 3_000_000)
    first = checksum(str(tmp_path))
    assert first == checksum(str(tmp_path))
    (tmp_path / "a").write_bytes(b"x" * 2_999_999 + b"y")
    assert checksum(str(tmp_path)) != first
    assert checksum(str(tmp_path / "none")) is None


# -- metrics, flags, evidence --


def test_metrics_of_all_are_one_text() -> None:
    text = b'# HELP h Says.\n# TYPE h histogram\nh_bucket{le="1"} 1\nh_count 1\nh_sum 2\n# TYPE g gauge\ng 3\n'
    families = {
        family.name: family for family in text_string_to_metric_families(labelled({"a": text, 'b"': text}).decode())
    }
    assert [sample.labels["replica"] for sample in families["g"].samples] == ["a", 'b"']
    assert families["h"].type == "histogram"
    assert len(families["h"].samples) == 6


def test_gpus_of_a_replica() -> None:
    assert ranks([]) == 1
    assert ranks(["--tp-size", "4", "--pp-size=2", "--dp", "2"]) == 16


def test_evidence_counts_what_is_wrong() -> None:
    published = [Published("v1", 1.0, 2.0), Published("v2", 3.0, 4.0)]
    good = [Begin(0.5, "a", "default", 1), Begin(1.5, "b", "v1", 1), Begin(2.5, "c", "v1", 2), Begin(5.0, "d", "v2", 2)]
    assert (stale_served(good, published), torn(good, published), sampled_twice(good, {})) == (0, 0, 0)
    assert stale_served([*good, Begin(6.0, "e", "v1", 1)], published) == 1, "older than what was acknowledged"
    assert stale_served([*good, Begin(2.7, "e", "v2", 1)], published) == 1, "newer than what had begun"
    assert torn([*good, Begin(6.0, "e", "v1", 1)], published) == 1
    again = [*good, Begin(5.5, "d", "v2", 1)]
    assert (sampled_twice(again, {}), sampled_twice(again, {2: 5.2}), sampled_twice(again, {2: 5.6})) == (1, 0, 1)


@pytest.mark.parametrize(
    ("front", "reached"),
    [
        ("http://0.0.0.0:30000", "http://10.0.0.9:30000"),
        ("http://[::]:30000", "http://10.0.0.9:30000"),
        ("http://127.0.0.1:30000", "http://127.0.0.1:30000"),
        ("http://front.example:1", "http://front.example:1"),
    ],
)
def test_replicas_find_a_front_that_listens_everywhere(front: str, reached: str) -> None:
    assert as_reached(front, "10.0.0.9") == reached


# -- bytes to many hosts --


@given(st.integers(1, 40), st.integers(1, 64), st.integers(1, 64))
def test_a_spread_is_no_faster_than_its_links(chunks: int, receivers: int, fan_out: int) -> None:
    size, rate = chunks * CHUNK, 1e9
    found = spread(size, receivers, fan_out, rate)
    assert found.seconds >= min(fan_out, receivers) * size / rate - 1e-9
    assert found.root_busy_s == pytest.approx(min(fan_out, receivers) * size / rate)
    assert found.seconds <= receivers * size / rate + 1e-9, "never slower than one after the other"


def test_a_star_and_a_chain_take_what_they_must() -> None:
    assert spread(10 * CHUNK, 8, 8, 1e9).seconds == pytest.approx(8 * 10 * CHUNK / 1e9)
    assert spread(10 * CHUNK, 8, 1, 1e9).seconds == pytest.approx((10 + 7) * CHUNK / 1e9)


def test_what_can_be_set_can_be_read() -> None:
    assert {"/tlt/v1/strategy", "/tlt/v1/strategy/learned", "/tlt/v1/history"} <= {path for _, path in CONTROL} & OF_ONE
