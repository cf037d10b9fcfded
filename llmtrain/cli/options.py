"""Click options and TOML keys out of one frozen dataclass field: its name, type, default, and the doc line under it.

A command that is configured by dataclasses reads

    @click.command(cls=ConfigCommand)
    @config_options(ModelConfig, RunConfig)
    def command(given: dict[str, Any]) -> None:
        model = build(ModelConfig, given, table.get("model", {}), "configs/31m.toml [model]")

`given` holds only the fields that stand on the command line, so it says by itself what a person asked for; `build` lays
it over a table of a TOML file, and that over the defaults of the dataclass.

A field's `metadata` may hold `option` (another name than the field's, such as "--input" for `inputs`), `metavar`,
`bare` (the value of the option where none stands behind it), and `on_cpu` (another default, which the command takes by
`of_cpu` where it runs on a CPU).
"""

import ast
import dataclasses
import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
from click.core import ParameterSource

from llmtrain.storage.errors import UsageError

T = TypeVar("T")

SCALARS: dict[Any, click.ParamType] = {
    int: click.INT,
    float: click.FLOAT,
    str: click.STRING,
    bool: click.BOOL,
    Path: click.Path(path_type=Path),
}


class FirstThatFits(click.ParamType):
    """A union such as `int | Literal["auto"]`: the first member that accepts the text."""

    def __init__(self, members: list[click.ParamType]):
        self.members = members
        self.name = "|".join(words(member) for member in members)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        for member in self.members:
            try:
                return member.convert(value, param, ctx)
            except click.BadParameter:
                continue
        self.fail(f"{value!r} is none of {self.name}.", param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        return [item for member in self.members for item in member.shell_complete(ctx, param, incomplete)]

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"[{self.name}]"


def words(kind: click.ParamType) -> str:
    return "|".join(map(str, kind.choices)) if isinstance(kind, click.Choice) else kind.name


@dataclasses.dataclass(frozen=True)
class Option:
    """What the command line needs to know of one dataclass field."""

    field: str
    option: str
    kind: click.ParamType
    annotation: Any
    repeatable: bool
    default: Any
    """`dataclasses.MISSING` where a value is required."""
    help: str
    metavar: str | None
    bare: str | None
    """What the option means without a value; None where it needs one."""

    @property
    def is_flag(self) -> bool:
        return isinstance(self.kind, click.types.BoolParamType) and not self.repeatable

    @property
    def declaration(self) -> str:
        return f"{self.option}/--no-{self.option[2:]}" if self.is_flag else self.option


def options_of(config: Any) -> tuple[Option, ...]:
    """The options of a dataclass (the class) in the order of its fields; every field must have its doc line."""
    hints = typing.get_type_hints(config)
    docs = field_docs(config)
    found = []
    for field in dataclasses.fields(config):
        assert field.name in docs, f"{config.__name__}.{field.name} has no doc line under it"
        annotation, repeatable = element(hints[field.name])
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        name = field.metadata.get("option", "--" + field.name.replace("_", "-"))
        kind, metavar, bare = click_type(annotation), field.metadata.get("metavar"), field.metadata.get("bare")
        help = " ".join(docs[field.name].split())
        if "on_cpu" in field.metadata:
            on_cpu = field.metadata["on_cpu"]
            shown = ", ".join(map(str, on_cpu)) if repeatable else on_cpu
            help += f" On a CPU the default is {shown}."
        found.append(Option(field.name, name, kind, hints[field.name], repeatable, default, help, metavar, bare))
    return tuple(found)


def of_cpu(config: Any) -> dict[str, Any]:
    """The defaults of a dataclass (the class) that are others on a CPU, as a table for `build`."""
    return {field.name: field.metadata["on_cpu"] for field in dataclasses.fields(config) if "on_cpu" in field.metadata}


@functools.cache
def field_docs(config: Any) -> dict[str, str]:
    """Field name -> the string literal under it, read from the source of the class and of those it extends."""
    docs: dict[str, str] = {}
    for cls in reversed(config.__mro__[:-1]):
        tree = ast.parse(Path(inspect.getfile(cls)).read_text(encoding="utf-8"))
        body = next(n.body for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == cls.__name__)
        for above, below in zip(body, body[1:], strict=False):
            if isinstance(above, ast.AnnAssign) and isinstance(above.target, ast.Name) and isinstance(below, ast.Expr):
                if isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
                    docs[above.target.id] = below.value.value
    return docs


def members(annotation: Any) -> list[Any]:
    """The members of a union without None; of anything else, itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [member for member in typing.get_args(annotation) if member is not types.NoneType]
    return [annotation]


def element(annotation: Any) -> tuple[Any, bool]:
    """(type of one value, whether the option repeats) for `T`, `T | None` and `tuple[T, ...]`."""
    inner = members(annotation)
    if len(inner) == 1 and typing.get_origin(inner[0]) is tuple:
        item, dots = typing.get_args(inner[0])
        assert dots is ..., f"{annotation}: only tuple[T, ...] makes an option"
        return item, True
    return annotation, False


def click_type(annotation: Any) -> click.ParamType:
    if typing.get_origin(annotation) is Literal:
        return click.Choice(typing.get_args(annotation))
    inner = members(annotation)
    if len(inner) > 1:
        # Words before scalars: str would swallow every word.
        inner.sort(key=lambda member: typing.get_origin(member) is not Literal)
        return FirstThatFits([click_type(member) for member in inner])
    if inner[0] is not annotation:
        return click_type(inner[0])
    assert annotation in SCALARS, f"no option can be made of {annotation}"
    return SCALARS[annotation]


def names_path(option: Option) -> bool:
    """Whether a file or folder is part of the option's value, such as NAME=PATH:WEIGHT."""
    return "PATH" in (option.metavar or "") and not isinstance(option.kind, click.Path)


def complete_path(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
    """For the shell: its own completion of file names."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def config_options(*configs: type) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Adds an option for each field of the dataclasses; the command gets `given`, a dict of the fields that stand on
    the command line.

    Two dataclasses of one command share neither a field name nor an option name (assertion).
    """
    options = [option for config in configs for option in options_of(config)]
    for names in ([option.field for option in options], [option.declaration for option in options]):
        twice = {name for name in names if names.count(name) > 1}
        assert not twice, f"in more than one dataclass: {', '.join(sorted(twice))}"

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(function)
        def command(**values: Any) -> T:
            ctx = click.get_current_context()
            given = {}
            for option in options:
                value = values.pop(option.field)
                if ctx.get_parameter_source(option.field) is ParameterSource.COMMANDLINE:
                    given[option.field] = value
            return function(given=given, **values)

        for option in reversed(options):
            shown: Any = None if option.default is dataclasses.MISSING else option.default
            more: dict[str, Any] = {} if option.bare is None else {"is_flag": False, "flag_value": option.bare}
            # The default is only shown: `build` takes it from the dataclass, below what a TOML file says.
            decorator = click.option(
                option.declaration,
                option.field,
                type=option.kind,
                multiple=option.repeatable,
                default=shown,
                show_default=shown not in (None, ()),
                metavar=option.metavar,
                help=option.help,
                shell_complete=complete_path if names_path(option) else None,
                **more,
            )
            command = decorator(command)
        command.configs = configs  # type: ignore[attr-defined]  # for docs/commands
        return command

    return decorate


def in_words(name: str) -> str:
    """ModelSource -> Model source."""
    return re.sub(r"(?<=\w)([A-Z])(?=[a-z])", lambda found: f" {found[1].lower()}", name)


def help_sections(command: click.Command, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
    """Heading -> (option, what it says) of each option; a heading for each dataclass, where there are several."""
    configs = getattr(command.callback, "configs", ())
    headings = {
        option.field: in_words(config.__name__.removesuffix("Config"))
        for config in (configs if len(configs) > 1 else ())
        for option in options_of(config)
    }
    sections: dict[str, list[tuple[str, str]]] = {}
    for param in command.get_params(ctx):
        if record := param.get_help_record(ctx):
            sections.setdefault(headings.get(param.name or "", "Options"), []).append(record)
    return sections


def of_several_lines(line: str, width: int) -> str:
    """A command as it can be pasted: broken before an option, with a backslash, where it is longer than `width`."""
    lines = [""]
    for part in re.split(r" (?=-)", line):
        if lines[-1] and len(lines[-1]) + len(part) + len("  \\") > width:
            lines[-1] += " \\"
            lines.append(f"    {part}")
        else:
            lines[-1] += f" {part}" * bool(lines[-1]) or part
    return "\n".join(lines)


class WithExamples(click.Command):
    """A command whose help ends with examples as they are typed; click would wrap them in the middle of an option."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_paragraph()
        for line in inspect.cleandoc(self.epilog or "").splitlines():
            shown = of_several_lines(line.strip(), formatter.width - 4)
            formatter.write(textwrap.indent(shown, "  ") + "\n")


class ExampleGroup(WithExamples, click.Group):
    """A group of commands with an example of its own."""


class ConfigCommand(WithExamples):
    """A command whose help has a heading for each of its dataclasses."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, records in help_sections(self, ctx).items():
            with formatter.section(heading):
                formatter.write_dl(records)


def build(config: type[T], given: Mapping[str, Any], table: Mapping[str, Any] | None = None, where: str = "") -> T:
    """The dataclass from its defaults, under a TOML table, under what was given on the command line.

    `given` may hold fields of other dataclasses too; `table` may not. `where` names the table in messages, such as
    "configs/31m.toml [model]". Raises UsageError for an unknown key, a value of a wrong type or out of range, and a
    missing value.
    """
    options = {option.field: option for option in options_of(config)}
    values = {}
    for key, value in (table or {}).items():
        if key not in options:
            raise UsageError(f"{where}: unknown key {key!r}; known are {', '.join(options)}")
        values[key] = toml_value(options[key], value, where)
    values |= {name: value for name, value in given.items() if name in options}
    for name, option in options.items():
        if name not in values and option.default is dataclasses.MISSING:
            raise UsageError(f"missing {option.option}: {option.help}")
    try:
        return config(**values)
    except ValueError as error:
        raise UsageError(f"{where}: {error}" if where and not given.keys() & options.keys() else str(error)) from error


def toml_value(option: Option, value: Any, where: str) -> Any:
    """`value` as TOML has it (int, float, bool, str, list) as the field's type; UsageError where it does not fit."""
    if option.repeatable and isinstance(value, list | tuple):
        item, _ = element(option.annotation)
        if all(fits(item, entry) for entry in value):
            return tuple(Path(entry) if item is Path else entry for entry in value)
    elif not option.repeatable and fits(option.annotation, value):
        if Path in members(option.annotation) and value is not None:
            return Path(value)
        return float(value) if members(option.annotation) == [float] and value is not None else value
    kind = f"a list of {words(option.kind)}" if option.repeatable else words(option.kind)
    raise UsageError(f"{where}: {option.field} = {value!r} is not {kind}")


def fits(annotation: Any, value: Any) -> bool:
    if value is None:
        return types.NoneType in typing.get_args(annotation)
    if isinstance(value, bool):
        return bool in members(annotation)
    for member in members(annotation):
        if typing.get_origin(member) is Literal:
            if value in typing.get_args(member):
                return True
        elif isinstance(value, {float: int | float, Path: str | Path}.get(member, member)):
            return True
    return False
