"""The documentation site is built without a warning, holds together, and asks no other host for anything."""

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from markdown_it import MarkdownIt

import streamclr
from support.pages import browser

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index", "docs/README.md": "pages", "experiments/README.md": "experiments/index"}
PAGES |= {name: Path(name).stem for name in ("CHANGELOG.md", "CONTRIBUTING.md")}
PAGES |= {
    str(path.relative_to(ROOT)): str(path.relative_to(ROOT / "docs").with_suffix(""))
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if path != ROOT / "docs" / "README.md"
}
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data", "embed": "src"}
LINKS_THAT_LOAD = {
    "stylesheet",
    "icon",
    "preload",
    "prefetch",
    "preconnect",
    "dns-prefetch",
    "manifest",
    "modulepreload",
}
NOWHERE = "http://127.0.0.1:9"  # a port at which nobody listens

pytestmark = pytest.mark.system
chromium = pytest.fixture(scope="module")(browser)


class Found(HTMLParser):
    """What is in a page."""

    def __init__(self, html):
        super().__init__()
        self.loads, self.links, self.ids, self.tags = [], [], set(), []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append((tag, given))
        self.ids.add(given.get("id"))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and LINKS_THAT_LOAD.intersection(given.get("rel", "").split()):
            self.loads.append(given["href"])
        if given.get(LOADS.get(tag)):
            self.loads.append(given[LOADS[tag]])


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The site, and what its build said."""
    pytest.importorskip("mkdocstrings")
    site = tmp_path_factory.mktemp("site")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "http_proxy": NOWHERE, "https_proxy": NOWHERE}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return site, done.stdout + done.stderr


@pytest.fixture(scope="module")
def site(built):
    return built[0]


@pytest.fixture(scope="module")
def pages(site):
    return {path: Found(path.read_text("utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}


@pytest.fixture
def address(site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_it_is_built_without_a_warning(built):
    site, said = built
    assert "WARNING" not in said
    assert "ERROR" not in said
    assert (site / "search" / "search_index.json").stat().st_size > 100_000


def test_each_public_name_has_a_page_with_its_example(site, pages):
    listed = {link.partition("#")[0] for link in pages[site / "index.html"].links}
    for name in streamclr.__all__:
        page = site / "reference" / f"{name}.html"
        assert f"streamclr.{name}" in pages[page].ids
        assert "&gt;&gt;&gt; " in page.read_text("utf-8")
        assert f"reference/{name}.html" in listed


def test_the_arguments_of_a_learner_are_in_its_page(site):
    text = re.sub(r"<[^>]*>", "", (site / "reference" / "Learner.html").read_text("utf-8"))
    assert "frames between two neighbours at most" in text
    step = re.sub(r"<[^>]*>", "", (site / "reference" / "Step.html").read_text("utf-8"))
    assert "images of the segment that entered" in step  # the comment behind the field


def test_every_link_leads_somewhere(site, pages):
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            to = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            fragment = unquote(parts.fragment)
            if not to.is_file() or (fragment and to.suffix == ".html" and fragment not in pages[to].ids):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken


@pytest.mark.parametrize("path", PAGES)
def test_a_page_has_the_parts_that_it_has_on_a_forge(path, site):
    """Lists and tables that only one of the two renderers sees as such."""
    html = (site / f"{PAGES[path]}.html").read_text("utf-8")
    (article,) = re.findall(r"<article.*?</article>", html, re.DOTALL)
    forge = MarkdownIt("commonmark").enable("table").render((ROOT / path).read_text("utf-8"))
    for tag in ("h1", "h2", "h3", "li", "tr", "td", "pre", "img", "strong"):
        here, there = ([name for name, _ in Found(text).tags].count(tag) for text in (article, forge))
        assert here == there, f"{tag}: {here} here, {there} on a forge"


def test_nothing_is_loaded_from_another_host(site, pages):
    for path, page in pages.items():
        assert not [load for load in page.loads if urlsplit(load).netloc], path
        (policy,) = [
            given["content"] for tag, given in page.tags if given.get("http-equiv") == "Content-Security-Policy"
        ]
        assert set(re.findall(r"[^ ;]+", policy)) <= {
            "default-src", "img-src", "style-src", "script-src", "'self'", "'unsafe-inline'", "data:",
        }  # fmt: skip
    for path in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)]*", path.read_text("utf-8")), path


def test_its_scripts_name_no_host_but_for_what_no_page_has(site, pages):
    named = {
        host
        for path in site.rglob("*.js")
        for host in re.findall(r"[\"'`](?:https?:)?//([\w.-]+\.\w+)/", path.read_text("utf-8"))
    }
    assert named <= {"unpkg.com", "api.github.com"}  # for diagrams, browsers of before 2020, and a link to a forge
    for page in pages.values():
        shown = {word for _, given in page.tags for word in (given.get("class") or "").split()}
        assert not shown & {"mermaid", "md-source"}


def test_no_path_of_this_machine_is_in_it(site):
    for path in site.rglob("*"):
        if path.suffix in (".html", ".json", ".xml", ".js"):
            assert str(ROOT) not in path.read_text("utf-8"), path


def test_a_browser_asks_nobody_else(chromium, address):
    context = chromium.new_context()
    context.set_default_timeout(120_000)
    asked, wrong = [], []
    context.on("request", lambda request: asked.append(request.url))
    page = context.new_page()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    for path in (
        "index.html",
        "reference/Learner.html",
        "notebooks/adapt.html",
        "experiments/index.html",
        "concepts.html",
    ):
        page.goto(f"{address}/{path}")
    assert page.locator("article img").evaluate("image => image.naturalWidth") > 0
    query = page.locator("[data-md-component=search-query]")
    query.click()
    page.get_by_text("Type to start searching").wait_for()  # the index has been read
    query.press_sequentially("lazy scoring")
    page.locator(".md-search-result__link").first.wait_for()
    assert len(asked) > 10
    assert not [url for url in asked if not url.startswith(f"{address}/") and not url.startswith("data:")]
    assert not wrong
    # What a script would load from elsewhere the page itself refuses.
    refused = page.evaluate(
        """url => new Promise(resolve => {
            document.addEventListener("securitypolicyviolation", event => resolve(event.blockedURI))
            const script = Object.assign(document.createElement("script"), {src: url, onerror: () => resolve("asked")})
            document.head.append(script)
        })""",
        urljoin(NOWHERE, "/script.js"),
    )
    assert refused.startswith(NOWHERE)
    context.close()
