"""`python -m eval profile` on a tiny model: what is counted is exact, what is timed is there and finite."""

from __future__ import annotations

import json
import math

import letters
import pytest
import torch

from eval import contenders, models, profile, records, speed
from eval.__main__ import main
from hf_kvcache import KVCache

PROMPTS = [{"prompt": "count to seven"}, {"prompt": "x" * 40, "new_tokens": 9}]


@pytest.fixture(scope="module")
def loaded():
    return models.Loaded(letters.model(), letters.tokenizer(), "tiny")


@pytest.fixture
def cli(loaded, tmp_path, monkeypatch):
    """`python -m eval profile` on the tiny model."""
    monkeypatch.setattr(models, "load_model", lambda *args: loaded)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in PROMPTS))

    def start(*arguments):
        main(["profile", "--prompts", str(prompts), "--out", str(out), "--new-tokens", "6", *map(str, arguments)])
        return records.read(out)

    start.prompts, start.out = prompts, out
    yield start
    loaded.model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("spec", ["full", "int8", "sink(2,6)", "dynamic"])
def test_numbers_that_are_not_timings(cli, loaded, spec):
    found = cli("--spec", spec)
    assert [record["settings"]["prompt_tokens"] for record in found] == [14, 40]
    for record, new in zip(found, (6, 9), strict=True):
        settings, m = record["settings"], record["metrics"]
        assert record["task"] == "profile" and record["spec"] == spec and settings["new_tokens"] == new
        text = PROMPTS[settings["request"]]["prompt"]
        cache = contenders.make_cache(spec, loaded.model.config)
        contenders.use_attention(loaded.model, spec, "kvcache")
        options = {models.cache_argument(loaded.model): cache, "max_new_tokens": new, "min_new_tokens": new}
        loaded.model.generate(**loaded.tokenizer(text, return_tensors="pt"), **options, do_sample=False)
        assert m["nbytes"] == contenders.stored_bytes(cache)
        assert m["peak_bytes"] >= m["nbytes"]
        steps = m["steps"]
        assert (
            steps["context"] == list(range(len(text) + 1, len(text) + new))
            and steps["context"][-1] == cache.get_seq_length()
        )
        assert steps["bytes_moved"][-1] == speed.weight_bytes(loaded.model) + m["nbytes"]
        times = [
            m[name] for name in ("time_to_first_token_s", "tokens_per_second", "step_ms", "step_ms_p10", "step_ms_p90")
        ]
        assert all(math.isfinite(time) and time > 0 for time in [*times, *steps["ms"], *steps["empty_ms"]])
        assert len(steps["ms"]) == len(steps["empty_ms"]) == new - 1 and m["weight_bytes"] == speed.weight_bytes(
            loaded.model
        )


def test_it_decodes_what_generate_does(loaded):
    ids = torch.arange(5, 25)[None]
    loaded.model.set_attn_implementation("sdpa")
    made = loaded.model.generate(ids, max_new_tokens=7, min_new_tokens=7, do_sample=False)[0, 20:].tolist()
    course = profile.course(loaded.model, profile.Request(ids, 7), lambda: KVCache(loaded.model.config))
    assert course.tokens == made and len(made) == 7 and course.contexts == [21, 22, 23, 24, 25, 26]


def test_a_profile_resumes(cli, capsys):
    first = cli("--spec", "int8", "--limit", 1)
    again = cli("--spec", "int8", "full")
    assert again[0] == first[0] and len(again) == 4 and len({records.identity(r) for r in again}) == 4
    capsys.readouterr()
    assert cli("--spec", "int8", "full") == again
    printed = capsys.readouterr().out
    assert printed.count("tokens of context") == 2 and "GB/s" in printed


def test_messages_go_through_the_chat_template(cli, loaded, monkeypatch):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    monkeypatch.setattr(loaded.tokenizer, "chat_template", template)
    cli.prompts.write_text('{"messages": [{"role": "user", "content": "hello"}]}\n')
    assert cli("--spec", "full")[0]["settings"]["prompt_tokens"] == 6


