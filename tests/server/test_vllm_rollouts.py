"""vLLM's dialect: what clients of vLLM's read in the answers of a real server."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from benchmarks.lib.safety.bodies import LEGAL
from tests.forks import ran
from tests.server.conftest import PROMPTS
from tests.server.test_fields import events
from tlt_server.api.fields.routes import VLLM_TABLES
from tlt_server.demo import default_paths
from tlt_server.demo.reference import Reference

pytestmark = pytest.mark.server("vllm")
HERE = Path(__file__).parent
TOPLESS = {"temperature": 0, "max_tokens": 8}
CHAT = {"messages": [{"role": "user", "content": "What is 3*4?"}]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
END = 1


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=120) as http:
        yield http


@pytest.fixture(scope="module")
def prompts(reference: Reference) -> list[list[int]]:
    return [list(reference.tokens(prompt)) for prompt in PROMPTS[:3]]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(default_paths()[0])


def ask(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def choices(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    return list(ask(http, "/v1/completions", **body)["choices"])


def generated(http: httpx.Client, prompt: list[int], **params: Any) -> dict[str, Any]:
    return ask(http, "/inference/v1/generate", token_ids=prompt, sampling_params=params)


# -- clients


def test_trls_client(
    url: str,
    reference: Reference,
    tokenizer: Any,
    prompts: list[list[int]],
    expected: list[tuple[int, ...]],
    tmp_path: Path,
) -> None:
    asked, out, log = tmp_path / "prompts.json", tmp_path / "told.json", tmp_path / "log"
    asked.write_text(json.dumps(prompts))
    paths = {"PYTHONPATH": str(HERE / "vllm_stand_in")}
    assert ran([url, str(asked), str(out)], log, "tests.server.trl_rollouts", paths) == 0, log.read_text()
    told = json.loads(out.read_text())
    greedy = [list(tokens[:12]) for tokens in expected[: len(prompts)]]
    assert told["generate"]["prompt_ids"] == told["top"]["prompt_ids"] == prompts
    assert told["generate"]["completion_ids"] == [tokens for tokens in greedy for _ in range(3)]
    assert told["top"]["completion_ids"] == greedy
    for at, (prompt, tokens) in enumerate(zip(prompts, greedy, strict=True)):
        all_of = reference.along(tuple(prompt), tuple(tokens)).log_softmax(-1)
        right = [all_of[i, token].item() for i, token in enumerate(tokens)]
        assert [each[0] for each in told["generate"]["logprobs"][3 * at]] == pytest.approx(right, abs=1e-3)
        assert [each[0] for each in told["scored"]["actual_logprobs"][at]] == pytest.approx(right, abs=1e-3)
        best, ids = all_of.topk(4)
        for i in range(len(tokens)):
            assert told["scored"]["logprobs"][at][i] == pytest.approx(best[i].tolist(), abs=1e-3)
            assert told["top"]["logprob_token_ids"][at][i] == ids[i, :2].tolist()
    assert told["without"]["logprobs"] is None
    for tokens in told["without"]["completion_ids"]:
        assert tokenizer.decode(tokens[:-1]).isdecimal()
        assert tokens[-1] == END
    assert told["texts"]["prompt_ids"] == [list(reference.tokens("What is 3*4?\n"))]
    assert told["chat"]["prompt_ids"][0] == told["texts"]["prompt_ids"][0]
    assert told["chat"]["completion_ids"][:2] == told["texts"]["completion_ids"] * 2
    assert [len(each) for each in told["chat"]["logprobs"]] == [12] * 4


def test_openais_client(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        prompt = "What is 3*4?\n"
        text = client.completions.create(model=model, prompt=prompt, max_tokens=8, temperature=0, logprobs=1)
        chat = client.chat.completions.create(
            model=model, messages=CHAT["messages"], max_tokens=8, temperature=0, logprobs=True, top_logprobs=1, n=2
        )
        stream = client.completions.create(model=model, prompt=prompt, max_tokens=8, temperature=0, stream=True)
        streamed = "".join(event.choices[0].text for event in stream)
        with pytest.raises(openai.NotFoundError, match="there is none of this name"):
            client.completions.create(model="other", prompt=prompt)
    assert text.choices[0].text == streamed == chat.choices[0].message.content == chat.choices[1].message.content
    said = [entry.token for entry in chat.choices[0].logprobs.content]
    assert "".join(said) == streamed
    assert said == text.choices[0].logprobs.tokens
    assert text.usage.completion_tokens == 8


def test_tokens_in_tokens_out(http: httpx.Client, prompts: list[list[int]], expected: list[tuple[int, ...]]) -> None:
    whole = generated(http, prompts[0], temperature=0, logprobs=0, skip_special_tokens=True)
    [choice] = whole["choices"]
    assert tuple(choice["token_ids"]) == expected[0][: len(choice["token_ids"])]
    assert (choice["token_ids"][-1], choice["finish_reason"], choice["stop_reason"]) == (END, "stop", None)
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{t}" for t in choice["token_ids"]]
    assert whole["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert whole["output_mode"] == "tokens"
    assert (whole["prompt_token_ids"], whole["prompt_logprobs"]) == (None, None)
    asked = {"token_ids": prompts[0], "return_token_ids": True, "return_weight_versions": True, "request_id": "mine"}
    params = {"n": 2, "stop_token_ids": [expected[0][3]], "temperature": 0, "prompt_logprobs": 1, "min_tokens": 1}
    group = ask(http, "/inference/v1/generate", **asked, sampling_params=params, model=whole["model"], cache_salt="7")
    assert (group["request_id"], group["prompt_token_ids"]) == ("mine", prompts[0])
    assert len(group["prompt_logprobs"]) == len(prompts[0])
    assert [choice["index"] for choice in group["choices"]] == [0, 1]
    for choice in group["choices"]:
        assert choice["stop_reason"] == choice["token_ids"][-1] == expected[0][3]
        assert choice["logprobs"] is None
        spans = choice["weight_versions"]
        assert (spans[0]["start"], spans[-1]["end"]) == (0, len(choice["token_ids"]))
        assert all(a["end"] == b["start"] for a, b in pairwise(spans))
        assert {type(span["version"]) for span in spans} == {str}


# -- fields


def test_many_samples_come_prompt_major(http: httpx.Client, prompts: list[list[int]]) -> None:
    found = choices(http, prompt=prompts, n=4, max_tokens=4, temperature=1, return_token_ids=True, top_k=0)
    assert [choice["index"] for choice in found] == list(range(12))
    assert [choice["prompt_token_ids"] for choice in found] == [prompt for prompt in prompts for _ in range(4)]


def test_prompt_logprobs_are_of_temperature_1(
    http: httpx.Client, reference: Reference, prompts: list[list[int]]
) -> None:
    prompt = prompts[0]
    right = reference.along(tuple(prompt[:1]), tuple(prompt[1:])).log_softmax(-1)
    for temperature in (0.5, 2.0):
        [choice] = choices(http, prompt=prompt, prompt_logprobs=2, logprobs=0, max_tokens=1, temperature=temperature)
        for at, named in enumerate(choice["prompt_logprobs"][1:], start=1):
            assert named[str(prompt[at])]["logprob"] == pytest.approx(right[at - 1, prompt[at]].item(), abs=1e-3)
            best = sorted(named, key=lambda token: named[token]["rank"])[:2]
            assert [int(token) for token in best] == right[at - 1].topk(2).indices.tolist()


def test_prompts_are_cut(http: httpx.Client, prompts: list[list[int]]) -> None:
    def kept(**how: Any) -> list[int]:
        [choice] = choices(http, max_tokens=1, return_token_ids=True, **how)
        return list(choice["prompt_token_ids"])

    assert kept(prompt=prompts[0], truncate_prompt_tokens=3) == prompts[0][-3:]
    assert kept(prompt=prompts[0], truncate_prompt_tokens=3, truncation_side="right") == prompts[0][:3]
    assert kept(prompt=PROMPTS[0], truncate_prompt_tokens=3) == prompts[0][-3:]
    assert 2000 < len(kept(prompt=[5] * 3000, truncate_prompt_tokens=-1)) < 2048


def test_lengths_are_cut_to_the_context(http: httpx.Client) -> None:
    for path, body in (("/v1/completions", {"prompt": [5] * 2000}), ("/v1/chat/completions", CHAT)):
        answer = ask(http, path, **body, max_tokens=10**6, temperature=0, return_token_ids=True)
        assert len(answer["choices"][0]["token_ids"]) < 2048
    too_long = http.post("/v1/completions", json={"prompt": [5] * 2048, "max_tokens": 10**6})
    assert too_long.status_code == 400
    assert "2048 tokens" in too_long.json()["error"]["message"]


def test_stops_of_text_are_told_and_no_token_is_left_out(http: httpx.Client, prompts: list[list[int]]) -> None:
    asked = {"prompt": prompts[0], "temperature": 0, "max_tokens": 64, "stop": ["\n"], "return_token_ids": True}
    [cut], [whole] = choices(http, **asked), choices(http, **asked, include_stop_str_in_output=True)
    assert cut["stop_reason"] == whole["stop_reason"] == "\n"
    assert cut["text"] + "\n" == whole["text"]
    assert cut["token_ids"] == whole["token_ids"]


def test_structured_outputs(http: httpx.Client, prompts: list[list[int]]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    grammar = 'root ::= "yes" | "no"'
    bodies: list[dict[str, Any]] = [{"json": schema}, {"json": json.dumps(schema)}]
    for path, prompt in (("/v1/completions", {"prompt": prompts[0]}), ("/v1/chat/completions", CHAT)):
        [choice] = ask(http, path, **prompt, max_tokens=9, structured_outputs={"grammar": grammar})["choices"]
        assert (choice.get("text") or choice["message"]["content"]) in ("yes", "no")
        for structured in bodies:
            answer = http.post(path, json=prompt | {"max_tokens": 4, "structured_outputs": structured})
            assert answer.status_code == 200, answer.text


def test_tools_that_may_not_be_called_are_in_the_prompt(http: httpx.Client, reference: Reference) -> None:
    asked = CHAT | TOPLESS | {"tools": [TOOL], "tool_choice": "none", "return_token_ids": True}
    answer = ask(http, "/v1/chat/completions", **asked)
    assert answer["prompt_token_ids"] == list(reference.tokens("add\nWhat is 3*4?\n"))
    assert answer["choices"][0]["message"]["tool_calls"] is None


def test_streams(http: httpx.Client, prompts: list[list[int]]) -> None:
    asked = {"prompt": prompts[0], "temperature": 0, "max_tokens": 10**6, "top_k": 0, "seed": 5}
    streamed = events(http.post("/v1/completions", json=asked | {"stream": True}).text)
    assert "".join(event["choices"][0]["text"] for event in streamed) == choices(http, **asked)[0]["text"]
    assert all(event["meta_info"] == {"seed": 5} for event in streamed)
    refused = http.post("/v1/chat/completions", json=CHAT | {"stream": True, "return_token_ids": True})
    assert (refused.status_code, "streaming" in refused.json()["error"]["message"]) == (400, True)


def test_tokens_of_texts(http: httpx.Client, reference: Reference, tokenizer: Any) -> None:
    tokens = list(reference.tokens(PROMPTS[0]))
    for root in ("", "/v1"):
        told = ask(http, f"{root}/tokenize", prompt=PROMPTS[0], return_token_strs=True)
        assert (told["tokens"], told["count"], told["max_model_len"]) == (tokens, len(tokens), 2048)
        assert told["token_strs"] == tokenizer.convert_ids_to_tokens(tokens)
        back = ask(http, f"{root}/detokenize", tokens=[*tokens, END])
        assert back["prompt"] == back["text"] == PROMPTS[0] + tokenizer.decode([END])
    assert ask(http, "/tokenize", **CHAT)["tokens"] == list(reference.tokens("What is 3*4?\n"))


@pytest.mark.parametrize("path", sorted({*VLLM_TABLES} & {*LEGAL}))
def test_sglangs_requests_are_served_beside(http: httpx.Client, path: str) -> None:
    for body in LEGAL[path]:
        answer = http.post(path, json=body)
        assert answer.status_code == 200, (body, answer.text)


# -- ends and errors


def until_aborted(http: httpx.Client, path: str, **body: Any) -> int:
    for _ in range(600):
        if count := ask(http, path, **body)["aborted"]:
            return int(count)
        time.sleep(0.05)
    raise AssertionError("there was nothing to abort")


@pytest.mark.parametrize("path", ["/abort_requests", "/inference/v1/abort_requests"])
@pytest.mark.parametrize("by", ["request_id", "header", "all"])
def test_aborted_requests_answer_with_what_they_have(
    http: httpx.Client, prompts: list[list[int]], path: str, by: str
) -> None:
    named = {"request_id": "mine"} if by == "request_id" else {}
    headers = {"X-Request-Id": "mine"} if by == "header" else {}
    body = {"prompt": prompts, "n": 2, "ignore_eos": True, "max_tokens": 1500, "return_token_ids": True} | named
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(http.post, "/v1/completions", json=body, headers=headers)
        until_aborted(http, path, **({} if by == "all" else {"request_ids": ["mine", "unknown"]}))
        found = asked.result().json()["choices"]
    assert [choice["finish_reason"] for choice in found] == ["abort"] * 6
    assert all(len(choice["token_ids"]) < 1500 for choice in found)
    assert ask(http, path, request_ids=["mine"])["aborted"] == 0


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": [5], "model": "other"}, 404),
        ("/v1/chat/completions", CHAT | {"model": "other"}, 404),
        ("/inference/v1/generate", {"token_ids": [5], "model": "other"}, 404),
        ("/tokenize", {"prompt": "3", "model": "other"}, 404),
        ("/detokenize", {"tokens": [5], "model": "other"}, 404),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}, 404),
        ("/v1/unload_lora_adapter", {"lora_name": "a"}, 404),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}, 404),
        ("/v1/completions", {"prompt": [5], "presence_penalty": 2.5}, 400),
        ("/v1/completions", {"prompt": [""], "max_tokens": 1}, 400),
        ("/v1/completions", {"prompt": ["3", ""], "max_tokens": 1}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "nobody", "content": "3"}]}, 400),
        ("/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "some"}, 400),
        ("/inference/v1/generate", {"token_ids": [512]}, 400),
        ("/inference/v1/generate", {"token_ids": [5] * 2048}, 400),
        ("/abort_requests", {"request_ids": "mine"}, 400),
        ("/tokenize", {}, 400),
    ],
)
def test_errors_are_vllms(http: httpx.Client, path: str, body: dict[str, Any], status: int) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], "\n" in error["message"]) == (status, False)


def test_one_id_at_once_harms_nobody(http: httpx.Client) -> None:
    """Whichever is refused, the other is answered."""
    asked = {
        "token_ids": [5, 6],
        "sampling_params": {"n": 2, "max_tokens": 64, "ignore_eos": True},
        "request_id": "same",
    }
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: http.post("/inference/v1/generate", json=asked), range(8)))
    assert {answer.status_code for answer in answers} == {200, 400}
    assert all(len(c["token_ids"]) == 64 for a in answers if a.status_code == 200 for c in a.json()["choices"])
    assert ask(http, "/abort_requests", request_ids=["same"])["aborted"] == 0


def test_what_is_not_sent_as_json_is_refused(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", content=b'{"prompt": [5]}', headers={"Content-Type": "text/plain"})
    assert (answer.status_code, "application/json" in answer.json()["error"]["message"]) == (400, True)
