"""What values may be: their types, and what of a right type still cannot be served."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tlt_server.api.fields.field import Check, Server, brief
from tlt_server.engine.requests.continued import GENERATED
from tlt_server.engine.requests.ranges import INT32, INT64
from tlt_server.engine.requests.remembered import KEY
from tlt_server.errors import BadRequest

Count = Annotated[int, Meta(ge=0, le=INT32[-1])]
Whole = Annotated[int, Meta(ge=INT32[0], le=INT32[-1])]
Long = Annotated[int, Meta(ge=INT64[0], le=INT64[-1])]
Seed = int
Share = Annotated[float, Meta(ge=0, le=1)]
Warmth = Annotated[float, Meta(ge=0, le=1e6)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Name = Annotated[str, Meta(min_length=1, max_length=1024)]
Names = Name | list[Name | None]
Ids = list[int | None]
IdsOrLists = list[int | list[int]]
Texts = str | list[str]
Object = dict[str, Any]
Objects = dict[str, Any] | list[dict[str, Any]]
Scalar = str | int | float | bool | None
Params = dict[str, Scalar | list[Scalar] | dict[str, Scalar]]
Flags = bool | list[bool | None]
Counts = Count | list[Count | None]
States = bool | Literal["last"] | list[bool | Literal["last"]]

HIGHEST = 1e30
"""What may be added to a logit: beyond it float32 ends, at temperatures near 0."""
LONGEST_TOKEN = 64
"""Characters: a text of more than these for each token of the context cannot fit."""
MAX_STOPS, MAX_STOP_LENGTH = 256, 1024
MAX_TOP_LOGPROBS = 4096
MAX_GRAMMAR = 2**16
MAX_DEPTH, MAX_NODES = 32, 100_000
MAX_COUNT_IN_SCHEMA = 4096
COUNTS_IN_SCHEMAS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}


def is_up_to(most: float) -> Check:
    """More than 0, up to a bound, finite."""

    def check(value: Any, server: Server) -> None:
        is_positive(value, server)
        if not value <= most:
            raise BadRequest(f"{brief(value)} is more than {most:g}")

    return check


def is_positive(value: float, server: Server) -> None:
    if not value > 0:
        raise BadRequest(f"{brief(value)}: must be more than 0")


def is_top_k(value: int, server: Server) -> None:
    if value != -1 and not 1 <= value <= 2**30:
        raise BadRequest(f"{brief(value)}: must be -1, for the whole vocabulary, or 1 to {2**30}")


def is_seed(value: int, server: Server) -> None:
    """A negative number and what is 2**64 above it are one seed."""
    if not INT64[0] <= value < 2**64:
        raise BadRequest(f"{brief(value)}: must have at most 64 bits, {INT64[0]} to {2**64 - 1}")


def is_custom(value: dict[str, Any], server: Server) -> None:
    """Parameters for a client's own logit processor, without the names by which we hand on what has a field."""
    is_bounded(value, server)
    for name in (GENERATED, KEY):
        if name in value:
            raise BadRequest(f"{name} goes beside sampling_params, not into it")


def is_text(value: str | list[str], server: Server) -> None:
    """Cheaper than to tokenize it."""
    longest = server.context * LONGEST_TOKEN
    for text in [value] if isinstance(value, str) else value:
        if len(text) > longest:
            raise BadRequest(f"{len(text)} characters are more than the model's context of {server.context} tokens")


def is_ids(value: list[Any], server: Server) -> None:
    """Upstream lets any token id through to the embedding, whose error ends the scheduler, and with it the server."""
    kinds = set(map(type, value))
    if list in kinds:
        if len(kinds) > 1:
            raise BadRequest("token ids beside lists of token ids")
        for each in value:
            is_ids(each, server)
        return
    ids = value if type(None) not in kinds else [each for each in value if each is not None]
    if ids and not (min(ids) >= 0 and max(ids) < server.vocab):
        unknown = next(each for each in ids if not 0 <= each < server.vocab)
        raise BadRequest(f"holds {brief(unknown)}: the model's vocabulary is 0 to {server.vocab - 1}")


def is_prompt_ids(value: list[Any], server: Server) -> None:
    """Ids, or lists of ids, none of them empty."""
    if not value or [] in value:
        raise BadRequest("a prompt without a token")
    is_ids(value, server)


def is_prompt(value: str | list[Any], server: Server) -> None:
    """Text, texts, ids or lists of ids, as OpenAI's `prompt`."""
    if isinstance(value, str):
        return is_text(value, server)
    if value and isinstance(value[0], str):
        if not all(isinstance(each, str) for each in value):
            raise BadRequest("texts beside token ids")
        return is_text(value, server)
    if any(isinstance(each, str) for each in value):
        raise BadRequest("texts beside token ids")
    return is_prompt_ids(value, server)