def test_without_a_file_the_embedded_text_is_asked(loaded):
    asked = profile.embedded(loaded, 8)
    assert [request.ids.shape[1] for request in asked] == list(profile.LENGTHS)
    text = models.load_text().content[: profile.LENGTHS[0]]
    assert loaded.tokenizer.decode(asked[0].ids[0]).startswith(text[:50])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "prompts.jsonl:1: a request is a prompt or messages"),
        ('{"prompt": "a", "messages": []}', "a request is a prompt or messages"),
        ('{"prompt": "a", "tokens": 3}', "a request is a prompt or messages"),
        ('{"prompt": "a", "new_tokens": 1}', "new_tokens=1 leaves no step to time"),
        ('{"prompt": ""}', "0 tokens and 6 new ones"),
        ('{"prompt": "a", "new_tokens": 5000}', "takes 1 to 4096 in all"),
        ("", "there are no requests"),
    ],
)
def test_bad_requests_are_one_line(cli, line, message):
    cli.prompts.write_text(line + "\n" if line else "")
    with pytest.raises(SystemExit, match=message) as error:
        cli()
    assert "\n" not in str(error.value) and not cli.out.exists()


# ---- growth ------------------------------------------------------------------------------------------------

WEIGHTS, TOKEN = 10**8, 10**4  # bytes


def steps(copies=0.0, fixed=0.0, noise=0.0, load=1.0):
    """Steps at 1 GB/s that move weights, and the cache's bytes `copies` times more often than once.

    The machine is `load` times slower for long contexts.
    """
    made = []
    for n in range(100, 4000, 50):
        slow = load if n > 2000 else 1
        seconds = fixed + 1e-9 * (WEIGHTS + TOKEN * n * (1 + copies)) + noise * (n // 50 % 3 - 1)
        made.append(profile.Step(n, slow * seconds, slow * (fixed + 1e-9 * WEIGHTS), WEIGHTS + TOKEN * n))
    return made


def grown(**options):
    return profile.growth(profile.bins(steps(**options)), WEIGHTS)


@pytest.mark.parametrize("load", [1, 3])
def test_time_that_grows_as_the_bytes_do_is_explained(load):
    found = grown(load=load)
    assert found.measured == pytest.approx(TOKEN / WEIGHTS) == pytest.approx(found.explained)
    assert not found.faster


@pytest.mark.parametrize(
    ("options", "faster"),
    [
        ({"copies": 2}, True),  # a history that is read, copied and written in every step
        ({"copies": 0.2}, False),
        ({"copies": 2, "noise": 1.0}, False),  # less than the noise
        ({"copies": 2, "noise": 0.001}, True),
        ({"copies": 2, "load": 3}, True),
        ({"copies": -1}, False),  # flat
        ({"fixed": 0.05}, False),
    ],
)
def test_time_that_grows_faster_is_seen(options, faster):
    assert grown(**options).faster == faster


def test_a_stall_is_no_finding():
    stalled = steps()
    stalled[-1] = stalled[-1]._replace(seconds=5.0)
    assert not profile.growth(profile.bins(stalled), WEIGHTS).faster


def test_the_warning_names_the_remedy(cli):
    record = cli("--spec", "full", "--limit", 1)[0]

    def said(made):
        names = ("context", "ms", "empty_ms", "bytes_moved")
        record["metrics"]["steps"] = dict(zip(names, map(list, zip(*made, strict=True)), strict=True))
        return profile.verdict([record])

    record["metrics"]["weight_bytes"] = WEIGHTS
    assert "warning" in said(steps(copies=3)) and "--attn" not in said(steps(copies=3))
    record["settings"]["attn"] = "sdpa"
    assert "try --attn kvcache" in said(steps(copies=3))
    assert "warning" not in said(steps())


def test_a_report_leaves_profiles_alone(cli, tmp_path):
    cli("--spec", "dynamic", "int8", "--limit", 1)
    with pytest.raises(SystemExit, match="there are no result records"):
        main(["report", str(cli.out.parent), "-o", str(tmp_path / "report.html")])
