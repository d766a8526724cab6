"""The planner's page in a real browser: the folder that `bundle` writes, in a page of nothing else.

The built book would do as well, but it takes longer to make; the theme around the page is left out.
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
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
NODE_MODULES = BOOK / "node_modules"
AROUND = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Planner</title>
<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,"></head>
<body data-theme="light"><main>{}</main></body></html>"""
TIMEOUT = 120_000  # ms; on two busy cores Python may take long to start

# Of each family, strategy and precision; then what an address may have wrong.
RIGHT = ["", "gpu=A100&gpus=8&strategy=DDP&model=GPT-2", "model=Llama-3.1+405B&gpus=1024",
         "model=custom&layers=12&d_model=1024&heads=16&d_ff=4096&sequence=1024&compile=no",
         "gpus=1&model=GPT-2&global_batch=5e5", "strategy=HSDP&gpus=256&per_node=16&nics=1",
         "recompute=full&sequence=1000&price=2.5", "strategy=ZeRO-1&batch=2"]
BAD = ["model=custom&heads=30", "gpus=1000000000", "gpus=12", "gpus=", "who=me", "gpus=8&gpus=16",
       "model=GPT-2&layers=3", "model=%3Cscript%3Ealert(1)%3C%2Fscript%3E", "gpus=%FF"]
WRONG = "gpus=128&heads=30&model=custom&%3Ci%3Ewho=me"


@functools.cache
def script(path):
    """A script of the book, which is in no package, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bundler():
    return script(BOOK / "planner" / "bundle.py")


def answer(query="", part="all"):
    return json.loads(plan.answer(query, part))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of the page, on a server of its own."""
    need_program("npm")
    script(BOOK / "build.py").install_packages()
    folder = tmp_path_factory.mktemp("site")
    bundler().bundle(folder / "planner", NODE_MODULES)
    (folder / "planner.html").write_text(
        AROUND.format((folder / "planner" / "fragment.html").read_text()))
    with served(folder) as address:
        yield f"{address}planner.html"


class Page:
    """The planner in a tab, with all that went wrong in ``wrong`` and what it asked of others."""

    def __init__(self, browser, site, query="", **options):
        self.wrong, self.foreign, self.site = [], [], site
        context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
        context.set_default_timeout(TIMEOUT)
        context.route("**/*", self._local)
        self.tab = context.new_page()
        self.tab.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.tab.on("console", lambda message: message.type in ("error", "warning")
                    and self.wrong.append(message.text))
        self.open = lambda query: self.tab.goto(f"{site}{query and '?'}{query}")

    def _local(self, route):
        if route.request.url.startswith((self.site.rpartition("/")[0], "data:")):
            return route.continue_()
        self.foreign.append(route.request.url)
        return route.abort()

    def wait(self, *states):
        """Until the page has said that it is in one of these states."""
        self.tab.wait_for_function(
            "states => states.includes(document.getElementById('planner-state').dataset.state)",
            arg=states)
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

    def settle(self):
        """Waits until the page has asked and drawn all that it wants."""
        self.tab.evaluate("""async () => {
            for (const _ of [1, 2]) await document.getElementById('planner').answer('', 'plan');
        }""")
        return self

    def reset(self):
        """The default plan, whatever was typed before."""
        self.tab.click("button[type=reset]")
        self.wait("live").plan()
        return self.settle()

    def text(self, selector):
        return self.tab.locator(selector).inner_text()

    def focused(self):
        return self.tab.evaluate("document.activeElement.id")

    def tab_to(self, name):
        """Presses Tab until that element has the focus."""
        for _ in range(60):
            if self.focused() == name:
                return
            self.tab.keyboard.press("Tab")
        raise AssertionError(f"no Tab leads to {name}")

    def given(self):
        """The address's query, as a dict."""
        return dict(parse_qsl(self.tab.url.partition("?")[2], keep_blank_values=True))


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def loaded(browser, site):
    """One load for most tests: it begins with an address in which two things are wrong."""
    page = Page(browser, site, permissions=["clipboard-read", "clipboard-write"])
    page.open(WRONG)
    return page.wait("error")


@pytest.fixture
def live(loaded):
    """The same tab at the default plan."""
    return loaded.reset()


