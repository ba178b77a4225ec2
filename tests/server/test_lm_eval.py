"""lm-eval 0.4.13's `local-completions` model: by the bodies that it sends, and its own class where it is installed."""

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from tests.server.conftest import PROMPTS
from tlt_server.demo import default_paths
from tlt_server.demo.lossless import Tokens
from tlt_server.demo.reference import Reference

pytestmark = pytest.mark.server("eagle-chain")

TARGET, _ = default_paths()
Verdicts = list[tuple[float, bool]]


class Transcribed:
    def __init__(self, url: str, reference: Reference) -> None:
        self._url, self._reference = f"{url}/v1/completions", reference

    def _choices(self, prompts: Sequence[Any], **fields: Any) -> list[dict[str, Any]]:
        body = {"model": "default", "prompt": prompts, "temperature": 0, "seed": 1234} | fields
        found: list[dict[str, Any]] = httpx.post(self._url, json=body, timeout=60).raise_for_status().json()["choices"]
        return sorted(found, key=lambda choice: int(choice["index"]))

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> Verdicts:
        contexts = [len(self._reference.tokens(context)) for context, _ in pairs]
        prompts = [self._reference.tokens(context + continuation) for context, continuation in pairs]
        choices = self._choices(prompts, max_tokens=1, logprobs=1, echo=True)
        found = []
        for choice, start in zip(choices, contexts, strict=True):
            sampled = choice["logprobs"]["token_logprobs"][start:-1]
            best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][start:-1]]
            found.append((sum(sampled), sampled == best))
        return found

    def generate_until(self, prompt: str, until: list[str], most: int) -> str:
        (choice,) = self._choices([self._reference.tokens(prompt)], max_tokens=most, stop=until)
        text: str = choice["text"]
        return text


class ItsOwn:
    def __init__(self, url: str, reference: Reference) -> None:
        del reference
        from lm_eval.models import openai_completions as models  # type: ignore[import-not-found]

        settings = {"tokenizer": str(TARGET), "tokenizer_backend": "huggingface", "batch_size": 4}
        self._model = models.LocalCompletionsAPI(model="default", base_url=f"{url}/v1/completions", **settings)

    def _asked(self, kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        from lm_eval.api.instance import Instance  # type: ignore[import-not-found]

        return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> Verdicts:
        found: Verdicts = self._model.loglikelihood(self._asked("loglikelihood", pairs), disable_tqdm=True)
        return found

    def generate_until(self, prompt: str, until: list[str], most: int) -> str:
        asked = {"until": until, "max_gen_toks": most, "temperature": 0.0, "do_sample": False}
        (text,) = self._model.generate_until(self._asked("generate_until", [(prompt, asked)]), disable_tqdm=True)
        return str(text)


@pytest.fixture(params=[Transcribed, ItsOwn])
def model(request: pytest.FixtureRequest, url: str, reference: Reference) -> Any:
    return request.param(url, reference)


def test_likelihoods_are_the_targets(model: Any, reference: Reference, expected: list[Tokens]) -> None:
    """Of prompts of different lengths in one request, and of a continuation that is the greedy one. Contexts end with
    no blank, which lm-eval would move into the continuation, and at a token."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    texts = [tokenizer.decode(tokens) for tokens in expected[:6]]
    contexts = [prompt + text.partition(":")[0] for prompt, text in zip(PROMPTS, texts, strict=False)]
    pairs = [*((context, ": 12") for context in contexts[:5]), (contexts[5], f":{texts[5].partition(':')[2][:6]}")]
    found = model.loglikelihood(pairs)
    for (context, continuation), (likelihood, is_greedy) in zip(pairs, found, strict=True):
        start = reference.tokens(context)
        rest = reference.tokens(context + continuation)[len(start) :]
        laws = reference.along(start, rest).log_softmax(-1)
        wanted = sum(float(law[token]) for law, token in zip(laws, rest, strict=True))
        assert likelihood == pytest.approx(wanted, abs=1e-3)
        assert is_greedy == (laws.argmax(-1).tolist() == list(rest))
    assert found[-1][1]


def test_a_text_ends_where_it_is_told_to(model: Any, expected: list[Tokens]) -> None:
    whole = AutoTokenizer.from_pretrained(TARGET).decode(expected[0], skip_special_tokens=True)
    assert model.generate_until(PROMPTS[0], ["\n\n"], 96) == whole
    assert model.generate_until(PROMPTS[0], ["="], 96) == whole.partition("=")[0]
