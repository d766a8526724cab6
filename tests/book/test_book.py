"""The web book, built once by its documented command: its pages, links, hints and figures."""

import ast
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

import colab
import pytest
from bs4 import BeautifulSoup
from jupyter import chromium
from PIL import Image, ImageStat
from skips import need_program
from web_server import served

from dplab.checks import every_exercise, solution_source
from dplab.desk import course

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = ROOT / "chapters"
NOTEBOOKS = course.notebooks(CHAPTERS)
PAGES = sorted(path.relative_to(CHAPTERS).with_suffix(".html").as_posix() for path in (
    *CHAPTERS.glob("*.ipynb"), *CHAPTERS.glob("*.md"), *CHAPTERS.glob("book/*.md")))
REPOSITORY = "https://github.com/someone/dplab"  # an address as the workflow gives it


@pytest.fixture(scope="session")
def book(tmp_path_factory):
    """The folder of the book, as the documented command builds it."""
    need_program("npm")
    folder = tmp_path_factory.mktemp("book") / "html"
    done = run([sys.executable, "chapters/book/build.py", folder], ROOT,
               GITHUB_REPOSITORY=REPOSITORY.removeprefix("https://github.com/"))
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    return folder


def run(command, folder, **environment):
    inherited = {name: value for name, value in os.environ.items() if name != "GITHUB_REPOSITORY"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=550,
                          env=inherited | environment)


@functools.cache
def page(path):
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


@functools.cache
def anchors(path):
    """The elements of a page to which a link can lead."""
    return {element["id"]: element for element in page(path).find_all(id=True)}


@functools.cache
def cells(notebook):
    return json.loads(notebook.read_text(encoding="utf-8"))["cells"]


def squeezed(text):
    """Letters, digits and signs, without white space."""
    return re.sub(r"\s+", "", text)


# --- pages and navigation

def test_every_source_has_its_page_in_the_navigation(book):
    front = page(book / "book/index.html")
    listed = [urllib.parse.urljoin("book/", link["href"].partition("#")[0])
              for link in front.select(".sidebar-tree a")]
    assert sorted(listed) == [name for name in PAGES if name != "book/index.html"]
    order = {f"{path.stem}.html": place for place, path in enumerate(NOTEBOOKS.values())}
    chapters = [name for name in listed if name in order]
    assert sorted(chapters, key=order.get) == chapters


def test_next_leads_through_the_whole_book(book):
    seen, following = [], "book/index.html"
    while following and following not in seen:
        seen.append(following)
        following = beside(book, following, "next")
    assert sorted(seen) == PAGES
    assert beside(book, seen[-1], "prev") == seen[-2]


def beside(book, name, way):
    """The page to which the link at the foot of a page leads; None where there is none."""
    link = page(book / name).select_one(f"a.{way}-page")
    return link and urllib.parse.urljoin(name, link["href"])


def test_no_source_of_a_page_is_published(book):
    published = [path for path in book.rglob("*") if "pyodide" not in path.parts]
    assert not [path for path in published if path.suffix in (".ipynb", ".md", ".doctree")]


def test_the_lock_file_names_no_registry():
    lock = (CHAPTERS / "book/package-lock.json").read_text()
    assert "resolved" not in lock and "://" not in lock


# --- links

def test_every_link_within_the_book_leads_somewhere(book):
    lost = []
    for name in PAGES:
        for link in page(book / name).select("a[href]"):
            path, _, anchor = link["href"].partition("#")
            if re.match(r"[a-z]+:", path):
                continue
            target = (book / name).parent / urllib.parse.unquote(path) if path else book / name
            target, anchor = target.resolve(), urllib.parse.unquote(anchor)
            if not target.is_file() or (anchor and anchor not in anchors(target)):
                lost.append((name, link["href"]))
    assert not lost


def linked_cells():
    """(notebook's stem, cell's id) of each link to a cell."""
    for path in [*CHAPTERS.glob("*.ipynb"), *CHAPTERS.rglob("*.md")]:
        if "node_modules" not in path.parts:
            yield from re.findall(r"\]\(([^()\s/]+)\.ipynb#cell-id=([^()\s]+)\)",
                                  path.read_text(encoding="utf-8"))


def beginning(cell):
    """The first letters and digits that the reader sees of a cell."""
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        text = re.sub(r"!\[[^\[\]]*\]\([^()\s]*\)", "", text)
        text = re.sub(r"\[([^\[\]]*)\]\([^()\s]*\)", r"\1", text)
    return letters(text.strip().splitlines()[0])[:24]


