"""Every setting as text: name, type, default and meaning, read off the sections themselves."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from tba.config import Config
from tba.config.base import Section
from tba.config.toml import literal

BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
SCALARS = {
    Any: "any value",
    int: "integer",
    float: "number",
    bool: "true or false",
    str: "text",
    Path: "path",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting, as help texts, the docs page and error messages show it."""

    name: str
    """Dotted name, such as `trainer.steps`."""
    type: str
    """What a value must be, such as `integer > 0`."""
    default: str
    """The default as a TOML literal, `none`, or `required`."""
    help: str
    """What it means, with its unit."""
    choices: tuple[str, ...] = ()
    """Allowed values, where they are few words."""
    conditions: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """For a setting of some kinds only: which, as (`task.kind`, (`gsm8k`, ...)); all must hold."""
    is_text: bool = False
    """Whether any text at all is a value."""
    is_optional: bool = False
    """Whether it can be `none`."""

    @property
    def when(self) -> str:
        """The conditions in words, such as `task.kind = gsm8k`; empty when there are none."""
        return " and ".join(f"{name} = {' or '.join(kinds)}" for name, kinds in self.conditions)

    def holds(self, tree: Mapping[str, object]) -> bool:
        """Say whether the kinds chosen in a configuration have this setting."""
        return all(value_of(name, tree) in kinds for name, kinds in self.conditions)


def value_of(name: str, tree: Mapping[str, object]) -> object:
    """Return what a configuration sets under a dotted name; None when it sets nothing."""
    node: object = tree
    for part in name.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


@cache
def describe() -> tuple[Setting, ...]:
    """Return every setting of a run, in the order of the sections."""
    return tuple(_of_section(Config, prefix="", defaults=None))


def sections() -> dict[str, str]:
    """Return the meaning of each top-level section by its name."""
    return {
        name: _help(field)
        for name, field in Config.model_fields.items()
        if _members(field.annotation)
    }


def _of_section(model: type[Section], prefix: str, defaults: object) -> Iterator[Setting]:
    """Yield the settings below `prefix`; an instance as `defaults` overrides the class's."""
    for key, field in model.model_fields.items():
        name = f"{prefix}{key}"
        default = getattr(defaults, key) if isinstance(defaults, model) else field.default
        members = _members(field.annotation)
        if not members:
            yield _leaf(name, field, default)
        elif "kind" in members[0].model_fields:
            yield from _of_union(name, field, members, default)
        else:
            yield from _of_section(members[0], f"{name}.", default)


def _of_union(
    name: str, field: FieldInfo, members: Sequence[type[Section]], default: object
) -> Iterator[Setting]:
    """Yield the `kind`, then the settings of all members, those that members share only once."""
    kinds = tuple(str(member.model_fields["kind"].default) for member in members)
    yield Setting(
        name=f"{name}.kind",
        type="one of " + ", ".join(kinds),
        default="required" if field.is_required() else literal(getattr(default, "kind", None)),
        help=_help(field),
        choices=kinds,
    )
    owners: dict[Setting, list[str]] = {}
    for kind, member in zip(kinds, members, strict=True):
        for setting in _of_section(member, f"{name}.", default):
            if setting.name != f"{name}.kind":
                owners.setdefault(setting, []).append(kind)
    for setting, owned_by in owners.items():
        if len(owned_by) < len(members):
            own = (f"{name}.kind", tuple(owned_by))
            setting = replace(setting, conditions=(own, *setting.conditions))
        yield setting


def _leaf(name: str, field: FieldInfo, default: object) -> Setting:
    alternatives = _alternatives(field.annotation)
    return Setting(
        name=name,
        type=_type_text(field.annotation, field.metadata),
        default="required" if field.is_required() else literal(default),
        help=_help(field),
        choices=_choices(field.annotation),
        is_text=bool({str, Path} & set(alternatives)),
        is_optional=NoneType in alternatives,
    )


def _help(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _members(annotation: Any) -> tuple[type[Section], ...]:
    """Return the sections that an annotation allows; none for an ordinary setting."""
    return tuple(
        part
        for part in _alternatives(annotation)
        if isinstance(part, type) and issubclass(part, Section)
    )


def _choices(annotation: Any) -> tuple[str, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _type_text(annotation: Any, metadata: Sequence[object] = ()) -> str:
    """Return a type in words, its bounds included."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_text(args[0], args[1:])
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin in (Union, UnionType):
        return " or ".join("none" if part is NoneType else _type_text(part) for part in args)
    if origin is dict or (origin is tuple and args[-1] is Ellipsis):
        return (
            f"table of {_type_text(args[1])}"
            if origin is dict
            else f"list of {_type_text(args[0])}"
        )
    if origin is tuple:
        return "[" + ", ".join(map(_type_text, args)) + "]"
    bounds = (
        f"{sign} {getattr(bound, name):g}"
        for bound in metadata
        for name, sign in BOUNDS.items()
        if hasattr(bound, name)
    )
    return " ".join([SCALARS[annotation], " and ".join(bounds)]).strip()
