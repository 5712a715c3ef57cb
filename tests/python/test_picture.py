"""Pictures of plans: what is drawn, that nothing overlaps, and that the page works in a browser without a network."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pictures were not checked")
pytest.importorskip("bokeh", reason="bokeh is not installed: the page was not checked")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure

from mlaplan import cli, picture
from mlaplan.explain import Explanation, Question, explain


def explanation(lengths: list[int], **settings: Any) -> Explanation:
    rows = np.arange(len(lengths), dtype=np.int32)
    return explain(Question(row_lengths=np.array(lengths, np.int32), request_ids=rows + 100, **settings))


CASES = {
    "one row": explanation([2048]),
    "one short row": explanation([5]),
    "padding": explanation([2048] * 8, padding=56),
    "mixed": explanation([(977 * row) % 2048 + 1 for row in range(64)]),
    "full": explanation([2048] * 256),
    "fold": explanation([2048] * 8, fold=8),
    "no limit": explanation([2048, 1500, 30, 0, 7], split_budget=-1),
    "measured": explanation([2048] * 20, costs="bf16 16", num_cus=64),
    "few CUs": explanation([100] * 9, num_cus=2),
}


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Explanation:
    return CASES[request.param]


def boxes_of(figure: Figure) -> list[tuple[float, float, float, float]]:
    """Left, right, top and bottom of each box of the main axes."""
    (collection,) = (c for c in figure.axes[0].collections if isinstance(c, PolyCollection))
    found = []
    for path in collection.get_paths():
        (left, top), (right, bottom) = np.asarray(path.vertices).min(axis=0), np.asarray(path.vertices).max(axis=0)
        found.append((left, right, top, bottom))
    return found


def test_every_work_is_drawn_where_and_as_long_as_it_runs(case: Explanation) -> None:
    expected = []
    for work in case.works:
        body = work.start + work.fixed
        edges = (work.slot - 0.5, work.slot + 0.5)
        expected += [(work.start, body, *edges), (body, work.end, *edges)]
    assert boxes_of(picture.draw(case)) == expected


def test_works_of_a_row_share_a_colour_and_rows_next_to_each_other_do_not(case: Explanation) -> None:
    figure = picture.draw(case)
    (collection,) = (c for c in figure.axes[0].collections if isinstance(c, PolyCollection))
    faces = [tuple(face) for face in np.asarray(collection.get_facecolor())]
    by_row: dict[int, set[Any]] = {}
    for work, face in zip(case.works, faces[1::2], strict=True):
        by_row.setdefault(work.row, set()).add(face)
    assert all(len(colours) == 1 for colours in by_row.values())
    rows = sorted(by_row)
    for row, following in pairwise(rows):
        assert by_row[row] != by_row[following]
    if case.rows <= 8:
        assert len(set().union(*by_row.values())) == len(by_row)


def luminance(colour: str) -> float:
    """Relative luminance by WCAG 2, which all kinds of colour vision share roughly."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_neighbours_among_many_rows_differ_in_lightness() -> None:
    colours = picture.colours_of(64)
    assert len(set(colours)) == 64
    lightness = [luminance(colour) for colour in colours]
    assert all(abs(a - b) > 0.02 for a, b in pairwise(lightness))


def test_lines_merges_and_words_say_what_the_numbers_say(case: Explanation) -> None:
    figure = picture.draw(case)
    works, merges = figure.axes[:2]
    places = [np.asarray(line.get_xdata()).tolist() for line in works.lines]
    assert places == [[case.lower_bound] * 2, [case.finish_time] * 2]
    collections = [c for c in merges.collections if isinstance(c, LineCollection)]
    brackets = collections[0].get_segments() if collections else []
    assert [(round(s[0][1] + 0.35, 6), round(s[-1][1] - 0.35, 6)) for s in map(np.asarray, brackets)] == [
        (merge.first_slot, merge.last_slot) for merge in case.merges
    ]
    words = " ".join(text.get_text() for text in figure.legends[0].get_texts())
    assert f"lower bound, {case.lower_bound:,}" in words
    assert f"finish time, {case.finish_time:,}" in words
    assert ("merged later" in words) == bool(case.merges)
    assert ("row 0" in words) == (case.rows <= 8)
    headline = figure.get_suptitle()
    assert f"{case.finish_time:,}" in headline
    assert f"{case.ratio:.3f} x lower bound" in headline


def test_no_words_overlap_or_leave_the_picture(case: Explanation) -> None:
    figure = picture.draw(case)
    FigureCanvasAgg(figure).draw()  # type: ignore[no-untyped-call]
    boxes = []
    for axes in figure.axes:
        ticks = [*axes.get_xticklabels(), *axes.get_yticklabels()]
        low, high = sorted(axes.get_ylim())
        texts = [
            *(text for text in axes.texts if low <= text.get_position()[1] <= high),
            *(tick for tick in ticks if tick.get_text() and tick.get_visible()),
            axes.xaxis.label,
            axes.yaxis.label,
            axes.title,
        ]
        shown = [text for text in texts if text.get_text() and axes.get_visible()]
        extent = axes.get_window_extent().padded(15)
        boxes += [
            (text.get_text(), text.get_window_extent())
            for text in shown
            if text in axes.texts
            or text in (axes.xaxis.label, axes.yaxis.label, axes.title)
            or extent.overlaps(text.get_window_extent())
        ]
    assert figure._suptitle is not None  # type: ignore[attr-defined]
    boxes.append(("headline", figure._suptitle.get_window_extent()))  # type: ignore[attr-defined]
    boxes += [(text.get_text(), text.get_window_extent()) for text in figure.legends[0].get_texts()]
    for (one, first), (other, second) in combinations(boxes, 2):
        overlap = (
            min(first.x1, second.x1) - max(first.x0, second.x0),
            min(first.y1, second.y1) - max(first.y0, second.y0),
        )
        assert min(overlap) <= 1, (one, other)
    width, height = figure.canvas.get_width_height()
    for words, box in boxes:
        assert box.x0 >= -1, words
        assert box.x1 <= width + 1, words
        assert box.y0 >= -1, words
        assert box.y1 <= height + 1, words


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_equal_plans_give_equal_files(tmp_path: Path, suffix: str) -> None:
    files = [tmp_path / f"{name}{suffix}" for name in ("one", "two")]
    for file in files:
        picture.save(CASES["padding"], file)
    first, second = (file.read_bytes() for file in files)
    assert first == second
    if suffix == ".png":
        assert first.startswith(b"\x89PNG")
    else:
        assert ET.fromstring(first).tag.endswith("svg")  # noqa: S314  (written a moment ago)


