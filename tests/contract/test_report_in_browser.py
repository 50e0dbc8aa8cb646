"""The report page in a real browser: headless Chromium, offline, without a console error.

Needs the ``chromium`` program; without it these tests fail with the command that installs it.
"""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from lockstep.metrics.report import write_report
from lockstep.metrics.run_folder import RunFolder
from tests.synthetic_run import HOSTILE, make_rollout, make_run, metric_row, receipt

INSTALL = "apt-get install -y --no-install-recommends chromium fonts-dejavu-core"

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--v=0"),
    *("--hide-scrollbars", "--window-size=1280,2000"),
)
"""No host name resolves, so the page is offline whatever the machine is."""

VOID_TAGS = {"meta", "link", "br", "img", "input", "hr"}


@dataclass
class Element:
    """One element of the dumped DOM with all text below it."""

    tag: str
    attributes: dict[str, str | None]
    path: tuple[str, ...]
    text: str = ""


class Dom(html.parser.HTMLParser):
    """Elements of a dumped DOM in document order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs), tuple(e.attributes.get("id") or e.tag for e in self._open))
        self.elements.append(element)
        if tag not in VOID_TAGS:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop().tag != tag:
            pass

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def find(self, tag: str, *, css_class: str = "", **attributes: str) -> list[Element]:
        return [
            element
            for element in self.elements
            if element.tag == tag
            and (not css_class or css_class in (element.attributes.get("class") or "").split())
            and all(element.attributes.get(name.replace("_", "-")) == value for name, value in attributes.items())
        ]


@dataclass(frozen=True)
class Visit:
    """What a browser made of a page."""

    dom: Dom
    console: list[str]
    requests: list[str]


def visit(page: Path, work: Path) -> Visit:
    """Open a page in a fresh profile; its DOM after its script ran, console lines, and every URL that it asked for.

    The net log also has what the browser itself wants to fetch (updates, the time), which has no page as initiator."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.fail(f"these tests need the program chromium; install it with: {INSTALL}")
    net_log = work / "net-log.json"
    profile = work / "profile"
    command = [chromium, *FLAGS, f"--user-data-dir={profile}", f"--log-net-log={net_log}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    events = json.loads(net_log.read_text(encoding="utf-8"))["events"]
    started = [event["params"] for event in events if "initiator" in event.get("params", {})]
    urls = [params["url"] for params in started if params["initiator"] != "not an origin"]
    shutil.rmtree(profile, ignore_errors=True)
    return Visit(Dom(done.stdout), console, urls)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(make_run(tmp_path_factory.mktemp("browser") / "run"))


@pytest.fixture(scope="module")
def visited(report: Path, tmp_path_factory: pytest.TempPathFactory) -> Visit:
    return visit(report, tmp_path_factory.mktemp("visit"))


def test_the_script_runs_to_its_end_without_a_console_line(visited: Visit) -> None:
    assert visited.console == []
    assert visited.dom.find("html", data_ready="yes")


def test_nothing_is_requested_over_a_network(visited: Visit) -> None:
    assert [url for url in visited.requests if not url.startswith(("file:", "data:"))] == []


def test_a_page_that_did_fetch_would_be_seen(report: Path, tmp_path: Path) -> None:
    page = tmp_path / "fetching.html"
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", report.read_text(encoding="utf-8"))
    page.write_text(text.replace("</body>", '<img src="https://example.com/x.png"></body>'), encoding="utf-8")
    assert visit(page, tmp_path).requests == ["https://example.com/x.png"]


@pytest.mark.parametrize("name", ["reward", "accuracy", "agreement", "throughput", "memory", "time", "explorer"])
def test_each_chart_is_drawn(visited: Visit, name: str) -> None:
    (figure,) = visited.dom.find("figure", data_chart=name)
    assert "step 0" in figure.text
    charts = {"figure": 0, "lines": 0, "bars": 0, "bounds": 0}
    inside = False
    for element in visited.dom.elements:
        if element.tag == "figure":
            inside = element is figure
        if not inside:
            continue
        css_class = (element.attributes.get("class") or "").split()
        charts["lines"] += element.tag == "path" and "series" in css_class and len(element.attributes["d"] or "") > 40
        charts["bars"] += element.tag == "rect" and "style" in element.attributes
        charts["bounds"] += "bound" in css_class
    if name == "time":
        assert charts["bars"] > 22 * 5
    else:
        assert charts["lines"] >= 1
    assert charts["bounds"] == (name == "agreement")


def test_the_sample_browser_shows_the_hostile_completion_as_text(visited: Visit) -> None:
    (completion,) = visited.dom.find("pre", css_class="completion")
    visible = HOSTILE.replace("\u202e", "⟨U+202E⟩")
    assert completion.text == visible + "NaN"
    tokens = visited.dom.find("span", css_class="tok")
    assert [token.text for token in tokens] == [visible[:40], visible[40:], "NaN"]
    assert all("background" in (token.attributes.get("style") or "") for token in tokens)
    assert all(float(token.attributes["data-diff"] or "nan") != 0 for token in tokens)
    (title,) = visited.dom.find("title")
    assert title.text == "smollm2-arithmetic · Lockstep report"
    assert visited.dom.find("img") == []
    assert len(visited.dom.find("script")) == 2


def test_the_receipts_and_the_headline_are_there(visited: Visit) -> None:
    assert len(visited.dom.find("tr")) == 24
    assert [pill.text for pill in visited.dom.find("span", css_class="pill")] == ["agreement held at all 22 steps"]
    assert len(visited.dom.find("div", css_class="tile")) == 7


DRIVER = """
(() => {
  const errors = [];
  window.addEventListener("error", (event) => errors.push(event.message));
  const move = (node) => {
    const box = node.getBoundingClientRect();
    node.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width * 0.9, clientY: box.top + 5}));
    return document.getElementById("tip").textContent;
  };
  const change = (id, value) => {
    const select = document.getElementById(id);
    select.value = value;
    select.dispatchEvent(new Event("change"));
  };
  const result = {tips: {}};
  for (const figure of document.querySelectorAll("figure[data-chart]"))
    result.tips[figure.dataset.chart] = move(figure.querySelector("svg rect[fill=transparent]"));
  result.token = move(document.querySelector(".tok"));
  change("explorer-key", "length_tokens/mean");
  result.explorer = document.querySelector("#explorer figcaption").textContent;
  change("sample-step", "1");
  const selected = () => document.querySelector(".item[aria-selected=true] .text").textContent;
  result.first = selected();
  const list = document.getElementById("sample-list");
  list.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowDown", cancelable: true}));
  result.second = selected();
  result.items = {};
  for (const option of document.getElementById("sample-filter").options) {
    change("sample-filter", option.value);
    result.items[option.value] = document.querySelectorAll(".item").length;
  }
  result.errors = errors;
  const output = document.createElement("output");
  output.textContent = JSON.stringify(result);
  document.body.append(output);
})();
"""


def test_hovering_choosing_and_keys_work(report: Path, tmp_path: Path) -> None:
    """The page without its policy, so that a driver script can play the visitor."""
    text = report.read_text(encoding="utf-8")
    page = tmp_path / "driven.html"
    driven = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    page.write_text(driven.replace("</body>", f"<script>{DRIVER}</script></body>"), encoding="utf-8")
    seen = visit(page, tmp_path)
    assert seen.console == []
    (output,) = seen.dom.find("output")
    result = json.loads(output.text)
    assert result["errors"] == []
    assert result["tips"]["agreement"].startswith("step 20abs_diff/mean (judged)0.00")
    assert re.match(r"step 20rollout\d.*sum\d", result["tips"]["time"])
    assert "token id" in result["token"]
    assert "train − rollout" in result["token"]
    assert result["explorer"].startswith("length_tokens/mean")
    assert result["first"] != result["second"]
    assert result["items"]["all"] == result["items"]["far"] == 16
    assert result["items"]["right"] + result["items"]["wrong"] == 16
    assert 0 < result["items"]["right"] < 16
    assert result["items"]["truncated"] == 0


def test_the_policy_stops_a_script_that_is_not_the_pages_own(report: Path, tmp_path: Path) -> None:
    page = tmp_path / "injected.html"
    text = report.read_text(encoding="utf-8")
    attack = '<script>document.title = "owned"</script><img src="https://example.com/x.png">'
    page.write_text(text.replace("</body>", f"{attack}</body>"), encoding="utf-8")
    seen = visit(page, tmp_path)
    (title,) = seen.dom.find("title")
    assert title.text == "smollm2-arithmetic · Lockstep report"
    assert seen.requests == []
    assert any("Content Security Policy" in line for line in seen.console)  # and this test would see a console line


@pytest.mark.parametrize("kind", ["empty", "one row", "broken numbers"])
def test_unusual_runs_open_without_a_console_line(tmp_path: Path, kind: str) -> None:
    import numpy as np

    with RunFolder(tmp_path / "run") as folder:
        if kind != "empty":
            folder.append_metrics(metric_row(1, 1, np.random.default_rng(0)))
            folder.append_refit(receipt(1))
        if kind == "broken numbers":
            broken = {"step": 2, "reward/mean": float("nan"), "agreement/abs_diff/mean": float("inf")}
            folder.append_metrics(broken | {"time/step_s": 0.0, "memory/peak_rss_bytes": 0})
            folder.append_metrics({"step": 900, "agreement/abs_diff/mean": 0.0})
            folder.write_rollouts(2, [make_rollout("r", "g", ["", "x"])], {})
            folder.write_rollouts(3, [], {})
    seen = visit(write_report(tmp_path / "run"), tmp_path)
    assert seen.console == []
    assert seen.dom.find("html", data_ready="yes")
    if kind == "broken numbers":
        assert len(seen.dom.find("path", css_class="broken")) == 2