def test_a_bad_address_shows_each_error_at_its_field_and_the_stored_plan_stays(loaded):
    """First of those that share the load, whose address it asks about."""
    live = loaded
    errors = {error["field"]: error["why"]
              for error in answer(WRONG)["errors"]}
    assert set(errors) == {"heads", "<i>who"}
    assert live.text("#why-heads") == errors["heads"]
    assert errors["<i>who"] in live.text("#planner-errors")
    heads = live.tab.locator("#field-heads")
    assert heads.input_value() == "30"
    assert heads.get_attribute("aria-invalid") == "true"
    assert "why-heads" in heads.get_attribute("aria-describedby").split()
    assert live.tab.locator("#field-gpus").input_value() == "128"
    assert answer()["plan"]["title"] in live.text("#plan-title")  # not that of the address
    assert live.given() == {"gpus": "128", "heads": "30", "model": "custom",
                            "<i>who": "me"}
    assert "stale" in live.tab.locator("#planner").get_attribute("class")


def test_a_right_value_takes_the_error_away_and_gives_the_plan(live):
    live.tab.select_option("#field-model", "custom")
    live.tab.fill("#field-gpus", "128")
    before = live.settle().text("#plan-title")
    live.tab.fill("#field-heads", "30")
    live.wait("error")
    assert live.text("#why-heads") and live.text("#plan-title") == before
    live.tab.fill("#field-heads", "64")
    live.wait("live").plan(model="custom", heads=64, gpus=128)
    assert not live.tab.locator("[aria-invalid], .why:visible, #planner-errors:visible").count()
    assert live.given() == {"model": "custom", "heads": "64", "gpus": "128"}


def test_defaults_follow_the_field_that_they_depend_on(live):
    live.tab.select_option("#field-gpu", "A100")
    live.plan(gpu="A100")
    for name, value in answer("gpu=A100")["fields"].items():
        assert live.tab.locator(f"#field-{name}").input_value() == (
            fields.BY_NAME[name].text_of(value)) or value in (True, False)
    assert live.given() == {"gpu": "A100"}


def test_the_keyboard_alone_changes_the_plan_and_copies_it(live):
    live.tab.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    live.tab_to("copy-link")
    live.tab.keyboard.press("Enter")
    live.tab.wait_for_function("document.activeElement.textContent === 'Copied'")
    default = live.tab.evaluate("navigator.clipboard.readText()")
    in_a_terminal = subprocess.run(
        [sys.executable, "-m", "dplab", "plan", "--json", f"{default}#furo-main-content"],
        cwd=BOOK.parents[1], capture_output=True, text=True)
    assert json.loads(in_a_terminal.stdout) == answer()
    live.tab.select_option("#field-gpu", "A100")
    live.plan(gpu="A100")
    live.tab.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    live.tab_to("field-strategy")
    live.tab.keyboard.press("ArrowDown")
    strategy = next(iter(CHOICES))  # the one below "recommended"
    live.plan(gpu="A100", strategy=strategy)
    live.tab.wait_for_function(
        "said => document.getElementById('planner-said').textContent.includes(said)", arg=strategy)
    outline = live.tab.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"  # the focus can be seen
    live.tab_to("copy-link")
    live.tab.keyboard.press("Enter")
    live.tab.wait_for_function("document.activeElement.textContent === 'Copied'")
    assert live.tab.evaluate("navigator.clipboard.readText()") == live.tab.url
    live.tab_to("copy-torch")
    live.tab.keyboard.press("Enter")
    live.tab.wait_for_function("document.activeElement.textContent === 'Copied'")
    copied = live.tab.evaluate("navigator.clipboard.readText()")
    assert copied == answer(urlencode(live.given()))["plan"]["launch"]["torch"]


def test_newer_input_overtakes_older(live):
    sent = live.tab.evaluate("""() => {
        let sent = 0;
        const post = Worker.prototype.postMessage;
        Worker.prototype.postMessage = function (...all) { sent += 1; post.apply(this, all); };
        const input = document.getElementById('field-global_batch');
        for (let batch = 1; batch <= 20; batch++) {
            input.value = batch * 64 * 8192;
            input.dispatchEvent(new Event('input', {bubbles: true}));
        }
        window.sentNow = () => { Worker.prototype.postMessage = post; return sent; };
        return sent;
    }""")
    live.plan(global_batch=20 * 64 * 8192)
    assert sent == 1
    assert live.tab.evaluate("sentNow()") == 3  # the first plan, the last, and its advice


