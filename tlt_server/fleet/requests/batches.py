"""A batch of prompts as several requests, a part for each of several members, and their answers as one.

Equal prompts that follow one another, as a trainer's groups do, stay together: they share a prefill. Only what is known
to be of each prompt is dealt out with it; a batch that says anything else by prompt goes to one member, whole.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from tlt_server.fleet.requests.routing import choose, key_of_prompt

PROMPTS: Mapping[str, tuple[str, ...]] = {"/generate": ("input_ids", "text"), "/v1/completions": ("prompt",)}
"""Of the routes that take several: the fields which hold them."""
EACH = frozenset(
    {
        *("input_ids", "text", "sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num"),
        *("token_ids_logprob", "image_data", "video_data", "audio_data", "lora_path", "lora_id", "extra_key"),
        *("custom_logit_processor", "return_hidden_states"),
    }
)
"""Fields of /generate that may hold a value for each prompt."""

Raw = msgspec.Raw
Fields = dict[str, Raw]
_fields = msgspec.json.Decoder(Fields).decode
_list = msgspec.json.Decoder(list[Raw]).decode


class Batch:
    """A body with several prompts. places: of all of them, from 0."""

    def __init__(self, path: str, fields: Fields, held_in: str) -> None:
        """Raises msgspec.MsgspecError or ValueError: it cannot be split."""
        self.path, self._fields, self._prompts = path, fields, _list(fields[held_in])
        self._each = {held_in: self._prompts}
        if len(self._prompts) < 2 or not all(bytes(each)[:1] in (b"[", b'"') for each in self._prompts):
            raise ValueError("one prompt")
        if path == "/generate":
            self._read_lists()

    def _read_lists(self) -> None:
        for name, raw in self._fields.items():
            if name in self._each or not bytes(raw).startswith(b"["):
                continue
            values = _list(raw)
            if name == "token_ids_logprob" and not any(bytes(each).startswith(b"[") for each in values):
                continue  # the same tokens for all prompts
            if name not in EACH or len(values) != len(self._prompts):
                raise ValueError(f"{name}: not known to be of each prompt")
            self._each[name] = values
        if bytes(rid := self._fields.get("rid", Raw(b"null"))).startswith(b'"'):
            base = msgspec.json.decode(rid)  # as SGLang numbers them
            self._each["rid"] = [Raw(msgspec.json.encode(f"{base}_{place}")) for place in range(len(self._prompts))]

    def dealt(self, running: Mapping[str, int], names: Sequence[str]) -> dict[str, list[int]]:
        """Places by the member that they go to. running: prompts that each has. names: of the members."""
        loads, found = Counter(running), dict[str, list[int]]()
        for prompt, group in groupby(range(len(self._prompts)), lambda place: bytes(self._prompts[place])):
            name, places = choose(key_of_prompt(prompt), loads, names), list(group)
            loads[name] += len(places)
            found.setdefault(name, []).extend(places)
        return found

    def part(self, places: Sequence[int]) -> bytes:
        """The body of these prompts alone."""
        own = {name: [values[place] for place in places] for name, values in self._each.items()}
        return msgspec.json.encode(self._fields | own)

    def told(self, places: Sequence[int]) -> str:
        """Their places, as a member counts samples by them to know the seed of each. Prompts that give a seed of their
        own count their own."""
        seeded = [b'"sampling_seed"' in bytes(each) for each in self._each.get("sampling_params", ())]
        return ",".join(str(0 if seeded and seeded[place] else place) for place in places)

    def merged(self, parts: Sequence[tuple[Sequence[int], bytes]]) -> bytes:
        """One answer in the order of prompts, all samples of each together. ValueError: one is not as expected."""
        if self.path == "/generate":
            return msgspec.json.encode(_in_order([(places, _list(body)) for places, body in parts]))
        answers = [_fields(body) for _, body in parts]
        chosen = [(places, _list(each["choices"])) for (places, _), each in zip(parts, answers, strict=True)]
        choices = [_fields(choice) | {"index": Raw(b"%d" % index)} for index, choice in enumerate(_in_order(chosen))]
        usage = _summed([msgspec.json.decode(each["usage"]) for each in answers if "usage" in each])
        return msgspec.json.encode({**answers[0], "choices": choices, **({"usage": usage} if usage else {})})


def batch_of(path: str, body: bytes) -> Batch | None:
    """None: one prompt, a stream, or what the front cannot split; whether it makes sense is the member's to say."""
    try:
        if path not in PROMPTS or bytes((fields := _fields(body)).get("stream", Raw(b"false"))) != b"false":
            return None
        held = [name for name in PROMPTS[path] if bytes(fields.get(name, b"")).startswith(b"[")]
        return Batch(path, fields, held[0]) if len(held) == 1 else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
        return None


def _in_order(parts: Sequence[tuple[Sequence[int], list[Raw]]]) -> list[Raw]:
    """Results by place; those of one prompt follow one another in each part."""
    found: dict[int, list[Raw]] = {}
    for places, results in parts:
        samples, rest = divmod(len(results), len(places))
        if rest or not samples:
            raise ValueError(f"{len(results)} results for {len(places)} prompts")
        found |= {place: results[i * samples : (i + 1) * samples] for i, place in enumerate(places)}
    return [result for place in sorted(found) for result in found[place]]


def _summed(usages: Sequence[Any]) -> dict[str, Any]:
    """Of numbers, and of numbers in what they hold; what else stands there is the first one's."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for usage in usages for name in usage):
        values = [usage[name] for usage in usages if usage.get(name) is not None]
        if values and all(isinstance(value, dict) for value in values):
            found[name] = _summed(values)
        else:
            found[name] = sum(values) if values and all(isinstance(value, int) for value in values) else None
    return found