def test_the_command_writes_the_picture_and_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for suffix in picture.SUFFIXES:
        path = tmp_path / f"plan{suffix}"
        assert cli.main(["explain", "2048x2", "--output", str(path)]) == 0
        captured = capsys.readouterr()
        assert f"wrote {path}" in captured.err
        assert "finish time" in captured.out
        assert path.stat().st_size > 1000


def test_too_many_works_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "MOST_WORKS", 3)
    for make in (picture.draw, picture.page):
        with pytest.raises(ValueError, match="15 works, a picture holds at most 3"):
            make(CASES["one row"])


@pytest.mark.parametrize(("library", "suffix"), [("matplotlib", ".svg"), ("bokeh", ".html")])
def test_a_missing_library_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: str, suffix: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    path = tmp_path / f"plan{suffix}"
    assert cli.main(["explain", "2048", "--output", str(path)]) == 2
    assert f"a picture needs {library}: pip install 'mlaplan[plot]'" in capsys.readouterr().err
    assert not path.exists()


def test_explaining_without_a_picture_loads_no_plotting() -> None:
    code = (
        "import sys; from mlaplan.cli import main; main(['explain', '2048', '--json']);"
        "print([name for name in ('matplotlib', 'bokeh', 'torch', 'vllm') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.splitlines()[-1] == "[]"


def test_the_page_names_no_other_file() -> None:
    html = picture.page(CASES["fold"])
    # Inside its library's code addresses may stand; the page's own elements must not point anywhere.
    elements = re.sub(r"<script\b[^>]*>.*?</script>", "", html, flags=re.DOTALL)
    assert not re.findall(r"""(?:src|href)\s*=|url\(|@import""", elements)
    assert not re.findall(r"<script\b[^>]*\bsrc\s*=", html)
    assert html.count("<title>") == 1


# Moves the pointer over the middle of the picture and writes what then stands under it into the page's title.
_HOVER = """<script>
function walk(node, act) {
  act(node);
  for (const child of node.children || []) walk(child, act);
  if (node.shadowRoot) for (const child of node.shadowRoot.children) walk(child, act);
}
function all(name) {
  const found = [];
  walk(document.documentElement, (node) => { if (node.classList && node.classList.contains(name)) found.push(node); });
  return found;
}
let errors = 0;
window.addEventListener("error", () => { errors += 1; });
setTimeout(() => {
  const areas = all("bk-events");
  const box = areas[0].getBoundingClientRect();
  const at = { clientX: box.x + box.width * 0.3, clientY: box.y + box.height * 0.5, bubbles: true, composed: true,
    pointerType: "mouse", pointerId: 1, isPrimary: true };
  for (const kind of ["pointerenter", "pointermove"]) areas[0].dispatchEvent(new PointerEvent(kind, at));
  setTimeout(() => {
    const text = all("bk-tooltip-content").map((node) => node.textContent).join("|");
    document.title = "RESULT " + areas.length + ";" + errors + ";" + text;
  }, 1500);
}, 1500);
</script>"""


@pytest.mark.parametrize("name", ["padding", "fold", "full"])
def test_the_page_shows_a_work_under_the_pointer(tmp_path: Path, name: str) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium (Debian's package `chromium`): the page was not tried in a browser")
    case = CASES[name]
    before, end, after = picture.page(case).rpartition("</body>")
    path = tmp_path / "plan.html"
    path.write_text(before + _HOVER + end + after, encoding="utf-8")
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900", "--virtual-time-budget=8000")
    shown = subprocess.run(
        # No name is resolved, so a page that loaded anything would have an error.
        [
            chromium,
            *options,
            f"--user-data-dir={tmp_path / 'profile'}",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    title = re.search(r"<title>RESULT (\d+);(\d+);(.*?)</title>", shown.stdout, re.DOTALL)
    assert title is not None, shown.stderr[-2000:]
    assert title[1] == "2"
    assert title[2] == "0"
    tip = " ".join(title[3].split())
    found = re.search(r"slot: (\d+) tokens: (\S+) to (\S+) of (\S+) cost: (\d+), from (\d+) to (\d+)", tip)
    assert found is not None, tip
    slot, first, last, length, cost, start, stop = (int(number.replace(",", "")) for number in found.groups())
    work = next(work for work in case.works if (work.slot, work.start) == (slot, start))
    assert (first, last, cost, stop) == (work.kv_start, work.kv_end, work.cost, work.end)
    assert length == case.question.row_lengths[work.row]
    assert f"row: {work.row}, request {work.row + 100}" in tip
    assert ("planner row:" in tip) == (case.question.fold > 1)
