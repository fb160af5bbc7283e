"""The pages in a real Chromium: they work by mouse and keyboard, fit every width, and show hostile text as text.

Needs `chromium` on PATH and the package playwright. The accessibility check needs axe-core, a file named by DISCERN_AXE:
`npm pack axe-core` and unpack `axe.min.js`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from discern.report.page import render_page
from discern.serve.model import ServedModel, load_served
from discern.serve.watch import RunsWatcher, watch_page
from discern.storage.checksums import write_recorded
from tests.report.test_detection_page import judged, rendered
from tests.report.test_page import full_page
from tests.serve.conftest import Running, running, wait_until
from tests.small.run import make_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
sync_api = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on PATH; Debian: apt-get install chromium")

WIDTHS = (360, 1280, 2560)
HOSTILE = '<img src=x onerror="window.broken=1"> \x1b[31m </script><script>window.broken=1</script>'


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = tmp_path_factory.mktemp("browser") / "run"
    make_run(folder)
    return load_served(folder, device="cpu", warn=lambda message: None)


@pytest.fixture(scope="module")
def server(served: ServedModel) -> Iterator[Running]:
    with running([served, served]) as found:
        yield found


@pytest.fixture
def page(browser: Any, server: Running) -> Iterator[Any]:
    with opened(browser, f"http://127.0.0.1:{server.port}/") as found:
        found.wait_for_selector("#check .token")
        yield found


@contextlib.contextmanager
def opened(browser: Any, address: str, **options: Any) -> Iterator[Any]:
    """A page without errors, and without a request to anywhere else."""
    context = browser.new_context(**options)
    found = context.new_page()
    problems: list[str] = []
    found.on("pageerror", lambda error: problems.append(str(error)))
    found.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    found.on("request", lambda asked: problems.append(asked.url) if not asked.url.startswith(address.partition("#")[0]) else None)
    found.goto(address)
    yield found
    context.close()
    assert not problems


def until(page: Any, condition: str) -> None:
    """Wait for a condition. Playwright's own waiting evaluates strings in the page, which its policy forbids."""
    assert wait_until(lambda: page.evaluate(condition)), condition


def test_words_are_shaded_while_one_types_and_a_word_can_be_replaced(page: Any) -> None:
    page.fill("#check-text", "the chef ate")
    until(page, "document.querySelectorAll('#check [data-model=\"0\"] .token').length === 3")
    page.focus("#check-text")
    page.keyboard.press("Control+Home")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#panel .bars button")
    assert page.text_content("#panel .word").strip() == "the"
    put = page.text_content("#panel .bars button >> nth=0")
    page.click("#panel .bars button >> nth=0")
    assert page.input_value("#check-text") == f"{put} chef ate"
    page.wait_for_selector("#panel", state="hidden")


def test_shades_lie_under_their_words(page: Any) -> None:
    page.fill("#check-text", "the chef ate the meal " * 30)
    until(page, "document.querySelectorAll('#check [data-model=\"0\"] .token').length === 150")
    sizes = page.evaluate(
        "['.behind', 'textarea'].map(each => { const box = document.querySelector('#check .editor ' + each);"
        "return [box.clientWidth, getComputedStyle(box).font, getComputedStyle(box).lineHeight] })"
    )
    assert sizes[0] == sizes[1]
    assert page.evaluate("(box => box.scrollHeight <= box.clientHeight)(document.querySelector('#check textarea'))")


def test_every_tab_answers_by_keyboard(page: Any) -> None:
    page.focus("#tab-check")
    for name, expected in (("fill", ".bars"), ("score", ".answer"), ("near", ".bars"), ("predict", "p")):
        page.keyboard.press("ArrowRight")
        assert page.evaluate("location.hash") == f"#{name}"
        page.wait_for_selector(f"#{name} .results .card {expected}")
    said = page.text_content("#predict .results")
    assert "not been fine-tuned" in said or "Not available with this model" in said
    page.evaluate("location.hash = '#score'")
    page.wait_for_selector("#tab-score[aria-selected=true]")


def test_hostile_and_huge_texts_are_text(page: Any) -> None:
    page.fill("#check-text", HOSTILE)
    until(page, "document.querySelector('#check .behind').textContent.includes('onerror')")
    page.click("#tab-fill")
    page.fill("#fill-text", f"{HOSTILE} [MASK]")
    page.wait_for_selector("#fill .bars")
    page.click("#tab-check")
    page.evaluate(
        "(box => { box.value = 'a'.repeat(1e6); box.dispatchEvent(new Event('input')) })(document.querySelector('#check-text'))"
    )
    until(page, "document.querySelector('#check .summary').textContent.startsWith('1,000,000 characters')")
    assert page.evaluate("window.broken") is None


def test_the_page_of_runs_follows_them_and_keeps_the_focus(browser: Any, tmp_path: Path) -> None:
    record = {"step": 1, "tokens": 9, "seconds": 1.0, "tokens_per_second": 9.0, "loss": 2.0}
    make_run(tmp_path / "run", metrics=[record])
    watcher = RunsWatcher([tmp_path / "run"])
    with browser.new_context() as context:
        page = context.new_page()
        page.clock.install()
        page.route("**/*", lambda route: route.fulfill(body=watch_page(watcher), content_type="text/html"))
        page.goto("http://127.0.0.1/")
        page.focus("#over-tokens")
        assert "1 of" in page.text_content(".run")
        write_recorded(tmp_path / "run", {"metrics.jsonl": json.dumps(record | {"step": 7}) + "\n"})
        page.clock.fast_forward(5000)
        assert wait_until(lambda: "7 of" in page.text_content(".run"))
        assert page.evaluate("document.activeElement.id") == "over-tokens"


def test_an_address_with_a_token_in_it_chooses_that_token(browser: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(rendered(judged(HOSTILE, [0.2, 0.9, 0.5, 0.1, 0.1])))
    with opened(browser, f"{page.as_uri()}#t0-1") as found:
        assert found.text_content("#panel [data-part=replaced]") == "0.900, marked"
        assert found.text_content("#panel .bars li >> nth=0") == "</script>50.0%"


@pytest.fixture(scope="module")
def addresses(server: Running, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    report = tmp_path_factory.mktemp("pages") / "report.html"
    report.write_text(render_page(full_page()))
    return {
        "serve": f"http://127.0.0.1:{server.port}/",
        "report": report.as_uri(),
    }


@pytest.mark.parametrize("name", ["serve", "report"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_every_width_in_light_and_dark(browser: Any, addresses: dict[str, str], name: str, scheme: str) -> None:
    context = browser.new_context(color_scheme=scheme)
    page = context.new_page()
    page.goto(addresses[name])
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 26)"
    assert dark == (scheme == "dark")
    context.close()


def test_axe_finds_nothing_serious(browser: Any, addresses: dict[str, str]) -> None:
    axe = os.environ.get("DISCERN_AXE")
    if not axe or not Path(axe).is_file():
        pytest.skip("DISCERN_AXE does not name the file axe.min.js of axe-core")
    for name, address in addresses.items():
        for scheme in ("light", "dark"):
            context = browser.new_context(color_scheme=scheme, bypass_csp=True)
            page = context.new_page()
            page.goto(address)
            page.add_script_tag(path=axe)
            found = page.evaluate("axe.run()")["violations"]
            serious = [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in ("serious", "critical")]
            assert not serious, (name, scheme)
            context.close()
