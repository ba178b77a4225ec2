"""What goes to the server and what comes back, where nothing fails; and arguments that are refused."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from sglang_stand_in import (
    rollout,
    says,
    serving,
    well,
)

from tlt_client import (
    BadRequest,
    Client,
    DrafterSpan,
    InvalidArgument,
    ProtocolError,
    Retry,
    SamplingParams,
    SpecCounts,
    TargetSpan,
    VersionConflict,
)

Connect = Callable[..., Any]


def test_a_request_says_what_was_asked_and_nothing_else(connect: Connect) -> None:
    with serving() as server:
        client = connect(server.url + "/", api_key="key")
        client.generate("ab")
        client.generate(
            range(3, 6), SamplingParams(temperature=1.0, top_k=-1, logit_bias={5: 1.5}, stop=("x", "y")),
            logprobs=True, rid="mine", extra={"priority": 3},
        )  # fmt: skip
        first, second = server.bodies
        rid = first.pop("rid")
        assert len(rid) == 32
        assert first == {"text": "ab", "sampling_params": {}, "stream": False}
        assert second == {
            "input_ids": [3, 4, 5],
            "sampling_params": {"temperature": 1.0, "top_k": -1, "logit_bias": {"5": 1.5}, "stop": ["x", "y"]},
            "return_logprob": True,
            "rid": "mine",
            "priority": 3,
            "stream": False,
        }
        assert {key for *_, key in server.other} == {"Bearer key"}


def test_a_rollout_holds_all_that_the_server_says(connect: Connect) -> None:
    with serving() as server:
        given = connect(server.url).generate([65, 66, 2], logprobs=True)
    assert given.tokens == (65, 66, 2)
    assert given.logprobs == (-0.065, -0.066, -0.002)
    assert (given.finish_reason.type, given.finish_reason.matched) == ("stop", 2)
    assert (given.prompt_tokens, given.completion_tokens, given.cached_tokens) == (7, 3, 2)
    assert (given.weight_version, given.accept_length, given.spec, given.aborted) == ("default", None, None, False)


def test_a_rollout_may_need_a_version(connect: Connect) -> None:
    refusal = {"message": "weight_version 'step 7' is not in force: 'step 6' is, target_version 6"}
    with serving(well, well, well, well, says(409, refusal)) as server:
        client = connect(server.url)
        client.generate("ab")
        client.generate("ab", version="step 7")
        client.generate_group("ab", 1, version=0)
        client.stream("ab", version=7)
        assert server.versions == [
            {}, {"X-TLT-Weight-Version": "step 7"}, {"X-TLT-Target-Version": "0"}, {"X-TLT-Target-Version": "7"}
        ]  # fmt: skip
        with pytest.raises(VersionConflict, match="'step 6' is"):
            client.generate_batch(["ab"], version="step 7")
        for version in ("", "stępień", "a\nb"):
            with pytest.raises(InvalidArgument, match="printable ASCII"):
                client.generate("ab", version=version)
    assert len(server.bodies) == 5


NEW = {"spec_verify_ct": 2, "spec_num_correct_drafts": 1, "spec_num_proposed_drafts": 6}
OLD = {"spec_verify_ct": 2, "spec_accept_token_num": 1, "spec_draft_token_num": 6}


@pytest.mark.parametrize(
    ("meta", "accept_length", "spec"),
    [
        (NEW | {"spec_accept_length": 1.5}, 1.5, SpecCounts(2, 1, 6)),
        (OLD | {"spec_accept_length": 1.5}, 1.5, SpecCounts(2, 1, 6)),
        (NEW | OLD, 1.5, SpecCounts(2, 1, 6)),
        ({"spec_verify_ct": 2}, 1.5, None),
        ({"spec_verify_ct": 0}, None, None),
        ({}, None, None),
    ],
)
def test_speculation_is_read_under_its_old_and_new_names(
    connect: Connect, meta: dict[str, Any], accept_length: float, spec: SpecCounts | None
) -> None:
    with serving(lambda h, f: h.answer(200, rollout(f, [65, 66, 2], {"type": "stop"}, **meta))) as server:
        given = connect(server.url).generate("a")
    assert (given.accept_length, given.spec) == (accept_length, spec)


def test_versions_are_read_from_tlt_server_and_from_sglang(connect: Connect) -> None:
    theirs = {"version": "7", "start": 0, "end": 1}
    ours = {"version": "8", "target_version": 3, "partial": True, "start": 1, "end": 3}
    meta = {"weight_versions": [theirs, ours], "drafter_versions": [{"version": 2, "start": 0, "end": 3}]}
    with serving(lambda h, f: h.answer(200, rollout(f, [65, 66, 2], {"type": "stop"}, **meta))) as server:
        given = connect(server.url).generate("a")
    assert given.weight_versions == (TargetSpan(0, 1, "7"), TargetSpan(1, 3, "8", 3, partial=True))
    assert given.drafter_versions == (DrafterSpan(0, 3, 2),)


LOGPROBS = [
    (None, "no `output_token_logprobs`"),
    ([[-1.0, 65, None]], "1 `output_token_logprobs` are not of the 2 tokens"),
    ([[-1.0, 66, None], [-1.0, 65, None]], "not of the 2 tokens"),
    ([[-1.0, 65, None], [-1.0, 65, None], [-1.0, 65, None]], "3 `output_token_logprobs`"),
    ([[-1.0, 65, None], [None, 65, None]], "NaN or infinity"),
    ([[-1.0, 65]], "length 3"),
]


@pytest.mark.parametrize(("entries", "message"), LOGPROBS)
def test_logprobs_that_are_not_those_of_the_tokens_are_refused(connect: Connect, entries: Any, message: str) -> None:
    act = lambda h, f: h.answer(200, rollout(f, [65, 65], {"type": "stop"}, output_token_logprobs=entries))  # noqa: E731
    with serving(act) as server, pytest.raises(ProtocolError, match=message):
        connect(server.url).generate("a", logprobs=True)


def test_nothing_sampled_has_no_logprobs(connect: Connect) -> None:
    """SGLang sends an entry all the same, for the token that max_new_tokens=0 did not keep."""
    act = lambda h, f: h.answer(200, rollout(f, [], {"type": "length"}, output_token_logprobs=[[-1.0, 9, None]]))  # noqa: E731
    with serving(act) as server:
        assert connect(server.url).generate("a", logprobs=True).logprobs == ()


WRONG: list[tuple[Callable[[Client], Any], str]] = [
    (lambda c: c.generate([]), "at least one"),
    (lambda c: c.generate([1, -1]), "none negative"),
    (lambda c: c.generate([1.0]), "generate_batch"),  # type: ignore[list-item]
    (lambda c: c.generate(["a", "b"]), "generate_batch"),  # type: ignore[list-item]
    (lambda c: c.generate(None), "not NoneType"),  # type: ignore[arg-type]
    (lambda c: c.generate_batch("abc"), "one string"),
    (lambda c: c.generate_batch(["a"], [SamplingParams()] * 2), "2 sampling parameters for 1 prompts"),
    (lambda c: c.generate_group("a", 0), "n=0"),
    (lambda c: c.generate("a", extra={"stream": True}), "stream"),
    (lambda c: c.generate("a", extra={"x": object()}), "JSON"),
    (lambda c: c.generate("a", deadline_s=0), "deadline_s=0"),
    (lambda c: c.generate("a", deadline_s=float("nan")), "deadline_s=nan"),
    (lambda c: c.generate("a", rid=""), "rid=''"),
    (lambda c: c.generate("a", rid="~a"), "rid='~a'"),
    (lambda c: c.stream("a", rid="~a"), "rid='~a'"),
    (lambda c: c.abort(""), "abort_all"),
    (lambda c: c.flush_cache(-1), "wait_s=-1"),
]


@pytest.mark.parametrize("index", range(len(WRONG)))
def test_a_wrong_argument_is_refused_before_anything_is_sent(connect: Connect, index: int) -> None:
    call, message = WRONG[index]
    with pytest.raises(InvalidArgument, match=message) as raised:
        call(connect("http://server"))
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize("url", ["localhost:30000", "", "ftp://host", "http://", "/generate"])
def test_an_address_that_is_none_is_refused(connect: Connect, url: str) -> None:
    with pytest.raises(InvalidArgument, match="base_url"):
        connect(url)


@pytest.mark.parametrize("name", ["connect_timeout_s", "read_timeout_s", "control_timeout_s", "max_concurrency"])
def test_a_limit_of_nothing_is_refused(connect: Connect, name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name}=0"):
        connect("http://server", **{name: 0})


def test_a_key_that_no_header_can_hold_is_the_callers_mistake(connect: Connect) -> None:
    with serving() as server, pytest.raises(InvalidArgument, match="cannot be sent"):
        connect(server.url, api_key="a\nb").generate("a")


def test_results_and_errors_cross_process_borders() -> None:
    with serving(says(400, "bad")) as server, Client(server.url, retry=Retry(attempts=1)) as client:
        with pytest.raises(BadRequest) as raised:
            client.generate_batch(["a"])
        given = client.generate("abc", logprobs=True)
    assert pickle.loads(pickle.dumps(given)) == given
    error = pickle.loads(pickle.dumps(raised.value))
    assert (str(error), error.status, error.index) == (str(raised.value), 400, 0)