def test_a_plan_to_which_the_engine_gives_no_answer_is_marked_as_old(live):
    live.tab.evaluate("""() => {
        const post = Worker.prototype.postMessage;
        Worker.prototype.postMessage = function ({ id }) {
            Worker.prototype.postMessage = post;
            this.onmessage({ data: { id, error: "no answer" } });
        };
    }""")
    live.tab.fill("#field-gpus", "8")
    live.wait("failed")
    assert "stale" in live.tab.locator("#planner").get_attribute("class")
    live.tab.fill("#field-gpus", "16")
    live.wait("live").plan(gpus=16)
    assert "stale" not in live.tab.locator("#planner").get_attribute("class")
    live.wrong.clear()


def test_page_and_package_agree_on_addresses(live):
    """The answers of the page's own worker, as JSON, with each digit."""
    queries = [*RIGHT, *BAD]
    live.tab.evaluate("""queries => { window.answers = Promise.all(
        queries.map(query => document.getElementById('planner').answer(query))); }""", queries)
    expected = [answer(query) for query in queries]  # while the page computes the same
    found = [json.loads(text) for text in live.tab.evaluate("answers")]
    different = [query for query, one, other in zip(queries, expected, found, strict=True)
                 if one != other]
    assert not different
    assert [bool(one["errors"]) for one in found] == [query in BAD for query in queries]


def test_nothing_is_wider_than_the_page(live):
    live.tab.select_option("#field-model", "custom")
    live.plan(model="custom")
    live.tab.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    for width in (400, 1280):
        live.tab.set_viewport_size({"width": width, "height": 900})
        assert live.tab.evaluate("document.documentElement.scrollWidth") == width


def test_nothing_was_asked_of_others_and_nothing_went_wrong(loaded):
    """Last of those that share the load."""
    assert not loaded.foreign
    assert not loaded.wrong


def test_a_shared_address_gives_its_plan(browser, site):
    page = Page(browser, site)
    page.open("model=Llama-3+70B&gpus=512&strategy=HSDP")
    assert page.tab.locator("#field-gpus").input_value() == "512"  # before Python has started
    found = page.wait("live").plan(model="Llama-3 70B", gpus=512, strategy="HSDP")
    assert found["strategy"] == "HSDP"
    assert page.given() == {"model": "Llama-3 70B", "gpus": "512", "strategy": "HSDP"}
    assert not page.wrong


def test_without_javascript_the_stored_plan_stands_and_says_what_to_do(browser, site):
    page = Page(browser, site, java_script_enabled=False)
    page.open("")
    found = answer()
    assert found["plan"]["title"] in page.text("#plan-title")
    assert found["recommendation"]["advice"][0] in page.text("[data-section=recommendation]")
    assert found["plan"]["launch"]["torchrun"] in page.tab.locator(
        "#code-torchrun").text_content()  # in a fold, which opens without a script
    assert "dplab plan" in page.text("#planner-state")
    assert page.tab.locator("#field-gpus").is_disabled()


@pytest.mark.parametrize("lost", ["pyodide.asm.wasm", "predict.zip"])
def test_where_python_cannot_start_the_stored_plan_stays_and_says_why(browser, site, lost):
    page = Page(browser, site)
    page.tab.route(f"**/{lost}", lambda route: route.abort())
    page.open("gpus=8")
    page.wait("failed")
    assert "dplab plan" in page.text("#planner-state")
    assert answer()["plan"]["title"] in page.text("#plan-title")
    assert page.tab.locator("#field-gpus").is_disabled()


def test_the_package_for_the_browser_has_no_stray_file_and_any_date(tmp_path, monkeypatch):
    bundle = bundler()
    folder = tmp_path / "dplab" / "predict"
    folder.mkdir(parents=True)
    for path in (folder.parent / "__init__.py", folder.parent / "needs.py", folder / "plan.py",
                 folder / "runs.json", folder / ".plan.py.swp"):
        path.write_text("")
        os.utime(path, (0, 0))  # 1970: before the first date of a zip file
    monkeypatch.setattr(bundle, "ROOT", tmp_path)
    bundle._zip_predict(tmp_path / "predict.zip")
    assert set(zipfile.ZipFile(tmp_path / "predict.zip").namelist()) == {
        "dplab/__init__.py", "dplab/needs.py", "dplab/predict/plan.py", "dplab/predict/runs.json"}
