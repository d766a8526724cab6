"""The web book, built once by its documented command: its pages, links, hints and figures."""

import contextlib
import functools
import io
import itertools
import json
import os
import re
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from jupyter import chromium
from PIL import Image, ImageStat
from skips import need_program
from web_server import served

from dplab.checks import every_exercise, solution_source
from dplab.desk import course
from dplab.show import palette

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = ROOT / "chapters"
NOTEBOOKS = course.notebooks(CHAPTERS)
PAGES = sorted(path.relative_to(CHAPTERS).with_suffix(".html").as_posix() for path in (
    *CHAPTERS.glob("*.ipynb"), *CHAPTERS.glob("*.md"), *CHAPTERS.glob("book/*.md")))
REPOSITORY = "https://github.com/someone/dplab"  # an address as the workflow gives it


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """The folder of the book, as the documented command builds it."""
    need_program("npm")
    folder = tmp_path_factory.mktemp("book") / "html"
    done = subprocess.run(
        [sys.executable, "chapters/book/build.py", folder], cwd=ROOT, capture_output=True,
        text=True, timeout=550,
        env=os.environ | {"GITHUB_REPOSITORY": REPOSITORY.removeprefix("https://github.com/")})
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    return folder


@functools.cache
def page(path):
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


@functools.cache
def anchors(path):
    """The ids to which a link can lead."""
    return [element["id"] for element in page(path).find_all(id=True)]


def squeezed(text):
    """Letters, digits and signs, without white space."""
    return re.sub(r"\s+", "", text)


# Pages and links


def test_every_page_is_in_the_navigation_and_no_source_is_published(book):
    front = page(book / "book/index.html")
    listed = [urllib.parse.urljoin("book/", link["href"].partition("#")[0])
              for link in front.select(".sidebar-tree a")]
    assert sorted(listed) == [name for name in PAGES if name != "book/index.html"]
    order = [f"{path.stem}.html" for path in NOTEBOOKS.values()]
    assert [name for name in listed if name in order] == order
    assert not [path for path in book.rglob("*") if "pyodide" not in path.parts
                and path.suffix in (".ipynb", ".md", ".doctree")]


def test_every_link_leads_to_an_element_that_is_there_once_or_into_the_repository(book):
    lost, addresses = [], []
    for name in PAGES:
        assert len(anchors(book / name)) == len({*anchors(book / name)}), name
        for address in [link["href"] for link in page(book / name).select("a[href]")]:
            path, _, anchor = address.partition("#")
            if re.match(r"[a-z]+:", path):
                addresses.append(path)
                continue
            target = (book / name).parent / urllib.parse.unquote(path) if path else book / name
            target, anchor = target.resolve(), urllib.parse.unquote(anchor)
            if not target.is_file() or (anchor and anchor not in anchors(target)):
                lost.append((name, address))
    assert not lost
    assert f"{REPOSITORY}/blob/main/README.md" in addresses
    for address in addresses:
        if address.startswith(f"{REPOSITORY}/"):
            kind, _, path = address.removeprefix(f"{REPOSITORY}/").partition("/main")
            place = ROOT / path.lstrip("/")
            assert place.is_file() if kind == "blob" else place.is_dir(), address


# What a page has of its notebook


def test_a_page_has_the_cells_folds_and_figures_of_its_notebook(book):
    revealed = 0
    for path in NOTEBOOKS.values():
        stem, soup = path.stem, page(book / f"{path.stem}.html")
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code"
                and "remove-cell" not in cell["metadata"].get("tags", [])]
        sources = [squeezed("".join(cell["source"])) for cell in code]
        assert [squeezed(each.text) for each in soup.select(".cell_input pre")] == sources, stem
        folded = sum("hide-input" in cell["metadata"].get("tags", []) for cell in code)
        assert folded == len(soup.select("details.hide:has(.cell_input), .cell_input details, "
                                         "details.above-input")), stem
        results = [fold for fold in soup.select(".cell details") if "Result: " in fold.text]
        assert len(results) == sum(".reveal(" in source for source in sources), stem
        revealed += len(results)
        assert not soup.select("article details[open]")
        alts = {output["metadata"]["image/png"]["alt"] for cell in code
                for output in cell["outputs"] if "image/png" in output.get("data", {})}
        pictures = {image.get("alt"): image for image in soup.select("article img")}
        assert alts <= {*pictures} and not {None, ""} & {*pictures}, stem
        for image in pictures.values():  # a tap opens all of it
            assert (book / image["src"]).is_file() and image.parent["href"] == image["src"]
    assert revealed > 30


def test_nothing_asks_to_run_a_cell_again(book):
    """What stands in stored outputs for who has a kernel."""
    for name in PAGES:
        for output in page(book / name).select(".cell_output"):
            assert not [words for words in (
                "run it again", "not attempted", "dplab.hint(", "Run this cell", "widget-view",
                "Markdown object", "guess: none", "guess none", "guesses: ", "until you pass",
                "exercises passed") if words in output.text], name
        assert not re.search(r"Stuck\? +dplab", page(book / name).text), name


def test_the_hints_follow_the_check_folded_one_by_one_and_no_solution_is_there(book):
    secrets = {}
    for exercise in every_exercise():
        soup = page(book / f"{NOTEBOOKS[exercise.chapter].stem}.html")
        check = next(cell for cell in soup.select(".cell") if re.search(
            rf"dplab\.check\([\"']{exercise.slug}[\"']", cell.text))
        hints = itertools.takewhile(lambda each: each.name == "details", check.find_next_siblings())
        assert [squeezed(each.p.text) for each in hints] == [
            squeezed(hint.replace("`", "")) for hint in exercise.hints], exercise.slug
        secrets[exercise.slug] = squeezed(solution_source(exercise.slug))
    for name in PAGES:
        code = "\n".join(squeezed(block.text) for block in page(book / name).select("pre, code"))
        assert not [slug for slug, source in secrets.items() if source in code], name