def letters(text):
    return "".join(re.findall(r"[A-Za-z0-9]", text))


def test_a_link_to_a_cell_lands_on_it(book):
    links = sorted(set(linked_cells()))
    assert len(links) > 60
    lost = []
    for stem, id in links:
        cell = next(each for each in cells(CHAPTERS / f"{stem}.ipynb") if each["id"] == id)
        label = re.sub(r"[^a-z0-9]+", "-", f"{stem}.{id}".lower()).lstrip("-0123456789")
        at = anchors(book / f"{stem}.html").get(label)
        read = [] if at is None else [at.text, *itertools.islice(at.find_all_next(string=True), 60)]
        if beginning(cell) not in letters("".join(read))[:400]:
            lost.append((stem, id))
    assert not lost


def test_links_to_files_go_to_the_repository(book):
    addresses = [link["href"] for name in PAGES for link in page(book / name).select("a[href]")
                 if link["href"].startswith(f"{REPOSITORY}/")]
    assert f"{REPOSITORY}/blob/main/README.md" in addresses
    for address in addresses:
        kind, _, path = address.removeprefix(f"{REPOSITORY}/").partition("/main")
        place = ROOT / path.partition("#")[0].lstrip("/")
        assert place.is_file() if kind == "blob" else place.is_dir(), address


def test_a_chapter_says_where_to_run_it(book):
    notebook = NOTEBOOKS[3].stem
    name = REPOSITORY.removeprefix("https://github.com/")
    line = page(book / f"{notebook}.html").select_one(".run-this")
    links = {link.text: link["href"] for link in line.select("a")}
    assert "stored outputs" in line.text and f"chapters/{notebook}.ipynb" in line.select_one(
        "a:-soup-contains(Codespaces)")["title"]
    assert ("Colab" in links) == colab.IS_KNOWN
    assert f"/gh/{name}/main" in links["Binder"] and f"{notebook}.ipynb" in links["Binder"]
    assert links["Codespaces"].endswith(f"/{name}")


# --- outputs, figures, folds

@pytest.mark.parametrize("notebook", NOTEBOOKS.values(), ids=lambda path: path.stem)
def test_a_page_has_the_cells_and_figures_of_its_notebook(book, notebook):
    soup, code = page(book / f"{notebook.stem}.html"), [
        cell for cell in cells(notebook) if cell["cell_type"] == "code"
        and "remove-cell" not in cell["metadata"].get("tags", [])]
    shown = [squeezed(each.text) for each in soup.select(".cell_input pre")]
    assert shown == [squeezed("".join(cell["source"])) for cell in code]
    folded = sum("hide-input" in cell["metadata"].get("tags", []) for cell in code)
    details = soup.select("details.hide:has(.cell_input), .cell_input details, details.above-input")
    assert len(details) == folded and not [each for each in details if each.has_attr("open")]
    alts = [output["metadata"]["image/png"]["alt"] for cell in code for output in cell["outputs"]
            if "image/png" in output.get("data", {})]
    pictures = {image.get("alt"): image for image in soup.select("article img")}
    assert None not in pictures and "" not in pictures and set(alts) <= set(pictures)
    for image in pictures.values():  # a tap opens all of it
        assert (book / image["src"]).is_file() and image.parent["href"] == image["src"]


def test_nothing_asks_to_run_a_cell_again(book):
    """What stands in stored outputs for who has a kernel."""
    left = {name: words for name in PAGES for output in page(book / name).select(".cell_output")
            for words in ("run it again", "not attempted", "dplab.hint(", "Run this cell",
                          "widget-view", "Markdown object", "guess: none", "guess none",
                          "guesses: ", "until you pass", "exercises passed")
            if words in output.text}
    assert not left
    assert not [name for name in PAGES if re.search(r"Stuck\? +dplab", page(book / name).text)]


def test_a_result_that_a_guess_asks_for_is_folded(book):
    shown = []
    for path in NOTEBOOKS.values():
        for cell in page(book / f"{path.stem}.html").select(".cell"):
            if (source := cell.select_one(".cell_input")) and ".reveal(" in source.text:
                folds = [fold for fold in cell.select("details") if "Result: " in fold.text]
                shown.append(len(folds) == 1 and not folds[0].has_attr("open"))
    assert len(shown) > 30 and all(shown)


