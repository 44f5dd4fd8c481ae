"""How the reference reads docstrings: a line `name: text` is about an argument, `>>>` begins an example, and the
comment behind a field of a class is about that field."""

import re
from itertools import groupby
from textwrap import indent

from griffe import Class, Extension, Function, GriffeLoader, Object

ENTRY = re.compile(r"^([a-z]\w*(?:, \w+)*): (.*(?:\n +.*)*)", re.MULTILINE)  # a sentence has a capital
FIELD = re.compile(r" *\w+: .*?  # (?!type:)(.+)")
ARGUMENTS, ATTRIBUTES, EXAMPLES = "Args:", "Attributes:", "Examples:"


class HouseStyle(Extension):
    """Rewrites docstrings to the google style, which griffe checks: an argument must be in the signature."""

    def on_object(self, *, obj: Object, loader: GriffeLoader, **_: object) -> None:
        if obj.docstring and isinstance(obj, Class | Function):
            attributes = obj.members.keys() - {one.name for one in obj.parameters}
            obj.docstring.value = google(obj.docstring.value, attributes, fields_of(obj))


def google(docstring: str, attributes: set[str], fields: list[str]) -> str:
    """attributes: names that are no arguments; fields: lines `name: text` to add."""
    found = [in_section(paragraph, attributes) for paragraph in docstring.split("\n\n")]
    if fields:
        before_examples = sum(section != EXAMPLES for section, _ in found)
        found.insert(before_examples, (ATTRIBUTES, "\n".join(fields)))
    parts = []
    for section, group in groupby(found, lambda one: one[0]):
        text = "\n\n".join(paragraph for _, paragraph in group)
        parts.append(f"{section}\n{indent(text, '    ')}" if section else text)
    return "\n\n".join(parts)


def in_section(paragraph: str, attributes: set[str]) -> tuple[str, str]:
    if paragraph.startswith(">>>"):
        return EXAMPLES, paragraph
    if (entry := ENTRY.match(paragraph)) is None:
        return "", paragraph
    return ATTRIBUTES if entry[1] in attributes else ARGUMENTS, ENTRY.sub(one_by_one, paragraph)


def one_by_one(entry: re.Match[str]) -> str:
    """`a, b: text` as an entry for each."""
    return "\n".join(f"{name}: {entry[2]}" for name in entry[1].split(", "))


def fields_of(obj: Object) -> list[str]:
    """`name: comment` of each public field that has one."""
    fields = {name: FIELD.match(one.lines[0]) for name, one in obj.members.items() if one.is_attribute and one.lines}
    return [f"{name}: {field[1]}" for name, field in fields.items() if field and not name.startswith("_")]
