"""What a request may not ask for on a server that could not sample it exactly."""

from types import SimpleNamespace
from typing import Any

import pytest

from tlt_server.api.rollouts.requests import check_request

NEUTRAL = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}


def check(server: dict[str, Any], params: dict[str, Any], **asked: Any) -> None:
    flags = {"disaggregation_mode": "null", "enable_pdmux": False, "dllm_algorithm": None}
    settings = {"speculative_algorithm": None} | flags | server
    sampling = NEUTRAL | {"custom_params": None} | params
    check_request(
        SimpleNamespace(**asked), SimpleNamespace(**sampling), SimpleNamespace(server_args=SimpleNamespace(**settings))
    )


GOES_ON = {"frequency_penalty": 0.5, "custom_params": {"generated_tokens": 3}}


@pytest.mark.parametrize("server", [{}, {"speculative_algorithm": "EAGLE"}])
def test_a_response_goes_on_under_penalties(server: dict[str, Any]) -> None:
    check(server, GOES_ON)


@pytest.mark.parametrize(
    "server", [{"disaggregation_mode": "decode"}, {"enable_pdmux": True}, {"dllm_algorithm": "LowConfidence"}]
)
def test_but_where_sglang_counts(server: dict[str, Any]) -> None:
    check(server, GOES_ON | {"frequency_penalty": 0.0})
    check(server, GOES_ON | {"custom_params": None})
    with pytest.raises(
        ValueError, match=r"frequency_penalty=0\.5: would not count generated_tokens under this server's"
    ):
        check(server, GOES_ON)


@pytest.mark.parametrize("name", ["custom_logit_processor", "return_sampling_mask"])
def test_speculation_refuses_what_it_cannot_do(name: str) -> None:
    check({}, {}, **{name: "p"})
    with pytest.raises(ValueError, match=f"{name}: cannot be honoured exactly while speculation is on"):
        check({"speculative_algorithm": "EAGLE"}, {}, **{name: "p"})
