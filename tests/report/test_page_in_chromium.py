"""The page as a person meets it: drawn, hovered over, zoomed, on a phone and in the dark."""

import os
from pathlib import Path

import pytest

from llmtrain.cli.main import run
from tests.report import browser
from tests.report.browser import Browser
from tests.report.logged import train_lines, write_log, write_run

if browser.program() is None and not os.environ.get("CI"):
    pytest.skip("needs Chromium (Debian: apt-get install chromium)", allow_module_level=True)

EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    runs = {
        "one": [write_run(folder / "adamw", 3000)],
        "three": [
            write_run(folder / "adamw", 3000),
            write_run(folder / "muon", 3000, seed=5, offset=-0.1, optimizer="muon", state="running"),
            write_run(folder / EVIL, 2000, seed=6, sources=("</script><b>",), state="failed"),
        ],
        "long": [write_log(folder / "long", train_lines(5000, every=1))],
    }
    for name, some in runs.items():
        assert run(["report", *map(str, some), "--output", str(folder / f"{name}.html")]) == 0
    return {name: folder / f"{name}.html" for name in runs}


@pytest.fixture(scope="module")
def chromium():
    with Browser() as one:
        yield one


FIRST = "document.querySelector('.chart svg')"


def box(chromium: Browser, what: str = FIRST) -> tuple[float, float, float, float]:
    """(left, top, width, height) of an element, scrolled into sight."""
    where = f"(b => [b.left, b.top, b.width, b.height])({what}.getBoundingClientRect())"
    chromium.run(f"{what}.scrollIntoView({{block: 'center'}})")
    return tuple(chromium.run(where))


def redrawn(chromium: Browser, action) -> None:
    """Does something and returns when the curves are drawn anew."""
    before = chromium.run("document.body.dataset.drawn")
    action()
    chromium.wait(f"document.body.dataset.drawn !== '{before}'")


def click(chromium: Browser, text: str) -> None:
    script = f"[...document.querySelectorAll('button')].find(one => one.textContent === {text!r}).click()"
    redrawn(chromium, lambda: chromium.run(script))


def lines(chromium: Browser, chart: int = 0) -> list[int]:
    """Lengths of the paths of a chart's curves."""
    found = f"document.querySelectorAll('.chart')[{chart}].querySelectorAll('path.line')"
    return chromium.run(f"[...{found}].map(path => path.getAttribute('d').length)")


def curve(chromium: Browser) -> str:
    return chromium.run(f"{FIRST}.querySelector('path.line').getAttribute('d')")


def labels(chromium: Browser) -> list[str]:
    return chromium.run(f"[...{FIRST}.querySelectorAll('text')].map(t => t.textContent)")


@pytest.mark.parametrize("name", ["one", "three", "long"])
@pytest.mark.parametrize("dark", [False, True])
def test_it_asks_nothing_of_a_network_and_complains_of_nothing(chromium, pages, name, dark):
    chromium.open(pages[name], dark=dark)
    assert chromium.requests == [pages[name].as_uri()] and chromium.complaints == []


def test_every_chart_has_a_curve_of_every_run_that_has_it(chromium, pages):
    chromium.open(pages["three"])
    titles = chromium.run("[...document.querySelectorAll('#charts .chart h3')].map(h => h.textContent)")
    assert titles[:4] == ["Training loss", "Held-out loss: web", "Held-out loss: code", "Held-out loss: </script><b>"]
    assert [len(lines(chromium, i)) for i in range(5)] == [3, 2, 2, 1, 3]
    assert all(length > 50 for i in range(len(titles)) for length in lines(chromium, i))
    assert chromium.run("document.querySelectorAll('img, b:not(#tip b)').length") == 0
    kinds = chromium.run(f"[...new Set([...{FIRST}.querySelectorAll('.mark')].map(m => m.classList[1]))]")
    assert {"save", "resume", "spike", "failure", "skipped"} <= set(kinds)


def test_hovering_shows_the_values_of_all_runs_there(chromium, pages):
    chromium.open(pages["three"])
    left, top, width, height = box(chromium)
    chromium.mouse("mouseMoved", left + 0.4 * width, top + height / 2)
    text = chromium.wait("(tip => !tip.hidden && tip.innerText)(document.getElementById('tip'))")
    assert "adamw" in text and "muon" in text and EVIL in text and "step 1," in text and "tokens" in text
    edges = "(b => [b.left, b.top, innerWidth - b.right, innerHeight - b.bottom])(tip.getBoundingClientRect())"
    edges = chromium.run(edges)
    assert min(edges) >= 0
    assert chromium.run("document.querySelectorAll('.cross').length > 5")
    chromium.mouse("mouseMoved", 2, 2)
    chromium.wait("document.getElementById('tip').hidden")


