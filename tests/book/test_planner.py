"""The planner's page in a real browser: the folder that `bundle` writes, in a page of nothing else.

The built book would do as well, but it takes longer to make; the theme around the page is left out.
"""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

import pytest
from jupyter import chromium
from skips import need_program
from web_server import served

from dplab.predict import fields, plan
from dplab.predict.choose import CHOICES

pytestmark = pytest.mark.slow

BOOK = Path(__file__).resolve().parents[2] / "chapters" / "book"
AROUND = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Planner</title>
<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,"></head>
<body data-theme="light"><main>{}</main></body></html>"""
TIMEOUT = 120_000  # ms; on two busy cores Python may take long to start
COPIED = "document.activeElement.textContent === 'Copied'"

# Of each family, strategy and precision; then what an address may have wrong.
RIGHT = ["", "gpu=A100&gpus=8&strategy=DDP&model=GPT-2", "model=Llama-3.1+405B&gpus=1024",
         "model=custom&layers=12&d_model=1024&heads=16&d_ff=4096&sequence=1024&compile=no",
         "gpus=1&model=GPT-2&global_batch=5e5", "strategy=HSDP&gpus=256&per_node=16&nics=1",
         "recompute=full&sequence=1000&price=2.5", "strategy=ZeRO-1&batch=2"]
BAD = ["model=custom&heads=30", "gpus=", "who=me", "gpus=8&gpus=16", "model=GPT-2&layers=3",
       "model=%3Cscript%3Ealert(1)%3C%2Fscript%3E", "gpus=%FF"]
WRONG = "gpus=128&heads=30&model=custom&%3Ci%3Ewho=me"


def answer(query="", part="all"):
    return json.loads(plan.answer(query, part))


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A function that opens the page, on a server of its own, at a query in a new tab."""
    need_program("npm")
    runpy.run_path(str(BOOK / "build.py"))["install_packages"]()
    folder = tmp_path_factory.mktemp("site")
    bundle = runpy.run_path(str(BOOK / "planner/bundle.py"))["bundle"]
    bundle(folder / "planner", BOOK / "node_modules")
    (folder / "planner.html").write_text(
        AROUND.format((folder / "planner" / "fragment.html").read_text()))
    with served(folder) as site, chromium() as browser:
        yield lambda *query, **options: Page(browser, site, *query, **options)


class Page:
    """The planner in a tab, with all that went wrong in ``wrong``, requests to others too."""

    def __init__(self, browser, site, query="", lost=None, **options):
        """lost: the name of a file that the server has lost."""
        self.wrong = []
        context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
        context.set_default_timeout(TIMEOUT)
        self.tab = context.new_page()
        self.tab.on("request", lambda asked: asked.url.startswith((site, "data:"))
                    or self.wrong.append(asked.url))
        self.tab.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.tab.on("console", lambda message: message.type in ("error", "warning")
                    and self.wrong.append(message.text))
        if lost:
            self.tab.route(f"**/{lost}", lambda route: route.abort())
        self.tab.goto(f"{site}planner.html{query and '?'}{query}")

    def wait(self, state):
        """Until the page has said that it is in this state."""
        self.tab.wait_for_function(
            "state => document.getElementById('planner-state').dataset.state === state", arg=state)
        return self

    def plan(self, **expected):
        """Waits for the plan and the advice of the default query, changed by these fields."""
        found = answer(urlencode(expected))
        self.tab.evaluate("for (const fold of document.querySelectorAll('.plan details')) "
                          "fold.open = true")
        self.tab.wait_for_function(
            """([title, advice]) =>
                document.getElementById('plan-title').textContent.includes(title)
                && document.querySelector('[data-section=recommendation]').textContent
                    .includes(advice)""",
            arg=[found["plan"]["title"], found["recommendation"]["advice"][0]])
        return found["plan"]

    def reset(self):
        """The default plan, whatever was typed before; waits until all is asked and drawn."""
        self.tab.click("button[type=reset]")
        self.wait("live").plan()
        self.tab.evaluate("""async () => {
            for (const _ of [1, 2]) await document.getElementById('planner').answer('', 'plan');
        }""")
        return self

    def text(self, selector):
        return self.tab.locator(selector).inner_text()

    def value(self, field):
        return self.tab.locator(f"#field-{field}").input_value()

    def is_stale(self):
        return "stale" in self.tab.locator("#planner").get_attribute("class")

    def press_tab_until(self, name):
        """Until that element has the focus."""
        for _ in range(60):
            if self.tab.evaluate("document.activeElement.id") == name:
                return
            self.tab.keyboard.press("Tab")
        raise AssertionError(f"no Tab leads to {name}")

    def copy(self, button):
        """What the button of this id copies, pressed by keyboard."""
        self.press_tab_until(button)
        self.tab.keyboard.press("Enter")
        self.tab.wait_for_function(COPIED)
        return self.tab.evaluate("navigator.clipboard.readText()")

    def given(self):
        """The address's query, as a dict."""
        return dict(parse_qsl(self.tab.url.partition("?")[2], keep_blank_values=True))


@pytest.fixture(scope="module")
def loaded(opened):
    """One load for most tests: it begins with an address in which two things are wrong."""
    page = opened(WRONG, permissions=["clipboard-read", "clipboard-write"]).wait("error")
    yield page
    assert not page.wrong


