# SPDX-License-Identifier: Apache-2.0
"""The report's page in a real browser."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.tensorless.fleet.plugins.plugin_utils import _report_files

from tests.unit.bench import browser, fleetdata

pytestmark = pytest.mark.skipif(browser.find() is None, reason="no chromium on this machine (Debian: chromium)")

AXE = "4.10.3"
AXE_SHA256 = "880970c081707360e64f34cea25ff91892f5bc95675b0776925b9709dd8a68bb"
CACHE = Path(__file__).resolve().parents[3] / ".build" / "cache"

PAYLOADS = (
    "</script><script>window.owned=1</script>",
    '"><img src=x onerror="window.owned=1">',
    "\x1b]0;owned\x07\u2028\u202e<b>&amp;",
)


def hosts() -> list[dict[str, Any]]:
    """Ordinary cards, one of each trouble, and names that try to be markup, in every place that takes text."""
    many = fleetdata.fleet(24)
    bad = "".join(PAYLOADS)
    evil = fleetdata.result(90, model=bad, labels=[bad], notes=[bad], card_name=bad, build_info=bad, driver_version=bad)
    evil["scope"]["exec"] = ["podman", bad]
    evil["runs"][0]["witness"]["other_processes"] = [{"pid": 1, "name": bad, "memory_mib": 1}]
    evil["discarded"] = [{"reasons": [bad]}]
    evil["witness"]["kernel"] = [bad]
    evil["sweeps"] = [{"kind": bad, "arms": [{"arm": bad, "value": n, "decode_tps": 30.0 - n} for n in range(3)]}]
    many.append(fleetdata.host(90, [evil], name=bad))
    many.append(fleetdata.host(91, [], failures=[{"card_uuid": fleetdata.uuid(91), "msg": bad}]))
    return many


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dest = tmp_path_factory.mktemp("report")
    _report_files.write(hosts(), str(dest), now="2026-11-29T22:00:00Z")
    return dest / "report.html"


@pytest.fixture(scope="module", params=["light", "dark", "phone"])
def shown(request: pytest.FixtureRequest, page: Path) -> Iterator[browser.Browser]:
    size = {"width": 390, "height": 844} if request.param == "phone" else {}
    with browser.Browser(dark=request.param == "dark", **size) as tab:
        tab.open(page)
        yield tab


def test_nothing_runs_and_nothing_leaves_the_page(shown: browser.Browser, page: Path) -> None:
    assert shown.value("window.owned") is None
    assert shown.value("document.querySelectorAll('img, iframe, object, link').length") == 0
    assert shown.value("document.querySelectorAll('script').length") == 1
    assert shown.dialogs == [] and shown.errors == []
    assert set(shown.requests) == {page.as_uri()}


def test_plots_are_drawn(shown: browser.Browser) -> None:
    boxes = shown.value(
        "[...document.querySelectorAll('.plots svg')].map(s => [s.getBoundingClientRect().width, s.children.length])"
    )
    assert len(boxes) >= 3
    assert all(width > 200 and parts > 5 for width, parts in boxes)
    colour = shown.value("getComputedStyle(document.querySelector('.dot')).fill")
    assert colour != shown.value("getComputedStyle(document.querySelector('figure')).backgroundColor")


def test_table_sorts_by_keyboard_and_numbers_as_numbers(shown: browser.Browser) -> None:
    column = "[...document.querySelectorAll('#cards-table tbody tr')].map(r => r.cells[3].dataset.value)"
    shown.value("document.querySelectorAll('#cards-table th button')[3].focus()")
    shown.key("Enter")
    values = [float(v) for v in shown.value(column) if v != ""]
    assert values == sorted(values) and len(values) > 20
    assert shown.value("document.querySelectorAll('#cards-table th')[3].getAttribute('aria-sort')") == "ascending"
    assert shown.value(column)[-1] == ""
    shown.key("Space")
    values = [float(v) for v in shown.value(column) if v != ""]
    assert values == sorted(values, reverse=True)


def test_table_filters_by_keyboard(shown: browser.Browser) -> None:
    visible = "[...document.querySelectorAll('#cards-table tbody tr')].filter(r => !r.hidden).length"
    everything = shown.value(visible)
    shown.value("document.getElementById('filter-text').focus()")
    shown.type("gpu-host-7")
    assert shown.value(visible) == 1
    assert shown.value("document.getElementById('filter-count').textContent") == f"1 of {everything} cards"
    box = "document.getElementById('filter-text')"
    shown.value(f"{box}.value = ''; {box}.dispatchEvent(new Event('input'))")
    state = "document.getElementById('filter-state')"
    shown.value(f"{state}.value = 'slow'; {state}.dispatchEvent(new Event('change'))")
    assert 0 < shown.value(visible) < everything
    shown.value(f"{state}.value = ''; {state}.dispatchEvent(new Event('change'))")
    assert shown.value(visible) == everything


def test_a_link_opens_its_card(shown: browser.Browser) -> None:
    shown.value("document.querySelector('.attention a').focus()")
    shown.key("Enter")
    opened = "new Promise(r => setTimeout(() => r(document.querySelector(location.hash).open), 20))"
    assert any(shown.value(opened) for _ in range(50))


def test_RL_091_no_box_is_clipped_and_an_overlong_line_is_reported(shown: browser.Browser) -> None:
    shown.value("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert shown.value(browser.CLIPPED) == []
    shown.value(
        "var p = document.createElement('p'); p.style.whiteSpace = 'nowrap'; p.id = 'long';"
        "p.textContent = 'word '.repeat(200); document.querySelector('main').appendChild(p)"
    )
    assert any(line.startswith("P") for line in shown.value(browser.CLIPPED))
    shown.value("document.getElementById('long').remove()")


@pytest.fixture(scope="module")
def axe() -> str:
    path = CACHE / f"axe-{AXE}.js"
    if not path.exists():
        if shutil.which("npm") is None:
            pytest.skip("no npm to fetch axe-core with")
        CACHE.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", f"axe-core@{AXE}"]
        got = subprocess.run(command, cwd=CACHE, capture_output=True, text=True, check=False)
        if got.returncode != 0:
            pytest.skip(f"axe-core could not be fetched: {got.stderr[-200:]}")
        archive = CACHE / f"axe-core-{AXE}.tgz"
        text = subprocess.run(
            ["tar", "xOf", str(archive), "package/axe.min.js"], capture_output=True, check=True
        ).stdout
        archive.unlink()
        path.write_bytes(text)
    data = path.read_bytes()
    assert hashlib.sha256(data).hexdigest() == AXE_SHA256
    return data.decode()


def test_axe_reports_no_violation(shown: browser.Browser, axe: str) -> None:
    shown.value("document.querySelectorAll('details').forEach((d, i) => d.open = i < 3)")
    shown.value(axe + "; 1")
    found = shown.value(
        "axe.run().then(r => r.violations.map(v => v.id + ': ' + v.nodes[0].html + v.nodes[0].failureSummary))"
    )
    assert found == []