def test_a_term_of_the_glossary_has_an_address(book):
    terms = page(book / "glossary.html").select("dl.glossary dt")
    assert len(terms) == CHAPTERS.joinpath("glossary.md").read_text("utf-8").count("\n| **")
    assert {"term-rank", "term-all-reduce", "term-world-size"} <= {term["id"] for term in terms}
    assert all(re.fullmatch("term-[a-zA-Z].*", term["id"]) for term in terms)


def test_no_page_has_an_id_twice(book):
    twice = {}
    for name in PAGES:
        ids = [element["id"] for element in page(book / name).select("[id]")]
        twice[name] = {each for each in ids if ids.count(each) > 1}
    assert not {name: ids for name, ids in twice.items() if ids}


# --- exercises

def test_the_hints_follow_the_check_folded_one_by_one(book):
    for exercise in every_exercise():
        soup = page(book / f"{NOTEBOOKS[exercise.chapter].stem}.html")
        check = next(cell for cell in soup.select(".cell") if f'dplab.check("{exercise.slug}"' in
                     cell.text or f"dplab.check('{exercise.slug}'" in cell.text)
        hints = [*itertools.takewhile(lambda each: each.name == "details",
                                      check.find_next_siblings())]
        assert not [each for each in hints if each.has_attr("open")]
        assert [squeezed(each.p.text) for each in hints] == [
            squeezed(hint.replace("`", "")) for hint in exercise.hints], exercise.slug


