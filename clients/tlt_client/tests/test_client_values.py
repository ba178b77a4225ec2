"""Values: sampling parameters, what is parsed from any bytes at all, and the way there and back."""

import json
import math
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_client import FinishReason, InvalidArgument, Rollout, SamplingParams, SpecCounts, Status, TltClientError
from tlt_client.schemas import Arm, BucketReport
from tlt_client.streams import ChunkReader
from tlt_client.wire import decode, message_of, read_rollout, refusal


def test_a_former_name_stands_beside_its_field_for_one_release() -> None:
    report = BucketReport(1, 8, Arm(3, 1, 4), ())
    said = json.loads(msgspec.json.encode(report))
    assert said["active"] == said["in_force"] == {"num_steps": 3, "topk": 1, "num_draft_tokens": 4}
    assert msgspec.json.decode(msgspec.json.encode(report), type=BucketReport) == report


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature=-0.1"),
    ({"temperature": math.nan}, "temperature=nan"),
    ({"temperature": math.inf}, "temperature=inf"),
    ({"temperature": "hot"}, "temperature='hot': Expected `float"),
    ({"top_p": 0}, "top_p=0"),
    ({"top_p": 1.01}, "top_p=1.01"),
    ({"top_k": 0}, "top_k=0: must be -1"),
    ({"top_k": 2.5}, "top_k=2.5"),
    ({"min_p": 1.5}, "min_p=1.5"),
    ({"max_new_tokens": -1}, "max_new_tokens=-1"),
    ({"max_new_tokens": 3, "min_new_tokens": 4}, "min_new_tokens=4 is above max_new_tokens=3"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": "ab"}, "stop_token_ids='ab'"),
    ({"frequency_penalty": 2.1}, "frequency_penalty=2.1"),
    ({"presence_penalty": -2.1}, "presence_penalty=-2.1"),
    ({"repetition_penalty": 0}, "repetition_penalty=0"),
    ({"logit_bias": {-1: 0.5}}, "logit_bias"),
    ({"logit_bias": {"5": 0.5}}, "logit_bias"),
    ({"logit_bias": {5: -math.inf}}, "to forbid a token"),
    ({"regex": "a", "ebnf": "b"}, "regex and ebnf are both given"),
    ({"ignore_eos": 1}, "ignore_eos=1"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_a_wrong_parameter_is_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        SamplingParams(**wrong)
    assert message in str(raised.value)
    assert isinstance(raised.value, ValueError)


GIVEN = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 10),
        "top_p": st.floats(0, 1, exclude_min=True),
        "top_k": st.integers(1) | st.just(-1),
        "min_p": st.floats(0, 1),
        "min_new_tokens": st.integers(0, 10),
        "max_new_tokens": st.integers(10, 2**31),
        "stop": st.text() | st.lists(st.text()),
        "stop_token_ids": st.lists(st.integers(0, 2**31)),
        "logit_bias": st.dictionaries(st.integers(0, 2**31), st.floats(-100, 100)),
        "sampling_seed": st.integers(-(2**63), 2**63 - 1),
        "ignore_eos": st.booleans(),
        "repetition_penalty": st.floats(0, 2, exclude_min=True),
        "custom_params": st.dictionaries(st.text(), st.integers() | st.text()),
        "json_schema": st.text(),
    },
)


@given(GIVEN)
def test_only_what_is_given_is_sent_neutral_values_too(given_: dict[str, Any]) -> None:
    sent = msgspec.json.encode(SamplingParams(**given_))
    assert msgspec.json.decode(sent, type=SamplingParams) == SamplingParams(**given_)
    plain = msgspec.json.decode(sent)
    plain["logit_bias"] = {int(token): bias for token, bias in plain.get("logit_bias", {}).items()}
    assert plain == {"logit_bias": {}} | given_


COUNT = st.integers(0, 2**40)
ROLLOUTS = st.builds(
    Rollout,
    rid=st.text(),
    tokens=st.lists(COUNT).map(tuple),
    text=st.text(),
    logprobs=st.none() | st.lists(st.floats(-1e4, 0)).map(tuple),
    finish_reason=st.builds(
        FinishReason,
        type=st.sampled_from(["stop", "length", "abort"]),
        matched=st.none() | COUNT | st.text() | st.lists(COUNT),
        length=st.none() | COUNT,
        message=st.none() | st.text(),
    ),
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    accept_length=st.none() | st.floats(1, 10),
    spec=st.none() | st.builds(SpecCounts, COUNT, COUNT, COUNT),
    resamples=COUNT,
)


@given(ROLLOUTS)
def test_a_rollout_survives_json(given_: Rollout) -> None:
    assert msgspec.json.decode(msgspec.json.encode(given_), type=Rollout) == given_


NAMES = (
    "text output_ids meta_info error message detail code id finish_reason type completion_tokens loc msg status_code"
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(NAMES.split()), inner),
    max_leaves=12,
)


@given(st.binary() | JSON.map(json.dumps).map(str.encode))
def test_no_bytes_at_all_raise_anything_but_our_own_errors(body: bytes) -> None:
    assert isinstance(refusal(500, message_of(body), "/generate"), TltClientError)
    for read in (
        lambda: read_rollout(body, logprobs=True, resamples=0),
        lambda: decode(Status, body, "/tlt/v1/status"),
        lambda: ChunkReader(logprobs=True, resamples=0).feed(b"data: " + body + b"\n"),
    ):
        with suppress(TltClientError):
            read()
