"""The page in a real Chromium: no errors, filters, details, themes, zoom, keyboard, accessibility, hostile text."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.report.hostile import HOSTILE, hostile_cell
from tests.verdict.sample_cells import good_result, production_incident, with_figures
from tests.verdict.stored_runs import store_run
from toto_compat.evidence.store import load_run
from toto_compat.matrix.gates import Gate
from toto_compat.report.html import render_page
from toto_compat.report.page_data import bundle_name, history_of
from toto_compat.verdict.judged_run import judge_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get update && apt-get install -y chromium"),
]
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")

# no GPU, no background traffic: the page must work without a network, and so must its browser
CHROMIUM_OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_OPTIONS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def report_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three releases on two devices, every verdict, hostile logs, and an earlier run for the history."""
    folder = tmp_path_factory.mktemp("report")
    results = [hostile_cell(), good_result(), production_incident()]
    for torch in ("2.9.0", "2.11.0"):
        for mode in ("default", "reduce-overhead"):
            results.append(production_incident(torch=torch, build="cu128", mode=mode))
            results.append(good_result(torch=torch, build="cu128", mode=mode))
    results.append(with_figures(good_result(torch="2.13.0", build="cu130"), {Gate.MEMORY: None}))
    store_run(folder, "earlier", results, started="2026-10-01T10:00:00Z")
    judged = judge_run(load_run(store_run(folder, "now", results)))
    target = folder / "page.html"
    target.write_text(render_page(judged, history_of(folder, until=judged)), encoding="utf-8")
    return target


class OpenedPage:
    """A page with everything it complained about, and every request it made beyond its own file."""

    def __init__(self, browser: "Browser", report_file: Path, **context: Any) -> None:
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("dialog", self._refuse)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(report_file.as_uri())

    def _refuse(self, dialog: "Dialog") -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def open_cell(self, cache: str) -> None:
        self.page.locator(f"tr[data-cache='{cache}'] button").first.click()
        self.page.locator("dialog[open] h3").first.wait_for()


@pytest.fixture
def opened(browser: "Browser", report_file: Path) -> Iterator[OpenedPage]:
    page = OpenedPage(browser, report_file, viewport={"width": 1280, "height": 900})
    yield page
    assert page.complaints == []
    page.context.close()


def visible_cells(page: "Page") -> int:
    return page.locator("#grid button:visible").count()


def test_the_page_loads_itself_and_nothing_else(opened: OpenedPage, report_file: Path) -> None:
    assert opened.requests == [report_file.as_uri()]
    assert opened.page.locator("h1").inner_text() == "Can torch.compile go back on for Toto?"


def test_the_answer_and_the_settings_are_in_the_first_screen(opened: OpenedPage) -> None:
    card = opened.page.get_by_role("article", name="Decision for CUDA")
    assert "Enable compile" in card.locator("h3").inner_text()
    settings = card.locator("pre").first
    assert "TOTO_COMPILE_MODE=" in settings.inner_text()
    box = settings.bounding_box()
    assert box is not None and box["y"] + box["height"] < 900


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("device", "cpu", 3), ("cache", "list_index", 5), ("mode", "reduce-overhead", 4), ("verdict", "INCONCLUSIVE", 2)],
)
def test_filters_leave_the_cells_that_match(opened: OpenedPage, name: str, value: str, expected: int) -> None:
    assert visible_cells(opened.page) == 12
    opened.page.select_option(f"select[name={name}]", value)
    assert visible_cells(opened.page) == expected
    assert opened.page.locator("#shown").inner_text() == f"{expected} of 12 cells"
    opened.page.get_by_role("button", name="Show all").click()
    opened.page.get_by_text("12 of 12 cells").wait_for()
    assert visible_cells(opened.page) == 12


def test_filters_that_match_nothing_say_so(opened: OpenedPage) -> None:
    opened.page.select_option("select[name=cache]", "list_index")
    opened.page.select_option("select[name=verdict]", "PASS")
    assert visible_cells(opened.page) == 0
    assert opened.page.locator("#nothing").is_visible()


def test_a_cell_opens_to_gates_plots_reasons_and_its_command(opened: OpenedPage) -> None:
    opened.open_cell("list_index")
    text = opened.page.locator("dialog").inner_text()
    for part in (
        "recompile_limit",
        "Recompiles: 8",
        "toto/model/attention.py:105",
        "kv_cache._current_idx[N] == N",
        "Graph breaks: 132",
        "CUDA graphs skipped",
        "toto-compat matrix 'torch-2.13.0-cpu/list_index/default'",
        "Provenance",
        "History over runs",
    ):
        assert part in text, part
    assert opened.page.locator("dialog figure svg path.series-compiled").count() == 3
    # placeholders of the axes were replaced by numbers
    assert "x0" not in opened.page.locator("dialog figure").first.inner_text().split()
    opened.page.keyboard.press("Escape")
    assert not opened.page.locator("dialog[open]").count()