@pytest.fixture
def live(loaded):
    """The same tab at the default plan."""
    return loaded.reset()


def test_a_bad_address_shows_each_error_at_its_field_until_it_is_right(loaded):
    """First of those that share the load, whose address it asks about."""
    errors = {error["field"]: error["why"] for error in answer(WRONG)["errors"]}
    assert set(errors) == {"heads", "<i>who"}
    assert loaded.text("#why-heads") == errors["heads"]
    assert errors["<i>who"] in loaded.text("#planner-errors")
    heads = loaded.tab.locator("#field-heads")
    assert heads.get_attribute("aria-invalid") == "true"
    assert "why-heads" in heads.get_attribute("aria-describedby").split()
    assert (loaded.value("heads"), loaded.value("gpus")) == ("30", "128")
    assert answer()["plan"]["title"] in loaded.text("#plan-title")  # not that of the address
    assert loaded.given() == {"gpus": "128", "heads": "30", "model": "custom", "<i>who": "me"}
    assert loaded.is_stale()
    loaded.reset()
    loaded.tab.select_option("#field-model", "custom")
    for heads in ("30", "64"):
        loaded.tab.fill("#field-heads", heads)
        loaded.wait("error" if heads == "30" else "live")
    loaded.plan(model="custom", heads=64)
    loaded.tab.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    for width in (400, 1280):  # nothing is wider than the page
        loaded.tab.set_viewport_size({"width": width, "height": 900})
        assert loaded.tab.evaluate("document.documentElement.scrollWidth") == width
    assert not loaded.tab.locator(
        "[aria-invalid], .why:visible, #planner-errors:visible").count()
    assert loaded.given() == {"model": "custom", "heads": "64"} and not loaded.is_stale()


def test_the_keyboard_alone_changes_the_plan_and_copies_it(live):
    live.tab.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    in_a_terminal = subprocess.run(
        [sys.executable, "-m", "dplab", "plan", "--json",
         f"{live.copy('copy-link')}#furo-main-content"],
        cwd=BOOK.parents[1], capture_output=True, text=True)
    assert json.loads(in_a_terminal.stdout) == answer()
    live.tab.select_option("#field-gpu", "A100")
    live.plan(gpu="A100")
    for name, value in answer("gpu=A100")["fields"].items():  # defaults follow what they hang on
        assert value in (True, False) or live.value(name) == fields.BY_NAME[name].text_of(value)
    assert live.given() == {"gpu": "A100"}
    live.tab.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    live.press_tab_until("field-strategy")
    live.tab.keyboard.press("ArrowDown")
    strategy = next(iter(CHOICES))  # the one below "recommended"
    plan_of_it = live.plan(gpu="A100", strategy=strategy)
    live.tab.wait_for_function(
        "said => document.getElementById('planner-said').textContent.includes(said)", arg=strategy)
    outline = live.tab.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"  # the focus can be seen
    assert live.copy("copy-link") == live.tab.url
    assert live.copy("copy-torch") == plan_of_it["launch"]["torch"]


def test_newer_input_overtakes_older(live):
    """Of twenty values in a row, the engine is asked for the first, the last, and its advice."""
    live.tab.evaluate("""() => {
        window.sent = 0;
        const post = Worker.prototype.postMessage;
        Worker.prototype.postMessage = function (...all) { sent += 1; post.apply(this, all); };
        const input = document.getElementById('field-global_batch');
        for (let batch = 1; batch <= 20; batch++) {
            input.value = batch * 64 * 8192;
            input.dispatchEvent(new Event('input', {bubbles: true}));
        }
    }""")
    live.plan(global_batch=20 * 64 * 8192)
    assert live.tab.evaluate("sent") == 3


def test_page_and_package_agree_on_addresses(live):
    """The answers of the page's own worker, as JSON, with each digit."""
    queries = [*RIGHT, *BAD]
    live.tab.evaluate("""queries => { window.answers = Promise.all(
        queries.map(query => document.getElementById('planner').answer(query))); }""", queries)
    expected = {query: answer(query) for query in queries}  # while the page computes the same
    found = dict(zip(queries, map(json.loads, live.tab.evaluate("answers")), strict=True))
    assert [query for query in queries if found[query] != expected[query]] == []
    assert [query for query in queries if found[query]["errors"]] == BAD


def test_a_shared_address_gives_its_plan(opened):
    page = opened("model=Llama-3+70B&gpus=512&strategy=HSDP")
    assert page.value("gpus") == "512"  # before Python has started
    found = page.wait("live").plan(model="Llama-3 70B", gpus=512, strategy="HSDP")
    assert found["strategy"] == "HSDP"
    assert page.given() == {"model": "Llama-3 70B", "gpus": "512", "strategy": "HSDP"}
    assert not page.wrong


@pytest.mark.parametrize("options", [{"java_script_enabled": False}, {"lost": "predict.zip"}],
                         ids=["without JavaScript", "without Python"])
def test_the_stored_plan_stands_and_says_what_to_do(opened, options):
    page = opened("gpus=8", **options)
    if "lost" in options:
        page.wait("failed")
    found = answer()
    assert found["plan"]["title"] in page.text("#plan-title")
    assert found["plan"]["launch"]["torchrun"] in page.tab.locator("#code-torchrun").text_content()
    assert "dplab plan" in page.text("#planner-state")
    assert page.tab.locator("#field-gpus").is_disabled()
