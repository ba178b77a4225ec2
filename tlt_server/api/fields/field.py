"""What a field is, what a table of fields is, and how a request is held against one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from tlt_server.errors import BadRequest

Body = dict[str, Any]


class Effect(StrEnum):
    """What becomes of a field."""

    HONOURED = "honoured"
    REFUSED = "refused with 400"
    NONE = "no effect on the sample"
    IGNORED = "accepted, named as ignored"


HONOURED, REFUSED, NONE, IGNORED = Effect

NEEDS = {
    "plain": "--no-speculation",
    "lora": "--enable-lora",
    "multimodal": "a multimodal model",
    "embeds": "--disable-radix-cache",
    "states": "--enable-return-hidden-states",
    "experts": "--enable-return-routed-experts",
    "indexer": "--enable-return-indexer-topk",
    "thinking": "--enable-strict-thinking",
    "reasoning": "--reasoning-parser",
    "embedding": "--is-embedding",
    "suffixes": "--completion-template",
}
"""What a server must have been started with for some fields, and how that is said."""


class Server(NamedTuple):
    """What requests are held against. can: names of `NEEDS`. labels: names that requests may label metrics with.
    strict: fields that nobody knows are refused. in_use: whether a request of this id is under way."""

    vocab: int
    context: int
    hidden: int
    replicas: int = 1
    can: frozenset[str] = frozenset()
    labels: frozenset[str] = frozenset()
    strict: bool = False
    in_use: Callable[[str], bool] = frozenset[str]().__contains__


Check = Callable[[Any, Server], None]
"""Raises BadRequest, without the field's name, for a value that has the right type and still cannot be served."""


class Field(NamedTuple):
    """A row of a table.

    type: what msgspec holds its value against, strictly; null is always allowed. note: for the docs, and for who is
        refused. inner: the table of the object, or of each object of a list, that the value is.
    needs: a name of `NEEDS`: without it the field is refused, unless neutral.
    neutral: values that ask for nothing, besides null, what is empty, and false; with True among them false asks.
    """

    name: str
    effect: Effect
    type: Any = Any
    note: str = ""
    check: Check | None = None
    inner: "Table | None" = None
    needs: str = ""
    neutral: tuple[bool | float | str, ...] = ()

    def is_neutral(self, value: Any) -> bool:
        """Whether a value asks for nothing."""
        if isinstance(value, bool):
            return value is any(each is True for each in self.neutral)
        if value is None or (isinstance(value, str | list | dict) and not value):
            return True
        return not isinstance(value, list | dict) and value in self.neutral

    def passes(self, value: Any, server: Server) -> bool:
        """Whether a value is passed on: also a neutral one of a field that is not served, unless that is refused."""
        is_served = self.needs in server.can if self.needs else self.effect in (HONOURED, NONE)
        is_typed = self.effect is not REFUSED and self.type is not Any
        return is_served or (is_typed and self.is_neutral(value))


def fields(names: str, effect: Effect, *rest: Any, **more: Any) -> tuple[Field, ...]:
    """Fields that are alike but for their names, which are given between blanks."""
    return tuple(Field(name, effect, *rest, **more) for name in names.split())


class Table:
    """The fields of one kind of object, by the name of upstream's model.

    others: fields of other dialects that say what this one does not serve, or says otherwise. rule: what holds across
    the accepted fields, once each is right. nulls: null is a value; else it is as if the field were not given.
    """

    def __init__(
        self,
        name: str,
        fields: Iterable[Field],
        others: "Sequence[Mapping[str, Field]]" = (),
        rule: Check | None = None,
        nulls: bool = False,
    ) -> None:
        self.name, self.rule, self.nulls = name, rule, nulls
        self.fields = {field.name: field for field in fields}
        self.others = {name: field for fields in reversed(others) for name, field in fields.items()}
        kinds = [(field.name, field.type | None, None) for field in self.fields.values() if field.type is not Any]
        self._kind = msgspec.defstruct(name, kinds, kw_only=True)

    def accept(self, given: Body, server: Server, at: str = "") -> tuple[Body, list[str]]:
        """What of a request is passed on, and the names of what is ignored. Raises BadRequest: what cannot be served;
        the message begins with the field's name."""
        accepted, ignored = {}, []
        for name, value in given.items():
            field = self.fields.get(name)
            if field is None:
                ignored += self._foreign(name, value, server, at)
            elif field.passes(value, server):
                if value is not None or self.nulls:
                    accepted[name] = value
            elif not field.is_neutral(value):
                raise _unserved(field, value, at)
        self._convert(accepted, at)
        for name, value in accepted.items():
            field = self.fields[name]
            if value is None:
                continue
            if field.check:
                _named(field.check, value, server, at + name)
            if field.inner:
                accepted[name], within = _inner(field.inner, value, server, at + name)
                ignored += within
        if self.rule:
            _named(self.rule, accepted, server, at)
        return accepted, ignored

    def _foreign(self, name: str, value: Any, server: Server, at: str) -> list[str]:
        """The name of a field that is not of this table, in a list; an empty one if it asks for nothing."""
        field = self.others.get(name)
        if value is None or (field and field.is_neutral(value)):
            return []
        if field and field.effect in (HONOURED, REFUSED):
            raise BadRequest(f"{at}{name}: {field.note or 'not served'}")
        if field is None and server.strict:
            raise BadRequest(f"{at}{brief(name)}: nobody knows this field, and the server runs with --strict-fields")
        return [brief(name)] if field is None or field.effect is IGNORED else []

    def _convert(self, accepted: Body, at: str) -> None:
        try:
            msgspec.convert(accepted, self._kind)
        except msgspec.ValidationError as error:
            what, _, path = str(error).partition(" - at ")
            place = path.strip("`").removeprefix("key` in `").removeprefix("$").lstrip(".")
            raise BadRequest(f"{at}{place}: {what[:1].lower()}{what[1:]}") from error


def _unserved(field: Field, value: Any, at: str) -> BadRequest:
    """Why a field is refused."""
    if field.needs == "plain":
        return BadRequest(
            f"{at}{field.name}={brief(value)}: cannot be honoured exactly while speculation is on. "
            "Leave it out, or send the request to a server started with --no-speculation"
        )
    if field.needs:
        return BadRequest(f"{at}{field.name}: not served without {NEEDS[field.needs]}. Leave it out")
    return BadRequest(f"{at}{field.name}: {field.note or 'not served'}")


def _inner(table: Table, value: Any, server: Server, at: str) -> tuple[Any, list[str]]:
    if isinstance(value, dict):
        return table.accept(value, server, f"{at}.")
    if not isinstance(value, list):
        return value, []
    both = [table.accept(each, server, f"{at}[{i}].") for i, each in enumerate(value)]
    return [accepted for accepted, _ in both], [name for _, names in both for name in names]


def _named(check: Check, value: Any, server: Server, at: str) -> None:
    try:
        check(value, server)
    except BadRequest as error:
        raise BadRequest(f"{at}{error}" if at.endswith(".") or not at else f"{at}: {error}") from error


def brief(value: Any) -> str:
    """A value of a client's, short enough for a message or a log."""
    text = value if isinstance(value, str) else repr(value)
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= 64 else f"{text[:61]}..."