def is_embeds(value: list[Any], server: Server) -> None:
    """Rows of the model's width, finite in float32; or lists of such rows."""
    rows = (
        value if value and value[0] and not isinstance(value[0][0], list) else [row for each in value for row in each]
    )
    for row in rows:
        if not row or any(isinstance(number, list) for number in row) or len(row) != server.hidden:
            raise BadRequest(f"a row that does not hold {server.hidden} numbers")
        if not all(abs(number) <= HIGHEST for number in row):
            raise BadRequest(f"a number beyond {HIGHEST:g}")
    if not rows or any(not each for each in value):
        raise BadRequest("a prompt without a row")


def is_stops(value: str | list[str], server: Server) -> None:
    stops = [value] if isinstance(value, str) else value
    if len(stops) > MAX_STOPS:
        raise BadRequest(f"{len(stops)} of them: at most {MAX_STOPS}")
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_LENGTH:
            raise BadRequest(f"one of {len(stop)} characters: 1 to {MAX_STOP_LENGTH}")


def is_bias(value: dict[str, float], server: Server) -> None:
    for token, bias in value.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 10 and int(token) < server.vocab):
            raise BadRequest(f"{brief(token)} is no token id: the model's vocabulary is 0 to {server.vocab - 1}")
        if not abs(bias) <= HIGHEST:
            raise BadRequest(f"{brief(bias)} of token {token}: at most {HIGHEST:g}, either way")


def is_top_logprobs(value: int | list[int | None], server: Server) -> None:
    highest = min(server.vocab, MAX_TOP_LOGPROBS)
    for count in value if isinstance(value, list) else [value]:
        if count is not None and count > highest:
            raise BadRequest(f"{count} is more than {highest}")


def is_new_rid(value: str | list[str | None], server: Server) -> None:
    """A streamed request that is refused for its id would, at its end, abort the request that has this id."""
    for rid in [value] if isinstance(value, str) else value:
        if rid is None or rid.startswith("HEALTH_CHECK"):
            raise BadRequest(f"{brief(rid)}: not an id for requests")
        if server.in_use(rid):
            raise BadRequest(f"{brief(rid)}: a request of this id is under way")


def is_replica(value: int, server: Server) -> None:
    if not 0 <= value < server.replicas:
        raise BadRequest(f"{value}: the server has {server.replicas} replicas, from 0")


def is_labels(value: dict[str, str], server: Server) -> None:
    """A label that a metric does not have is an exception in the HTTP process's only loop."""
    if unknown := sorted(set(value) - server.labels):
        raise BadRequest(f"{brief(unknown[0])} is not one of --tokenizer-metrics-allowed-custom-labels")


def is_bounded(value: Any, server: Server) -> None:
    """Of an object of any form: how deep it is, and how large."""
    for nodes, (_, depth) in enumerate(walk(value)):
        if depth > MAX_DEPTH:
            raise BadRequest(f"nested deeper than {MAX_DEPTH}")
        if nodes > MAX_NODES:
            raise BadRequest(f"holds more than {MAX_NODES} values")


def walk(value: Any) -> Iterator[tuple[Any, int]]:
    """Every value within, with its depth, without recursion."""
    waiting = [(value, 0)]
    while waiting:
        each, depth = waiting.pop()
        yield each, depth
        if isinstance(each, dict | list) and depth <= MAX_DEPTH:
            waiting += [(part, depth + 1) for part in (each.values() if isinstance(each, dict) else each)]


def is_template_kwargs(value: dict[str, Any], server: Server) -> None:
    """What a chat template is given beside the messages, without what upstream passes itself."""
    is_bounded(value, server)
    ours = {"conversation", "messages", "tools", "tokenize", "return_dict", "return_tensors", "add_generation_prompt"}
    ours |= {"chat_template", "documents", "continue_final_message", "padding", "truncation", "max_length"}
    ours |= {"return_assistant_tokens_mask", "tokenizer_kwargs"}
    if taken := sorted(ours & set(value)):
        raise BadRequest(f"{taken[0]} is the server's own")
    if not isinstance(value.get("spaces_between_special_tokens", True), bool):
        raise BadRequest("spaces_between_special_tokens: true or false")


def is_schema(value: Any, server: Server) -> None:
    """A JSON schema, as an object."""
    is_bounded(value, server)
    for each, _ in walk(value):
        for name in COUNTS_IN_SCHEMAS & set(each) if isinstance(each, dict) else ():
            if isinstance(each[name], int | float) and not 0 <= each[name] <= MAX_COUNT_IN_SCHEMA:
                raise BadRequest(f"{name} of {brief(each[name])}: 0 to {MAX_COUNT_IN_SCHEMA}")


def is_schema_text(value: str, server: Server) -> None:
    """A JSON schema, as text; an empty one is none."""
    if len(value) > MAX_GRAMMAR:
        raise BadRequest(f"{len(value)} characters: at most {MAX_GRAMMAR}")
    try:
        schema = msgspec.json.decode(value) if value else {}
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"not JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise BadRequest("a JSON schema is an object")
    is_schema(schema, server)
