"""Questions: items from files and from generators, and what the listing says."""

from __future__ import annotations

import json

import letters
import pytest

from eval import tasks
from eval.__main__ import main

FILES = {
    "lambada_openai.jsonl": [{"context": "He closed the", "continuation": "door"}],
    "arc_easy.jsonl": [{"query": "Question: Is it?", "choices": ["yes", "no"], "gold": 1}],
    "piqa.jsonl": [{"query": "Question: How?\n", "choices": ["so", "thus"], "gold": 0}],
    "gsm8k.jsonl": [{"context": f"How many is {n}?", "chain_of_thought": "So", "answer": str(n)} for n in range(6)],
}


@pytest.fixture
def folder(tmp_path):
    for name, lines in FILES.items():
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def made(items=6, length=900, seed=0):
    return tasks.Made(letters.tokenizer(), items, length, seed)


def test_items_of_files(folder):
    load = lambda name: tasks.load(name, folder, made(0))  # noqa: E731
    assert load("lambada") == [tasks.Item("He closed the", (" door",))]
    assert load("arc_easy") == [tasks.Item("Question: Is it?\nAnswer:", (" yes", " no"), 1)]
    assert load("piqa") == [tasks.Item("Question: How?\nAnswer:", (" so", " thus"), 0)]
    first, second = load("gsm8k")
    assert first.answers == ("4",) and second.answers == ("5",)
    assert first.context.startswith("Question: How many is 0?\nAnswer: So #### 0\n\nQuestion: How many is 1?")
    assert first.context.endswith("#### 3\n\nQuestion: How many is 4?\nAnswer:")
    assert tasks.load("gsm8k", folder, made(1)) == [first]


@pytest.mark.parametrize("name", ["kv", "tracking", "copy"])
@pytest.mark.parametrize("length", [900, 2000])
def test_generated_items_fill_their_length_and_repeat(name, length):
    items = tasks.load(name, None, made(length=length))
    sizes = [len(tasks.encode(letters.tokenizer(), item)[0][0]) + len(item.answers[0]) for item in items]
    assert len(items) == 6 and max(sizes) < length * 1.15 and min(sizes) > length * 0.8
    assert items == tasks.load(name, None, made(length=length))
    assert items != tasks.load(name, None, made(length=length, seed=1))
    assert len(set(items)) == 6


def test_answers_stand_in_the_context_and_only_one_is_right():
    for item in tasks.load("kv", None, made()):
        key = item.context.rsplit('The value of "', 1)[1].split('"')[0]
        assert f'"{key}": "{item.answers[0]}"' in item.context
        assert len(set(item.answers)) == tasks.KEYS and all(f'"{answer}"' in item.context for answer in item.answers)
    for item in tasks.load("tracking", None, made()):
        asked, values = item.context.rsplit("VAR ", 1)[1].split()[0], {}
        for line in item.context.splitlines()[:-1]:
            if line.startswith("VAR "):
                name, value = line[4:-1].split(" = ")
                values[name] = values[value[4:]] if value.startswith("VAR ") else value  # never used before it is set
        assert values[asked] == item.answers[0].strip()
        assert {answer.strip() for answer in item.answers} == set(values.values())
    for item in tasks.load("copy", None, made()):
        text, start = item.context.split(".\n\n")
        assert text == start + item.answers[0] and len(item.answers[0].split()) > 8


def test_depths_of_keys_go_through_the_object():
    places = []
    for item in tasks.load("kv", None, made(items=5)):
        lines = item.context.split("{")[1].split("}")[0].split(",\n")
        places.append([item.answers[0] in line for line in lines].index(True) / (len(lines) - 1))
    assert places[0] == 0 and places[-1] == 1 and places == sorted(set(places))


def test_encode_gives_back_the_text():
    tokenizer = letters.tokenizer()
    (context, first), (same, second) = tasks.encode(tokenizer, tasks.Item("One ", ("two", "three")))
    assert context == same and tokenizer.decode(context) == "One"
    assert (tokenizer.decode(first), tokenizer.decode(second)) == (" two", " three")


def test_digest_tells_items_apart():
    a, b = tasks.Item("a", ("b",)), tasks.Item("a", ("c",))
    assert tasks.digest([a]) == tasks.digest([a]) != tasks.digest([b])


def test_what_is_refused(folder, monkeypatch):
    monkeypatch.delenv("HF_KVCACHE_DATA", raising=False)
    with pytest.raises(ValueError, match="'nope' is unknown; use one of lambada"):
        tasks.load("nope", None, made())
    with pytest.raises(ValueError, match="needs --data FOLDER or .HF_KVCACHE_DATA with piqa.jsonl"):
        tasks.load("piqa", tasks.data_folder(None), made())
    with pytest.raises(FileNotFoundError, match="does not exist"):
        tasks.data_folder(folder / "nowhere")
    (folder / "piqa.jsonl").write_text('{"query": "a"\n')
    with pytest.raises(ValueError, match="piqa.jsonl:1 is not JSON"):
        tasks.load("piqa", folder, made())
    (folder / "piqa.jsonl").write_text('{"query": "a"}\n')
    with pytest.raises(ValueError, match="without 'choices'"):
        tasks.load("piqa", folder, made())
    with pytest.raises(ValueError, match="length 40 has no room"):
        tasks.load("kv", None, made(length=40))


def test_the_listing_says_what_can_run_and_why_not(folder, capsys, monkeypatch):
    (folder / "piqa.jsonl").unlink()
    monkeypatch.setattr(tasks, "no_hub", lambda: "no model hub is reachable (Test)")
    monkeypatch.setenv("HF_KVCACHE_DATA", str(folder))
    main(["tasks"])
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert lines["lambada"].endswith("ready") and lines["kv"].endswith("ready")
    assert lines["piqa"].endswith("not here: piqa.jsonl is not in the folder")
    assert lines["wikitext"].endswith("not here: no model hub is reachable (Test)")


def test_without_a_hub_there_is_a_reason(monkeypatch):
    import huggingface_hub

    class Session:
        def head(self, *args, **options):
            raise OSError("no route")

    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    assert tasks.no_hub() == "no model hub is reachable (OSError)"
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None)
    assert "lm-eval is not installed" in tasks.no_hub()
