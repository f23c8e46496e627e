"""The page of a plan: whole by itself, and read in a browser."""

from __future__ import annotations

import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from isotron import cli
from isotron.planner.charts import bars, ticks

SEARCH = "plan --model llama3-8b --gpus 16 --seq 4096 --global-batch 32"
ONE = "plan --model gpt3-175b --gpus 64 --tp 8 --pp 8 --micro-batch-size 4 --global-batch 1024"


def written(tmp_path: Path, words: str) -> Path:
    path = tmp_path / "plan.html"
    assert cli.main([*words.split(), "--html", str(path)]) == 0
    return path


class Tags(HTMLParser):
    """Every tag opened is closed, and nothing is loaded from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [str(v) for k, v in attrs if k in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_layout_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = written(tmp_path, ONE).read_text(encoding="utf-8")
    assert "written: " in capsys.readouterr().out
    tags = Tags(text)
    assert not tags.open and not tags.loaded
    assert text.count(">rank 7<") == 2  # memory and timeline
    assert "Changes that fit" in text and "--recompute" in text and "warning" in text


def test_bars_and_ticks() -> None:
    picture = bars([("a", {"x": 1.0, "y": 0.0}), ("b", {"x": 2.0, "y": 0.0})], 4.0, "GiB")
    assert picture.count("<rect") == 3 and "limit 4 GiB" in picture and ">y<" not in picture
    assert ticks(60.5) == [0, 10, 20, 30, 40, 50, 60] and ticks(0.07)[1] == 0.01 and ticks(1.4)[1] == 0.2


def test_the_page_in_a_browser(tmp_path: Path) -> None:
    path = written(tmp_path, SEARCH)
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as p:
        try:
            browser = p.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no Chromium for playwright: {str(error).splitlines()[0]}")
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        assert asked == [path.as_uri()]
        assert page.locator("circle.chosen").count() == 1 and page.locator("circle.frontier").count() > 1
        for shape in ("svg.bars rect", "circle.chosen", "table.candidates"):
            box = page.locator(shape).first.bounding_box()
            assert box and box["width"] > 4 and box["x"] >= 0 and box["x"] + box["width"] <= 1200
        limit = page.locator("svg.plot line.limit").bounding_box()
        chosen = page.locator("circle.chosen").bounding_box()
        assert limit and chosen and chosen["y"] > limit["y"]  # it fits: its point is below the line
        assert page.evaluate("document.documentElement.scrollWidth") <= 1200
        browser.close()
