"""The pages of the site. docs/ is read on a forge, too, where a link may lead to a notebook, to a file outside of docs/
or to source code: each of these becomes a page here, and its links lead to it. Each public name gets a page."""

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import streamclr

ROOT = Path(__file__).parents[2]
MOVED = {"README.md": "index.md", "docs/README.md": "pages.md"}
LINK = re.compile(r"(?<=\]\()[^)#\s]+")
NAME = re.compile(rf"(?<![\[`])`({'|'.join(streamclr.__all__)})([.(][^`]*)?`(?![\]`])")
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n"
FENCED = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
paths: dict[str, str] = {}  # in the repository, of the pages of the site


def on_config(config: MkDocsConfig) -> None:
    reference = next(entry for entry in config.nav if "Python API" in entry)
    reference["Python API"] = ["api.md", *({name: reference_of(name)} for name in streamclr.__all__)]


def on_files(files: Files, config: MkDocsConfig) -> None:
    for name in streamclr.__all__:
        files.append(File.generated(config, reference_of(name), content=f"::: streamclr.{name}\n"))
    own = [file for file in files if (ROOT / "docs" / file.src_uri).is_file()]
    todo = ["README.md", *(f"docs/{file.src_uri}" for file in own)]
    for file in own:
        if uri_of(f"docs/{file.src_uri}") != file.src_uri:
            files.remove(file)
    for path in todo:  # which grows
        if uri_of(path) not in files.src_uris:
            files.append(File.generated(config, uri_of(path), **content_of(path)))
        paths[uri_of(path)] = path
        todo += [linked for linked in links_of(path) if linked not in todo]


def on_page_markdown(markdown: str, page: Page, **_: object) -> str | None:
    """Let links lead to pages of the site, and public names to the reference; what belongs to an item of a list has two
    spaces before it on a forge, and four here."""
    if (path := paths.get(page.file.src_uri)) is None or path.endswith(".py"):
        return None

    def moved(link: re.Match[str]) -> str:
        linked = target(path, link[0])
        if not (ROOT / linked).is_file():
            return link[0]
        return posixpath.relpath(uri_of(linked), posixpath.dirname(page.file.src_uri) or ".")

    parts = FENCED.split(markdown)
    for i in range(0, len(parts), 2):  # between blocks of code
        text = re.sub(r"^ +", lambda spaces: 2 * spaces[0], LINK.sub(moved, parts[i]), flags=re.MULTILINE)
        parts[i] = NAME.sub(r"[\g<0>][streamclr.\1]", text)
    return "".join(parts)


def reference_of(name: str) -> str:
    return f"reference/{name}.md"


def uri_of(path: str) -> str:
    """Of a file of the repository, the page or file of the site."""
    path = MOVED.get(path, path.removeprefix("docs/"))
    return re.sub(r"\.py$", ".py.md", re.sub(r"\.ipynb$", ".md", path))


def target(path: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def links_of(path: str) -> list[str]:
    """The files of the repository to which a page leads."""
    if not path.endswith((".md", ".ipynb")):
        return []
    text = content_of(path).get("content") or (ROOT / path).read_text("utf-8")
    found = [target(path, link) for link in LINK.findall(text)]
    return [linked for linked in found if (ROOT / linked).is_file()]


def content_of(path: str) -> dict[str, Any]:
    """What a file of the site is made of."""
    if path.endswith(".py"):
        return {"content": f"{NOT_SEARCHED}# {path}\n\n~~~~~python\n{(ROOT / path).read_text('utf-8')}~~~~~\n"}
    if path.endswith(".ipynb"):
        return {"content": "\n\n".join(cells_of(json.loads((ROOT / path).read_text("utf-8"))))}
    return {"abs_src_path": str(ROOT / path)}


def cells_of(notebook: dict[str, Any]) -> list[str]:
    """The cells as Markdown, each with the text that it printed."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [f"```text\n{''.join(output['text'])}```" for output in cell.get("outputs", [])]
    return parts