# In a browser


@pytest.fixture(scope="module")
def reader(book):
    """A function that opens a page at a width in a theme, as a context manager.

    Requests to other hosts and errors are its errors.
    """
    @contextlib.contextmanager
    def opened(name, width=1280, theme="light"):
        wrong = []
        with browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme,
                                 permissions=["clipboard-read", "clipboard-write"]) as context:
            tab = context.new_page()
            tab.on("request", lambda asked: asked.url.startswith((server, f"blob:{server}", "data:")
                                                                 ) or wrong.append(asked.url))
            tab.on("response", lambda got: got.ok or got.status == 304 or wrong.append(got.url))
            tab.on("pageerror", lambda error: wrong.append(str(error)))
            tab.on("console", lambda said: said.type == "error" and wrong.append(said.text))
            tab.goto(server + name)
            yield tab
        assert not wrong

    with served(book) as server, chromium() as browser:
        yield opened


# Elements beyond the right edge that no box of their own scrolls, and printed text that is cut off.
OVERFLOWING = """() => {
    const edge = document.documentElement.clientWidth;
    const scrolls = node => /auto|scroll|hidden/.test(getComputedStyle(node).overflowX)
        && node.getBoundingClientRect().right <= edge + 1;
    const inBox = node => {
        for (let at = node; at && at !== document.body; at = at.parentElement)
            if (scrolls(at)) return true;
        return false;
    };
    const cut = [...document.querySelectorAll('.cell_output pre')].filter(block =>
        block.scrollWidth > block.clientWidth + 1 && !block.closest('.columns'));
    return [...document.querySelectorAll('article *')]
        .filter(node => node.getClientRects().length && !node.closest('mjx-assistive-mml')
            && node.getBoundingClientRect().right > edge + 1 && !inBox(node)).concat(cut)
        .map(node => `${node.tagName}: ${(node.innerText ?? '').slice(0, 60)}`)
        .concat(document.documentElement.scrollWidth > edge ? ['the page'] : []);
}"""
# Of each text in an output: its colour, and that of the ground below it, as [r, g, b].
COLOURS = """() => {
    const outputs = '.cell_output pre, .cell_output span[style*="color:#"]';
    const rgb = text => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
    return [...document.querySelectorAll(outputs)].map(node => {
        const ink = getComputedStyle(node).color, text = node.innerText.slice(0, 40);
        while (getComputedStyle(node).backgroundColor.startsWith('rgba')) node = node.parentElement;
        return [rgb(ink), rgb(getComputedStyle(node).backgroundColor), text];
    });
}"""
IS_LIGHT = "is => document.documentElement.dataset.jpThemeLight === is"  # static/theme.js tells


def as_hex(rgb):
    return "#" + "".join(f"{round(part):02x}" for part in rgb)


def test_every_page_on_a_phone_without_a_network(book, reader):
    """Nothing is wider than the page, formulas are set, what is printed wraps and can be read."""
    found, seen = {}, 0
    with reader("book/index.html", width=400) as tab:
        address = tab.url.removesuffix("book/index.html")
        for name in PAGES:
            tab.goto(address + name)
            if page(book / name).select(".math"):
                tab.wait_for_selector("mjx-container", timeout=60_000)
                assert tab.evaluate(
                    "document.fonts.ready.then(fonts => [...fonts].some(font =>"
                    " font.family.startsWith('MJX') && font.status === 'loaded'))"), name
            found[name] = tab.evaluate(OVERFLOWING)
            for theme in ("light", "dark") if "span style" in str(page(book / name)) else ():
                tab.emulate_media(color_scheme=theme)
                tab.wait_for_function(IS_LIGHT, arg=str(theme == "light").lower())
                colours = tab.evaluate(COLOURS)
                seen += len(colours)
                found[name] += [text for ink, ground, text in colours
                                if palette.contrast(as_hex(ink), as_hex(ground)) < 4.5]
    assert seen > 200
    assert not {name: all for name, all in found.items() if all}


def test_drawings_and_plots_follow_the_theme(reader):
    with reader("book/index.html") as tab:
        for theme in ("dark", "light"):  # of the system
            tab.locator(".theme-toggle:visible").first.click()
            chosen = tab.evaluate("document.body.dataset.theme")
            tab.emulate_media(color_scheme=theme)
            tab.wait_for_function(
                "scheme => getComputedStyle(document.querySelector('article img')).colorScheme"
                " === scheme", arg=theme if chosen == "auto" else chosen)
    shades = []
    for theme in ("light", "dark"):
        with reader("06_where_the_time_goes.html", theme=theme) as tab:
            plot = tab.locator(".cell_output img").first
            plot.scroll_into_view_if_needed()
            tab.wait_for_function("image => image.complete", arg=plot.element_handle())
            with Image.open(io.BytesIO(plot.screenshot())) as picture:
                shades.append(ImageStat.Stat(picture.convert("L")).median[0])
    assert shades[0] > 230 and shades[1] < 60


def test_commands_can_be_copied(reader):
    with reader("book/setup.html") as tab:
        tab.locator("button.copy").first.click()
        tab.locator("button.copy", has_text="Copied").wait_for()
        copied = tab.evaluate("navigator.clipboard.readText()")
        assert copied == f"git clone {REPOSITORY} dplab && cd dplab"
