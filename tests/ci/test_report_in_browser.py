"""Report pages in a real browser: nothing hangs over, nothing that a reader's aid stumbles over."""

import os
import shutil
from pathlib import Path

import pytest
from unit.test_report import HOSTILE, expertise_record, make_results, page_of, whole_results

AXE = Path(os.environ.get("AXE", "node_modules/axe-core/axe.min.js"))
"""The file of axe-core, `npm install axe-core`."""


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver", reason="pip install selenium")
    driver = shutil.which("chromedriver")
    if driver is None:
        pytest.skip("no chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu"):
        options.add_argument(argument)
    service = webdriver.ChromeService(driver)
    found = webdriver.Chrome(options=options, service=service)
    yield found
    found.quit()


def hostile_results():
    results = make_results(labels=HOSTILE)
    results["phases"].insert(0, expertise_record(HOSTILE, HOSTILE[0]))
    return results


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("results", [whole_results, hostile_results])
@pytest.mark.parametrize("width", [1280, 400])
def test_a_page_fits_and_can_be_read(browser, tmp_path, width, results, scheme):
    page = tmp_path / "report.html"
    page.write_text(page_of(results()).source, encoding="utf-8")
    size = {"width": width, "height": 1400, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wanted = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)
    browser.get(page.as_uri())
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    right = "return document.querySelector('td.up').getBoundingClientRect().right"
    assert browser.execute_script(right) <= width, "the intervals are seen"
    if not AXE.is_file():
        pytest.skip(f"{AXE} is not there: npm install axe-core, or AXE=FILE")
    # The page allows no scripts: this one comes from outside.
    browser.execute_cdp_cmd("Runtime.evaluate", {"expression": AXE.read_text() + "; 0"})
    found = browser.execute_async_script(
        "const done = arguments[0]; axe.run().then(found => done(found.violations.map("
        "one => [one.id, one.nodes[0].html, one.nodes[0].failureSummary])))"
    )
    assert found == []