def bodies_in(source):
    """The bodies of a solution's functions, without docstrings and white space."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            if body:
                yield squeezed("".join(source.splitlines()[body[0].lineno - 1:body[-1].end_lineno]))


def test_no_solution_stands_in_the_book(book):
    """Of each solution, the longest body that stands in no stub."""
    secrets = {}
    for exercise in every_exercise():
        stub = squeezed(course.stub_of(exercise.chapter, exercise.slug) or "")
        secrets[exercise.slug] = max((body for body in bodies_in(solution_source(exercise.slug))
                                      if body not in stub), key=len)
    for path in book.rglob("*.html"):
        if "pyodide" not in path.parts:
            code = "\n".join(squeezed(block.text) for block in page(path).select("pre, code"))
            assert not [slug for slug, body in secrets.items() if body in code], path.name


# --- in a browser

@pytest.fixture(scope="module")
def server(book):
    """The address of the book, served over HTTP."""
    with served(book) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@contextlib.contextmanager
def reader(browser, server, width, theme):
    """A page at this width, and what went wrong on it: requests to other hosts, and errors."""
    wrong = []
    with browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme) as one:
        own = (server, f"blob:{server}", "data:")

        def answer(route):
            if route.request.url.startswith(own):
                return route.continue_()
            wrong.append(route.request.url)
            return route.abort()

        one.route("**/*", answer)
        tab = one.new_page()
        tab.on("response", lambda got: got.ok or got.status == 304 or wrong.append(got.url))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("console", lambda said: said.type == "error" and wrong.append(said.text))
        yield tab, wrong


# Elements beyond the right edge that no box of their own scrolls.
OVERFLOWING = """() => {
    const edge = document.documentElement.clientWidth;
    const scrolls = node => /auto|scroll|hidden/.test(getComputedStyle(node).overflowX)
        && node.getBoundingClientRect().right <= edge + 1;
    const inBox = node => {
        for (let at = node; at && at !== document.body; at = at.parentElement)
            if (scrolls(at)) return true;
        return false;
    };
    return [...document.querySelectorAll('article *')]
        .filter(node => node.getClientRects().length && !node.closest('mjx-assistive-mml')
            && node.getBoundingClientRect().right > edge + 1 && !inBox(node))
        .map(node => `${node.tagName}: ${(node.innerText ?? '').slice(0, 60)}`)
        .concat(document.documentElement.scrollWidth > edge ? ['the page'] : []);
}"""


# Of each text in an output that stands on a colour of its own or on the page's: its contrast.
CONTRASTS = """selector => {
    const channels = text => {
        const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
        return [r, g, b, a];
    };
    const over = ([r, g, b, a], ground) => [r, g, b].map((c, i) => a * c + (1 - a) * ground[i]);
    const light = rgb => rgb.map(c => c / 255)
        .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const ground = node => node
        ? over(channels(getComputedStyle(node).backgroundColor), ground(node.parentElement))
        : [255, 255, 255];
    return [...document.querySelectorAll(selector)].map(node => {
        const below = ground(node), ink = over(channels(getComputedStyle(node).color), below);
        const [dark, bright] = [light(below), light(ink)].sort((a, b) => a - b);
        return [(bright + 0.05) / (dark + 0.05), node.innerText.slice(0, 40)];
    });
}"""


IS_LIGHT = "is => document.documentElement.dataset.jpThemeLight === is"  # static/theme.js tells


CUT = """() => [...document.querySelectorAll('.cell_output pre')]
    .filter(block => block.scrollWidth > block.clientWidth + 1
        && !block.closest('.columns')).map(block => block.innerText.slice(0, 60))"""


def test_every_page_on_a_phone_without_a_network(book, server, browser):
    """Nothing is wider than the page, formulas are set, what is printed wraps and can be read."""
    found, seen = {}, {"light": 0, "dark": 0}
    with reader(browser, server, 400, "light") as (tab, wrong):
        for name in PAGES:
            tab.emulate_media(color_scheme="light")
            tab.goto(server + name)
            if page(book / name).select(".math"):
                tab.wait_for_selector("mjx-container", timeout=60_000)
                assert tab.evaluate(
                    "document.fonts.ready.then(fonts => [...fonts].some(font =>"
                    " font.family.startsWith('MJX') && font.status === 'loaded'))"), name
            found[name] = tab.evaluate(OVERFLOWING) + tab.evaluate(CUT)
            for theme in seen:
                tab.emulate_media(color_scheme=theme)
                tab.wait_for_function(IS_LIGHT, arg=str(theme == "light").lower())
                contrasts = tab.evaluate(CONTRASTS, ".cell_output pre, .cell_output "
                                                    "span[style*='color:#']")
                seen[theme] += len(contrasts)
                found[name] += [each for each in contrasts if each[0] < 4.5]
        assert not wrong and min(seen.values()) > 100
        assert not {name: all for name, all in found.items() if all}


def test_the_theme_can_be_chosen_and_drawings_follow(server, browser):
    ground = "() => getComputedStyle(document.body).backgroundColor"
    scheme = "() => getComputedStyle(document.querySelector('article img')).colorScheme"
    with reader(browser, server, 1280, "dark") as (tab, wrong):
        tab.goto(f"{server}book/index.html")
        seen = {}
        for _ in range(3):  # auto, light, dark, in whatever order
            seen[tab.evaluate("document.body.dataset.theme")] = (
                tab.evaluate(ground), tab.evaluate(scheme))
            tab.locator(".theme-toggle:visible").first.click()
        assert seen["auto"] == seen["dark"] != seen["light"]
        assert seen["dark"][1] == "dark" and seen["light"][1] == "light" and not wrong


def test_search_finds_a_chapter_by_what_it_says(server, browser):
    with reader(browser, server, 1280, "light") as (tab, wrong):
        tab.goto(f"{server}03_all_reduce.html")
        tab.locator("input.sidebar-search").fill("straggler")
        tab.keyboard.press("Enter")
        found = tab.locator("ul.search li a").first
        found.wait_for()
        found.click()
        tab.wait_for_load_state()
        assert "straggler" in tab.locator("article").inner_text().lower() and not wrong


def test_plots_are_dark_on_a_dark_page(server, browser):
    shades = []
    for theme in ("light", "dark"):
        with reader(browser, server, 1280, theme) as (tab, _):
            tab.goto(f"{server}06_where_the_time_goes.html")
            plot = tab.locator(".cell_output img").first
            plot.scroll_into_view_if_needed()
            tab.wait_for_function("image => image.complete", arg=plot.element_handle())
            with Image.open(io.BytesIO(plot.screenshot())) as picture:
                shades.append(ImageStat.Stat(picture.convert("L")).median[0])
    assert shades[0] > 230 and shades[1] < 60


def test_commands_can_be_copied(browser, server):
    with reader(browser, server, 400, "light") as (tab, _):
        tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
        tab.goto(f"{server}book/setup.html")
        tab.locator("button.copy").first.click()
        tab.locator("button.copy", has_text="Copied").wait_for()
        copied = tab.evaluate("navigator.clipboard.readText()")
        assert copied == f"git clone {REPOSITORY} dplab && cd dplab"
