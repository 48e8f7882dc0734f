"""The page in headless Chromium, with the network off."""

import json
import shutil
import threading

import numpy as np
import pytest

from alasso.bench import metrics, results
from alasso.bench.report import page
from alasso.bench.report.sections import Collected, collect, sections
from alasso.bench.report.watch import Server

from report_helpers import HOSTILE, LOG, made_up, several

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install selenium")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no headless browser here: apt-get install chromium chromium-driver"
)

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

#: Where on the screen a data point lies.
POINT = """
const [chart, key, at] = arguments;
const element = document.querySelector(`[data-chart="${chart}"]`);
const view = Object.values(Bokeh.index).find((each) => element.contains(each.el));
const renderer = view.model.renderers.find((each) => each.tags[2] === key && each.glyph.type === "Scatter");
const box = (view.canvas_view ?? view.canvas).el.getBoundingClientRect();
const { x, mean } = renderer.data_source.data;
const scale = view.frame ?? view;
return [box.x + scale.x_scale.compute(x[at]), box.y + scale.y_scale.compute(mean[at])];
"""
#: Text of the tooltips that are open; they lie inside of shadow roots.
TOOLTIP = """
const inside = (root) => [...root.querySelectorAll("*")].flatMap((each) => [
  ...(each.matches(".bk-tooltip-content") && each.checkVisibility() ? [each.textContent] : []),
  ...(each.shadowRoot ? inside(each.shadowRoot) : []),
]);
return inside(document).join("\\n");
"""
VISIBLE = """
const [chart, key] = arguments;
const element = document.querySelector(`[data-chart="${chart}"]`);
const view = Object.values(Bokeh.index).find((each) => element.contains(each.el));
return view.model.renderers.filter((each) => each.tags[2] === key).map((each) => each.visible);
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}", "--window-size=1200,1000"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a page of these results with the network off, and waits until its charts stand."""

    def open_(found, offline=True, **media):
        file = tmp_path / "report.html"
        file.write_text(page.build(found), encoding="utf-8")
        return ready(browser, file.as_uri(), offline, **media)

    yield open_
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def ready(browser, address, offline=True, width=1200, scheme="light"):
    conditions = {"offline": offline, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    browser.execute_cdp_cmd("Network.enable", {})
    browser.execute_cdp_cmd("Network.emulateNetworkConditions", conditions)
    screen = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get_log("browser")
    browser.get(address)
    wait(browser, "return 'ready' in document.body.dataset")
    return browser


def wait(browser, question, *arguments):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 30, 0.1).until(lambda _: browser.execute_script(question, *arguments))


def complaints(browser):
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def hover(browser, point):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.actions.action_builder import ActionBuilder

    action = ActionBuilder(browser)
    for nudge in (3, 0):
        action.pointer_action.move_to_location(round(point[0]) + nudge, round(point[1]))
    action.perform()
    ActionChains(browser).pause(0.3).perform()


def test_the_page_loads_offline_without_a_complaint(opened):
    browser = opened(Collected(several(), ["x.json is not a whole JSON file"]))
    assert complaints(browser) == []
    charts = browser.execute_script("return document.querySelectorAll('.chart canvas, .chart *').length")
    assert charts > 0
    assert "x.json is not a whole JSON file" in browser.find_element("id", "left-out").text


def test_the_legend_hides_a_line_and_brings_it_back_by_keyboard(opened):
    found = several()
    browser = opened(Collected(found))
    (section,) = sections(found)
    key = section.standard["si"].config.hash
    button = browser.find_element("css selector", f'.key[data-group="{key}"]')
    assert set(browser.execute_script(VISIBLE, "mean-accuracy", key)) == {True}
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    for chart in ("mean-accuracy", "spread", "one-task"):
        assert set(browser.execute_script(VISIBLE, chart, key)) == {False}
    button.send_keys(" ")
    assert set(browser.execute_script(VISIBLE, "mean-accuracy", key)) == {True}
    browser.execute_script("sessionStorage.clear()")


def test_hovering_shows_method_task_and_the_number_of_the_json(opened, tmp_path):
    files = [
        results.write(result, tmp_path / "r") for result in (made_up("si", 0), made_up("si", 1), made_up("sgd", 0))
    ]
    browser = opened(collect([tmp_path / "r"]))
    rows = [json.loads(file.read_text())["accuracy"] for file in files[:2]]
    expected = np.mean([metrics.accuracy_curve(accuracy)[3] for accuracy in rows])
    key = made_up("si").config.hash
    browser.execute_script("document.querySelector('[data-chart]').scrollIntoView({block: 'center'})")
    hover(browser, browser.execute_script(POINT, "mean-accuracy", key, 3))
    shown = wait(browser, TOOLTIP)
    assert "SI" in shown and f"{expected:.4f}" in shown and "4" in shown