def test_a_bundle_beside_the_page_is_a_link_and_one_that_is_not_made_yet_a_command(
    browser: "Browser", tmp_path: Path
) -> None:
    results = [production_incident(), production_incident(torch="2.9.0", build="cu128")]
    folder = store_run(tmp_path, "now", results)
    (folder / bundle_name(results[0].cell)).touch()
    target = folder / "page.html"
    target.write_text(render_page(judge_run(load_run(folder)), {}), encoding="utf-8")
    opened = OpenedPage(browser, target)
    opened.open_cell("list_index")
    link = opened.page.locator("dialog a[href$='.bundle.zip']")
    assert link.inner_text() == link.get_attribute("href") == bundle_name(results[0].cell)
    assert "toto-compat repro" not in opened.page.locator("dialog").inner_text()
    opened.page.keyboard.press("Escape")
    opened.page.locator("tr[data-cache='list_index'] button").nth(1).click()
    opened.page.locator("dialog[open] h3").first.wait_for()
    assert link.count() == 0
    assert f"toto-compat repro now {results[1].cell} -o" in opened.page.locator("dialog").inner_text()
    assert opened.complaints == []
    opened.context.close()


def test_predicted_figures_look_different_from_measured_ones(opened: OpenedPage) -> None:
    opened.open_cell("list_index")
    predicted = opened.page.locator("dialog .predicted")
    assert "predicted" in predicted.first.inner_text()
    assert predicted.first.evaluate("node => getComputedStyle(node).borderTopStyle") == "dashed"


def test_hostile_text_is_shown_as_text_and_runs_nothing(opened: OpenedPage) -> None:
    opened.open_cell("upstream")
    assert "<img src=x onerror=" in opened.page.locator("dialog").inner_text()
    assert opened.page.locator("img").count() == 0
    assert "{{ 7 * 7 }}" in HOSTILE and "{{ 7 * 7 }}" in opened.page.locator("dialog").inner_text()


def test_the_system_theme_is_followed_and_the_button_changes_it(browser: "Browser", report_file: Path) -> None:
    opened = OpenedPage(browser, report_file, color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = opened.page.evaluate(background)
    assert max(int(part) for part in dark.removeprefix("rgb(").removesuffix(")").split(",")) < 64
    opened.page.get_by_role("button", name="Light theme").click()
    assert opened.page.evaluate(background) == "rgb(255, 255, 255)"
    opened.context.close()


@pytest.mark.parametrize(("width", "height"), [(640, 450), (360, 740)], ids=["zoom of 200 %", "phone"])
def test_small_screens_have_no_sideways_scroll(browser: "Browser", report_file: Path, width: int, height: int) -> None:
    # a zoom of 200 % on a screen of 1280 x 900 is a viewport of 640 x 450 at twice the density
    viewport = {"width": width, "height": height}
    opened = OpenedPage(browser, report_file, viewport=viewport, device_scale_factor=2)
    fits = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    assert opened.page.evaluate(fits)
    opened.open_cell("list_index")
    assert opened.page.evaluate("(d => d.scrollWidth <= d.clientWidth)(document.querySelector('dialog'))")
    opened.context.close()


def test_the_grid_is_usable_with_the_keyboard_alone(opened: OpenedPage) -> None:
    page = opened.page
    first = page.locator("#grid button").first
    first.focus()
    page.keyboard.press("ArrowDown")
    name = page.evaluate("document.activeElement.closest('tr').dataset.cache")
    assert name == page.locator("#grid tbody tr").nth(1).get_attribute("data-cache")
    page.keyboard.press("Enter")
    page.locator("dialog[open]").wait_for()
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.tagName") == "BUTTON"


def test_a_link_to_a_cell_opens_it(browser: "Browser", report_file: Path) -> None:
    page = browser.new_page()
    page.goto(report_file.as_uri() + "#cell-1")
    page.locator("dialog[open]").wait_for()
    page.close()


def test_every_cell_of_a_large_run_opens_as_itself(browser: "Browser", tmp_path: Path) -> None:
    """More cells than go into one pack: the first and the last of each."""
    judged = judge_run(load_run(store_run(tmp_path, "run", [good_result(settings_name=f"s{n}") for n in range(120)])))
    target = tmp_path / "page.html"
    target.write_text(render_page(judged, {}), encoding="utf-8")
    opened = OpenedPage(browser, target)
    for number in (0, 49, 50, 99, 100, 119):
        opened.page.locator(f"button[data-cell='{number}']").click()
        opened.page.locator("dialog[open]").wait_for()
        assert opened.page.locator("#details-name").inner_text() == judged.cells[number].result.cell
        opened.page.keyboard.press("Escape")
    assert not opened.complaints
    opened.context.close()


def test_print_leaves_out_what_paper_can_not_do(opened: OpenedPage) -> None:
    opened.page.emulate_media(media="print")
    assert not opened.page.locator("#filters").is_visible()
    assert opened.page.locator("#grid").is_visible()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("with_cell", [False, True], ids=["page", "cell"])
def test_axe_finds_no_serious_fault(browser: "Browser", report_file: Path, theme: str, with_cell: bool) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python")
    opened = OpenedPage(browser, report_file, color_scheme=theme, viewport={"width": 1280, "height": 900})
    if with_cell:
        opened.open_cell("list_index")
    found = axe.Axe().run(opened.page).response["violations"]
    serious = [
        f"{fault['id']}: {fault['nodes'][0]['html'][:120]}"
        for fault in found
        if fault["impact"] in ("serious", "critical")
    ]
    assert serious == []
    opened.context.close()
