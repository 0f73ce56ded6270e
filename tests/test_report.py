"""The report: which records it uses, what it claims, and that the page stands alone."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from eval import charts, findings, report
from eval.__main__ import main

N = 40


def record(task, spec, metrics, **settings):
    made = {"versions": {"torch": "1"}, "machine": {"cpu": "x", "gpu": None}}
    return {"task": task, "model": "tiny", "spec": spec, "settings": settings, "metrics": metrics, **made}


def quality(spec, ratio, kl, perplexity=10.0, **settings):
    metrics = {"bytes_ratio": ratio, "kl_mean": kl, "perplexity": perplexity, "baseline_perplexity": 10.0}
    return record("quality", spec, metrics, **{"tokens": 100, "attn": "sdpa", **settings})


def speed(spec, context, ms, ratio):
    return record(
        "speed",
        spec,
        {"step_ms": ms, "step_ms_p10": ms - 1, "step_ms_p90": ms + 1, "speed_ratio": ratio},
        context=context,
        attn="sdpa",
    )


def prompt(spec, scene, ratio, **settings):
    return record("prefill", spec, {"ratio": ratio}, scene=scene, attn="kvcache", **settings)


def answer(task, spec, right, ratio=1.0, **settings):
    return record(task, spec, {"right": right, "bytes_ratio": ratio}, items=N, **settings)


GOOD = [1] * 30 + [0] * 10
BAD = [1] * 10 + [0] * 30
ALMOST = [1] * 29 + [0] * 11


def records_of_all_kinds():
    return [
        quality("dynamic", 1.0, 0.0),
        quality("int8", 0.27, 2e-4, 10.01),
        quality("int2", 0.2, 0.05, 10.7),
        quality("<b>&", 0.5, 5e-3),
        answer("piqa", "dynamic", GOOD),
        answer("piqa", "full", GOOD),
        answer("piqa", "int8", ALMOST, 0.27),
        answer("piqa", "int2", BAD, 0.2),
        answer("piqa", "zeroed", BAD),
        speed("dynamic", 1000, 10, 1.0),
        speed("dynamic", 8000, 20, 1.0),
        speed("int8", 8000, 16, 1.25),
        prompt("dynamic", "once 2048", 1.0),
        prompt("int8", "once 2048", 1.6),
        prompt("int8", "once 512", 0.9),
        prompt("int8", "draft5", 0.1),
        *[
            record("retrieval", spec, {"accuracy": value}, length=length, depth=depth, attn="kvcache", items=5)
            for spec, value in (("full", 1.0), ("int8", 0.5))
            for length in (100, 200)
            for depth in (0.1, 0.9)
        ],
        record("streaming", "int8", {"perplexity": [9.0, 8.0], "trained_length": 150}, tokens=200, bucket=100),
        record(
            "streaming", "fresh", {"perplexity": [9.5, 8.5], "trained_length": 150}, tokens=200, bucket=100, context=9
        ),
    ]


@pytest.fixture
def known():
    return records_of_all_kinds()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`python -m eval report`, and what it wrote."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "in").mkdir()
    (folder / "in" / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records_of_all_kinds()))
    main(["report", str(folder / "in"), "-o", str(folder / "out" / "r.html")])
    return folder / "out"


# ---- findings ----------------------------------------------------------------------------------------------


def test_verdicts_follow_the_adjusted_test(known):
    found = {one.spec: one for one in findings.find(known).answers}
    assert found["dynamic"].verdict == "baseline" and found["zeroed"].verdict == "control"
    assert found["full"].verdict == "same on every item"
    assert found["int8"].verdict == "no difference shown" and found["int8"].difference == pytest.approx(-1 / N)
    assert found["int2"].verdict == "worse" and (found["int2"].better, found["int2"].worse) == (0, 20)
    assert found["int2"].adjusted == pytest.approx(3 * found["int2"].sign_p)  # three caches were compared
    assert findings.Answer("t", "x", 9, 1, 0, 0.5, 0.1, 9, 1, 0.01, 0.04, 1).verdict == "better"


def test_many_comparisons_raise_the_bar():
    """Six items lost is a finding alone, and none among ten."""
    lost = [1] * 24 + [0] * 16
    one = [answer("t", "dynamic", GOOD), answer("t", "a", lost)]
    assert findings.find(one).answers[1].verdict == "worse"
    ten = [*one, *[answer("t", f"b{i}", GOOD) for i in range(9)]]
    assert findings.find(ten).answers[1].verdict == "no difference shown"


def test_rows_are_ranked(known):
    known.append(quality("half", 0.4, 1e-3))  # kept, but not asked: after those that were
    rows = findings.find(known).rows
    assert [row.spec for row in rows] == ["dynamic", "int8", "half", "<b>&", "full", "int2"]
    assert [row.verdict for row in rows][:3] == ["baseline", "no loss shown", "not all measured"]
    assert rows[-1].verdict == "loss" and rows[1].speed == 1.25 and rows[1].retrieval == 0.5


def test_a_perplexity_or_a_divergence_too_high_is_a_loss():
    found = findings.find([quality("a", 0.5, 0.001, 10.2), quality("b", 0.5, 0.02), quality("c", 0.5, 0.001, 9.0)])
    assert {row.spec: row.verdict for row in found.rows} == {"a": "loss", "b": "loss", "c": "no loss shown"}


def test_records_of_other_settings_do_not_mix(known):
    known += [quality("int8", 0.27, 0.9, tokens=50), quality("int8", 0.27, 3e-4)]  # another; and a newer one
    found = findings.find(known)
    assert [one["metrics"]["kl_mean"] for one in found.quality if one["spec"] == "int8"] == [3e-4]
    assert found.left_out == 1


def test_one_model_at_a_time(known):
    known += [{**quality("int8", 0.1, 0.1), "model": "other"}]
    assert findings.find(known).others == ["other"]
    assert findings.find(known, "other").quality[0]["metrics"]["bytes_ratio"] == 0.1
    with pytest.raises(ValueError, match="no records of model 'nope'; there are some of tiny, other"):
        findings.find(known, "nope")
    with pytest.raises(ValueError, match="no result records"):
        findings.find([])


def test_the_recommendation_gives_its_evidence(known):
    first, second, controls, limits = findings.recommend(findings.find(known))
    assert first.startswith("Use int8. It holds 0.27 of the") and "0.0002 nats" in first and "+0.10 %" in first
    assert "no loss of right answers was shown (lowest: -2.5 +- 2.5 points on piqa, 40 items)" in first
    assert "its decode step is faster than the stock cache's (1.25x)" in first and "50 % of the hidden keys" in first
    assert "The first token of a prompt of 2,048 comes slower than the stock cache's (0.62x)." in first
    assert second.startswith("If memory counts for more than answers, look at int2") and "fewer right answers" in second
    assert "the same answers as the stock one on all 40 items" in controls and "left with 25 % on piqa" in controls
    assert "3 comparisons were made" in limits


def test_drafts_alone_say_nothing_of_the_first_token():
    found = findings.find([prompt("dynamic", "draft5", 1.0), prompt("int8", "draft5", 0.1)])
    assert found.prompt is None and all(row.first is None for row in found.rows)


def test_nothing_is_recommended_that_loses():
    told = findings.recommend(findings.find([quality("int2", 0.2, 0.5)]))
    assert told[0].startswith("No cache that was measured holds fewer bytes without a shown loss")
    assert "not asked to answer anything" in told[1]


def test_frontier_by_hand():
    assert charts.on_frontier([(3, 1), (1, 3), (2, 2), (2, 5), (4, 1)]) == [(1, 3), (2, 2), (3, 1)]


# ---- the page ----------------------------------------------------------------------------------------------


def test_every_picture_is_there_as_svg_and_png(made):
    text = (made / "r.html").read_text()
    assert text.count("<svg") == len(report.PICTURES) == 5
    for name, (heading, _) in report.PICTURES.items():
        assert heading in text
        assert (made / f"r_{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"![{heading}](r_{name}.png)" in (made / "r.md").read_text()


def test_the_page_needs_no_network(made):
    """Nothing is fetched: no script, and no reference but to the page itself or to data in it."""
    text = (made / "r.html").read_text()
    assert "<script" not in text and "@import" not in text and "<link" not in text and "<img" not in text
    assert set(re.findall(r'(?:href|src)="(#|.{5})', text)) == {"#", "data:"}
    assert all(one.startswith("#") for one in re.findall(r"url\(([^)]*)\)", text))
    assert 'name=viewport content="width=device-width' in text


def test_the_page_is_well_formed_and_ids_are_unique(made):
    class Reader(HTMLParser):
        void, stack, ids = {"meta"}, [], []

        def handle_starttag(self, tag, attributes):
            self.ids += [value for key, value in attributes if key == "id"]
            if tag not in self.void:
                self.stack.append(tag)

        def handle_endtag(self, tag):
            assert self.stack.pop() == tag

    reader = Reader()
    reader.feed((made / "r.html").read_text())
    assert reader.stack == [] and len(reader.ids) == len(set(reader.ids)) > 10


def test_names_are_escaped_and_numbers_are_shown(made):
    text, twin = (made / "r.html").read_text(), (made / "r.md").read_text()
    assert "<b>&" not in text and "&lt;b&gt;&amp;" in text
    for told in (
        "no difference shown",
        "same on every item",
        "-50.0",
        "-2.5",
        "2.0e-04",
        "1.25x",
        "prompt speed at 2,048",
        "0.62x",
    ):
        assert told in text and told in twin
    assert "Made with torch 1." in text


def test_a_page_of_one_kind_of_record(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(quality("int8", 0.3, 1e-3)) + "\n")
    main(["report", str(tmp_path / "a.jsonl"), "-o", str(tmp_path / "r.html")])
    assert (tmp_path / "r.html").read_text().count("<svg") == 1


def test_what_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="holds no result records"):
        main(["report", str(tmp_path), "-o", str(tmp_path / "r.html")])
    (tmp_path / "a.jsonl").write_text(json.dumps(quality("int8", 0.3, 1e-3)) + "\n")
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(SystemExit, match="r.pdf is not a page; name it r.html"):
        main(["report", str(tmp_path), "-o", str(tmp_path / "r.pdf")])
    main(["report", str(tmp_path), "-o", str(tmp_path / "r.html")])
    assert "left out other.jsonl" in capsys.readouterr().err


def test_the_report_of_the_shipped_results_is_made(tmp_path):
    """Records of every task lie there side by side."""
    results = Path(__file__).parent.parent / "results"
    main(["report", str(results), "-o", str(tmp_path / "report.html")])
    page = (tmp_path / "report.html").read_text()
    assert "int8" in page and "</html>" in page