def test_the_table_sorts_both_ways(opened):
    browser = opened(Collected(several()))

    def column():
        cells = browser.find_elements("css selector", "table.sortable tbody tr td:nth-of-type(1)")
        return [float(cell.get_attribute("data-value")) for cell in cells]

    head = browser.find_element("css selector", "table.sortable thead th:nth-of-type(2)")
    for order, descending in (("descending", True), ("ascending", False)):
        head.find_element("tag name", "button").click()
        assert head.get_attribute("aria-sort") == order
        assert column() == sorted(column(), reverse=descending)


def test_the_slider_and_the_choice_of_a_matrix_fill_in_their_charts(opened):
    browser = opened(Collected([made_up("si"), made_up("sgd", fading=0.1)]))
    browser.execute_script(
        "const s = document.querySelector('.task-slider'); s.value = 3; s.dispatchEvent(new Event('input'));"
        "const g = document.querySelector('.group-select'); g.value = arguments[0];"
        "g.dispatchEvent(new Event('change'));",
        made_up("sgd").config.hash,
    )
    data = """
    const element = document.querySelector(`[data-chart="${arguments[0]}"]`);
    const view = Object.values(Bokeh.index).find((each) => element.contains(each.el));
    return [...view.model.renderers[0].data_source.data[arguments[1]]];
    """
    third = browser.execute_script(data, "one-task", "mean")
    assert third[:2] == [None, None]
    assert third[2:] == pytest.approx([row[2] for row in made_up("si").accuracy[2:]], abs=1e-4)
    cells = browser.execute_script(data, "matrix", "value")
    assert cells == pytest.approx([value for row in made_up("sgd", fading=0.1).accuracy for value in row], abs=1e-4)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_at_phone_width_nothing_scrolls_sideways(opened, scheme):
    long = "images/" + "verylongname" * 12
    found = [*several(), made_up(model="own:" + "x" * 80), made_up("si", environment={"cpu": long})]
    browser = opened(Collected(found, [long + ".json is not a whole JSON file"]), width=380, scheme=scheme)
    browser.execute_script("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    wide, screen = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert wide <= screen == 380
    assert complaints(browser) == []


def test_dark_mode_changes_paper_and_lines(opened):
    colours = """
    const element = document.querySelector('[data-chart="mean-accuracy"]');
    const view = Object.values(Bokeh.index).find((each) => element.contains(each.el));
    return [getComputedStyle(document.body).backgroundColor, view.model.renderers.at(-1).glyph.line_color.value];
    """
    found = Collected([made_up("si")])
    light = opened(found).execute_script(colours)
    dark = opened(found, scheme="dark").execute_script(colours)
    assert light[0] == "rgb(255, 255, 255)" and dark[0] != light[0]
    assert (light[1], dark[1]) == ("#D55E00", "#F28A3C")


def test_hostile_strings_do_nothing(opened):
    bad = made_up("si", model=HOSTILE, environment={"cpu": HOSTILE, HOSTILE: HOSTILE})
    browser = opened(Collected([bad, made_up("si"), made_up()], [HOSTILE]))
    assert browser.title.startswith("alasso")
    assert complaints(browser) == []
    browser.execute_script("document.querySelector('[data-chart]').scrollIntoView({block: 'center'})")
    browser.execute_script(f"document.querySelector('.key[data-group=\"{bad.config.hash}\"]').click()")
    hover(browser, browser.execute_script(POINT, "mean-accuracy", bad.config.hash, 3))
    wait(browser, TOOLTIP)
    assert browser.title.startswith("alasso")
    assert browser.execute_script("return document.images.length") == 0


def test_the_served_page_fills_in_a_run_that_goes_on(browser, tmp_path):
    log = tmp_path / "permuted-digits_si_0123456789_s2.csv"
    log.write_text(LOG[: LOG.rindex("\n") + 1])
    results.write(made_up("sgd"), tmp_path)
    with Server(tmp_path, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            ready(browser, server.address, offline=False)
            with log.open("a") as more:
                more.write("1.2,2,2,0.25,0.3,,\n")
            wait(browser, "return document.querySelector('[data-log]').textContent.includes('4 epochs')")
            results.write(made_up("ewc"), tmp_path)
            wait(browser, "return document.body.textContent.includes('EWC') && 'ready' in document.body.dataset")
            assert complaints(browser) == []
        finally:
            browser.get("about:blank")
            server.shutdown()
            thread.join()
