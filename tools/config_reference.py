"""Writes ``docs/configuration.md`` from the schema: every key with what it allows, its default and what it does.

Run ``python tools/config_reference.py`` after a change of ``lockstep/config/schema.py``; a test in
``tests/meta/test_docs.py`` fails while the page differs from what this prints.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from lockstep.config.keys import describe, discriminator, sections, single_literal, tag
from lockstep.config.schema import PATH_KEYS, BoundConfig, RewardConfig, RunConfig, Section
from lockstep.config.toml_text import format_value

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

HEAD = """\
# Configuration

<!-- Written by tools/config_reference.py from lockstep/config/schema.py. Change those, not this page. -->

Every key of a run, with what it allows, its default and what it does. How files, recipes and `--set` go together is in
[Write a recipe](write-a-recipe.md). `lockstep recipes show RECIPE` prints all keys of a recipe with their values and
where each came from. A key that is not here is refused, and so is a setting that has no effect beside the others.

"none" is written as `--set key=none`, or by naming the key in a file's top-level `unset` list, since TOML has no null.
"""

SAME_KINDS = {"reference": "model", "teacher": "model"}
"""Sections whose kinds are those of another: described once."""


def render() -> str:
    """The whole page."""
    blocks = [HEAD, "## Top level\n", *_section_lines(RunConfig), ""]
    for name, field in RunConfig.model_fields.items():
        members = sections(field.annotation)
        if not members:
            continue
        if name in SAME_KINDS:
            text = f"As `[{SAME_KINDS[name]}]`. {field.description}"
            blocks.append(f"## `[{name}]`\n\n{text}\n")
        elif len(members) == 1:
            blocks += _table_of(name, members[0])
        else:
            kind = discriminator(members)
            blocks.append(f"## `[{name}]`\n\nOne of {len(members)} kinds, told apart by `{kind}`.\n")
            for member in members:
                blocks += _table_of(name, member, f'`[{name}]` with `{kind} = "{tag(member, members)}"`', "###")
    blocks += _table_of("task.rewards", RewardConfig, "An item of `[[task.rewards]]`", "##")
    blocks += _table_of("gate.bounds", BoundConfig, "An item of `[[gate.bounds]]`", "##")
    return "\n".join(blocks).rstrip() + "\n"


def _table_of(path: str, section: type[Section], title: str | None = None, level: str = "##") -> Iterator[str]:
    """Heading, the section's own docstring, its keys, then the sections inside it."""
    yield f"{level} {title or f'`[{path}]`'}\n\n{_prose(inspect.getdoc(section) or '')}\n"
    yield from _section_lines(section, path)
    yield ""
    for name, field in section.model_fields.items():
        for member in sections(field.annotation):
            yield from _table_of(f"{path}.{name}", member, None, "###")


def _section_lines(section: type[Section], path: str = "") -> Iterator[str]:
    yield "| key | allowed | default | what it does |"
    yield "|---|---|---|---|"
    for name, field in section.model_fields.items():
        if sections(field.annotation) and path:
            continue
        key = f"{path}.{name}" if path else name
        cells = (f"`{name}`", _allowed(field), _default(field), _what(key, field, section))
        yield f"| {' | '.join(map(_cell, cells))} |"


def _allowed(field: FieldInfo) -> str:
    if members := sections(field.annotation):
        optional = ", or none" if not field.is_required() and field.default is None else ""
        return ("a table" if len(members) == 1 else f"a table, one of {len(members)} kinds") + optional
    return describe(field.annotation, field)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, Section):
        return "its defaults"
    plain = [item.model_dump() if isinstance(item, Section) else item for item in value] if _is_list(value) else value
    return f"`{format_value(plain)}`"


def _what(key: str, field: FieldInfo, section: type[Section]) -> str:
    if single_literal(section, key.rpartition(".")[2]) is not None:
        return "Selects this kind." if key.endswith((".source", ".kind")) else "The only choice so far."
    if sections(field.annotation):
        return f"{field.description or ''} See [`[{key}]`](#{key})."
    text = field.description or ""
    if key in PATH_KEYS:
        text += " A relative path is relative to the file that sets it (in `--set`: to the working directory)."
    return text


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _prose(docstring: str) -> str:
    """A docstring as Markdown: double backquotes become single ones, lines are joined."""
    return " ".join(docstring.replace("``", "`").split())


def _cell(text: str) -> str:
    """Text that a Markdown table's cell can hold."""
    return text.replace("|", "\\|").strip()


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(PAGE)