def test_dragging_zooms_and_a_double_click_shows_all_again(chromium, pages):
    chromium.open(pages["one"])
    left, top, width, height = box(chromium)
    before = labels(chromium)
    at = top + height / 2

    def drag() -> None:
        chromium.mouse("mousePressed", left + 0.5 * width, at, button="left", clickCount=1)
        chromium.mouse("mouseMoved", left + 0.7 * width, at, button="left", buttons=1)
        chromium.mouse("mouseReleased", left + 0.7 * width, at, button="left", clickCount=1)

    redrawn(chromium, drag)
    zoomed = labels(chromium)
    assert zoomed != before and "0" not in zoomed
    assert chromium.run("document.getElementById('reset').disabled") is False
    redrawn(chromium, lambda: chromium.run(f"{FIRST}.dispatchEvent(new MouseEvent('dblclick'))"))
    assert labels(chromium) == before


def test_axes_scale_smoothing_and_runs_can_be_chosen(chromium, pages):
    chromium.open(pages["three"])
    of_steps = labels(chromium)
    click(chromium, "Tokens")
    of_tokens = labels(chromium)
    assert of_tokens != of_steps and any(text.endswith("M") for text in of_tokens)
    click(chromium, "Training time")
    assert any("m " in text for text in labels(chromium))
    click(chromium, "last 10%")
    click(chromium, "all")
    linear = curve(chromium)
    click(chromium, "Log scale")
    assert curve(chromium) != linear
    click(chromium, "muon")
    assert len(lines(chromium)) == 2
    assert chromium.run(f"{FIRST}.querySelectorAll('path.raw').length") == 2
    script = "(s => { s.value = 0; s.dispatchEvent(new Event('input')) })(document.querySelector('input[type=range]'))"
    redrawn(chromium, lambda: chromium.run(script))
    assert chromium.run(f"{FIRST}.querySelectorAll('path.raw').length") == 0
    assert chromium.complaints == []


def test_the_keyboard_shows_values_too(chromium, pages):
    chromium.open(pages["one"])
    chromium.run(f"{FIRST}.focus()")
    for _ in range(2):
        chromium.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight", code="ArrowRight")
    assert "step 1," in chromium.wait("(tip => !tip.hidden && tip.innerText)(document.getElementById('tip'))")


def test_stretches_of_lines_are_a_band(chromium, pages):
    chromium.open(pages["long"])
    assert chromium.run(f"{FIRST}.querySelector('path.band').getAttribute('d').length") > 10_000
    assert "5,000 log lines, drawn as 1,500 stretches" in chromium.run("document.body.innerText")


@pytest.mark.parametrize("name", ["one", "three"])
def test_a_phone_scrolls_down_alone(chromium, pages, name):
    chromium.open(pages[name], width=375, height=800)
    assert chromium.run("document.documentElement.scrollWidth <= 375 && innerWidth === 375")
    assert chromium.run("[...document.querySelectorAll('.chart .width')].every(e => e.offsetWidth === 0)")
    chromium.run("document.querySelectorAll('details').forEach(one => { one.open = true })")
    wide = chromium.run(
        "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1 && "
        "!e.closest('.scroll')).map(e => e.outerHTML.slice(0, 80))"
    )
    assert wide == [] and chromium.run("document.documentElement.scrollWidth <= 375")
    assert chromium.run(f"{FIRST}.clientWidth") > 300 and lines(chromium)[0] > 50
    sizes = chromium.run(
        "[...document.querySelectorAll('body *')].filter(e => e.innerText && e.childElementCount === 0)"
        ".map(e => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 12


CONTRAST = """
(() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const linear = (n) => n <= 10 ? n / 255 / 12.92 : ((n / 255 + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b) + 0.05;
  const ratio = (a, b) => Math.max(light(a) / light(b), light(b) / light(a));
  const ground = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length === 3 || c[3] === 1) return c.slice(0, 3); } return [255, 255, 255]; };
  const found = { text: 99, line: 99, worst: "" };
  for (const e of document.querySelectorAll("body *")) {
    if (e.closest("script, style, noscript, :disabled, [aria-pressed=false]") || !e.getClientRects().length) continue;
    const style = getComputedStyle(e), own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    const svg = e instanceof SVGElement;
    if (own) { const one = ratio(parse(svg ? style.fill : style.color).slice(0, 3), ground(e));
      if (one < found.text) [found.text, found.worst] = [one, e.outerHTML.slice(0, 90)]; }
    if (e.matches("path.line, path.mark"))
      found.line = Math.min(found.line, ratio(parse(style.stroke).slice(0, 3), ground(e)));
  }
  return found;
})()
"""


@pytest.mark.parametrize("dark", [False, True])
def test_text_and_curves_stand_out_in_both_colour_schemes(chromium, pages, dark):
    chromium.open(pages["three"], dark=dark)
    found = chromium.run(CONTRAST)
    assert found["text"] >= 4.5, found
    assert found["line"] >= 3, found
    ground = chromium.run("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, ground[4:-1].split(", "))) < 60) is dark
