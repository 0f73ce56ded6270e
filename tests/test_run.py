"""Sweeps over models, caches and tasks on a tiny model: scores, pairs, resuming, refusals."""

from __future__ import annotations

import json
import math

import letters
import pytest
import torch

from eval import contenders, models, paired, records, run, tasks
from eval.__main__ import main
from hf_kvcache.likelihood import Scored


@pytest.fixture(scope="module")
def loaded():
    return models.Loaded(letters.model(), letters.tokenizer(), "tiny")


@pytest.fixture
def cli(loaded, tmp_path, monkeypatch):
    """`python -m eval run` on the tiny model; `measured` are the cells that were not found."""
    lines = [
        {
            "query": f"Question: Is {n} more than {n * 7 % 5}, or less?",
            "choices": ["it is so", "it is not", "no"],
            "gold": n % 3,
        }
        for n in range(12)
    ]
    (tmp_path / "arc_easy.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [{"context": f"Count to {n} and", "continuation": "stop"} for n in range(6)]
    (tmp_path / "lambada_openai.jsonl").write_text("".join(json.dumps(line) + "\n" for line in words))
    config = tmp_path / "c.yaml"
    config.write_text("models: [tiny]\nspecs: [full, int8]\ntasks: [arc_easy]\nitems: 12\nbatch: 8\n")
    measured = []
    real = run.measure
    monkeypatch.setattr(models, "load_model", lambda *args: loaded)
    monkeypatch.setattr(run, "measure", lambda *args: measured.append(args[3]) or real(*args))
    out = tmp_path / "out.jsonl"

    def start(*arguments):
        main(["run", "--config", str(config), "--data", str(tmp_path), "--out", str(out), *map(str, arguments)])
        return records.read(out)

    start.measured, start.out, start.config = measured, out, config
    return start


# ---- pairs -------------------------------------------------------------------------------------------------


def test_paired_by_hand():
    found = paired.paired([1, 0, 1, 1], [1, 1, 0, 0])
    assert found.difference == 0.25 and (found.better, found.worse) == (2, 1)
    assert found.difference_se == pytest.approx(math.sqrt((0.0625 + 1.5625 + 2 * 0.5625) / 3 / 4))
    assert paired.paired([1, 0], [1, 0]) == (0.0, 0.0, 0, 0, 1.0)
    assert paired.mean_se([3.0]) == (3.0, 0.0)


def test_sign_test_by_hand():
    assert paired.sign_test(0, 0) == paired.sign_test(3, 3) == 1
    assert paired.sign_test(0, 5) == paired.sign_test(5, 0) == 2 / 32
    assert paired.sign_test(1, 5) == pytest.approx(2 * (1 + 6) / 64)


def test_holm_by_hand():
    assert paired.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert paired.holm([0.9, 0.5]) == [1.0, 1.0] and paired.holm([]) == []


# ---- scores ------------------------------------------------------------------------------------------------


def test_judge():
    scored = [
        Scored(torch.tensor([-1.0, -2.0]), torch.tensor([True, False])),
        Scored(torch.tensor([-2.5]), torch.tensor([True])),
    ]
    assert run.judge(tasks.CHOICE, scored, 0) == (0.0, -3.0)
    assert run.judge(tasks.CHOICE, scored, 1) == (1.0, -2.5)
    assert run.judge(tasks.WORD, scored, 0) == (0.0, -3.0) and run.judge(tasks.WORD, scored, 1) == (1.0, -2.5)
    assert run.judge(tasks.COPY, scored, 0) == (0.5, -3.0)


@pytest.mark.parametrize(
    ("text", "number"),
    [("so 3 + 4 = 7 #### 7\n\nQuestion: 9", 7), (" It is 1,200.5.", 1200.5), ("none", None), ("-2 Question: 5", -2)],
)
def test_last_number(text, number):
    assert run.last_number(text) == number


def test_generated_answers(loaded, monkeypatch):
    """The model's own last number is right, another is not, and the cache that was given has been used."""
    monkeypatch.setattr(run, "NEW_TOKENS", 40)
    held = []
    for spec in ("dynamic", "full"):
        stored = run.Stored()
        item = tasks.Item("1 2 3 4 5 6 7 8 9", ("7",))
        ids = loaded.tokenizer(item.context, return_tensors="pt")
        made = loaded.model.generate(**ids, max_new_tokens=run.NEW_TOKENS, do_sample=False)
        number = run.last_number(loaded.tokenizer.decode(made[0, ids["input_ids"].shape[1] :]))
        cache = contenders.make_cache(spec, loaded.model.config)
        right = run.generated(loaded, item._replace(answers=(str(number),)), cache, stored, lambda n: None)
        held.append((cache.get_seq_length(), right if number is not None else 1.0))
        assert stored.nbytes == contenders.stored_bytes(cache) and stored.tokens == cache.get_seq_length()
    assert held[0][0] > len("1 2 3 4 5 6 7 8 9") and held[0] == held[1]


# ---- the command -------------------------------------------------------------------------------------------


def test_cells_are_recorded_and_compared(cli, capsys):
    found = {record["spec"]: record for record in cli("--specs", "full", "int8", "zeroed")}
    assert list(found) == ["dynamic", "full", "int8", "zeroed"]
    base, full, int8, zeroed = (found[spec]["metrics"] for spec in found)
    assert full["right"] == base["right"] and full["logprob"] == pytest.approx(base["logprob"], abs=1e-4)
    assert (full["difference"], full["better"], full["worse"], full["sign_p"]) == (0, 0, 0, 1)
    assert int8["bytes_ratio"] < 1 and abs(int8["logprob_difference"]) > 1e-6
    assert abs(zeroed["logprob_difference"]) > 10 * abs(int8["logprob_difference"])
    assert 0 < base["accuracy"] < 1 and base["accuracy"] == sum(base["right"]) / 12
    settings = found["int8"]["settings"]
    assert settings["items"] == 12 and settings["step"] == 1 and settings["batch"] == 8
    printed = capsys.readouterr().out
    assert "better" in printed and "of the bytes" in printed


def test_accuracy_is_that_of_uncached_forwards(cli, loaded):
    """Scored a second time, by hand: one forward for each answer, no cache."""
    right = []
    for line in (cli.config.parent / "arc_easy.jsonl").read_text().splitlines():
        line, sums = json.loads(line), []
        for choice in line["choices"]:
            ids = loaded.tokenizer(f"{line['query']}\nAnswer: {choice}", return_tensors="pt")["input_ids"]
            count = len(choice) + 1
            with torch.no_grad():
                logprobs = loaded.model(ids, use_cache=False).logits[0, -count - 1 : -1].log_softmax(-1)
            sums.append(logprobs.gather(-1, ids[0, -count:, None]).sum().item())
        right.append(float(max(range(3), key=sums.__getitem__) == line["gold"]))
    assert cli()[0]["metrics"]["right"] == right


def test_a_run_resumes_and_a_limit_is_another_cell(cli):
    cli("--specs", "full")
    assert cli.measured == ["dynamic", "full"]
    cli()
    assert cli.measured == ["dynamic", "full", "int8"]
    assert len(cli("--limit", 5)) == 6 and cli.measured[3:] == ["dynamic", "full", "int8"]
    cli.out.write_text(cli.out.read_text()[:-20])  # killed in the middle of a line
    assert len(cli("--limit", 5)) == 6 and cli.measured[6:] == ["int8"]
    assert len({records.identity(record) for record in records.read(cli.out)}) == 6


def test_words_have_a_perplexity(cli):
    metrics = cli("--tasks", "lambada")[0]["metrics"]
    assert metrics["perplexity"] == pytest.approx(math.exp(-sum(metrics["logprob"]) / 6), rel=1e-5)


def test_generated_tasks_need_no_folder(cli, monkeypatch):
    monkeypatch.delenv("HF_KVCACHE_DATA", raising=False)
    cli.config.write_text("models: [tiny]\nspecs: [full]\ntasks: [{name: copy, length: 200, items: 3}]\nbatch: 4\n")
    main(["run", "--config", str(cli.config), "--out", str(cli.out)])
    record = records.read(cli.out)[1]
    assert record["settings"]["length"] == 200 and record["settings"]["items"] == 3
    assert 0 <= record["metrics"]["accuracy"] <= 1


def test_no_compression_is_no_result(cli, capsys):
    with pytest.raises(SystemExit, match="1 cells gave no result: arc_easy with int4.*no compression happened"):
        cli("--specs", "int4", "full")
    assert [record["spec"] for record in records.read(cli.out)] == ["dynamic", "full"]
    assert "refused arc_easy with int4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [a]\nspecs: [full]\n", "needs a list under tasks"),
        ("models: [a]\nspecs: [full]\ntasks: [kv]\nitem: 3\n", "must be a mapping with some of models"),
        ("- a\n", "must be a mapping"),
        ("models: [\n", "is not YAML"),
        ("models: [a]\nspecs: [full]\ntasks: [nope]\n", "'nope' is unknown"),
        ("models: [a]\nspecs: [full]\ntasks: [{name: kv, size: 3}]\n", "give a name, and perhaps length and items"),
        ("models: [a]\nspecs: [full]\ntasks: [kv]\nitems: 0\n", "0 items answer nothing"),
        ("models: [a]\nspecs: [full]\ntasks: [piqa]\n", "piqa.jsonl is not in the folder"),
    ],
)
def test_bad_configurations_are_one_line(cli, text, message):
    cli.config.write_text(text)
    with pytest.raises(SystemExit, match=message) as error:
        cli()
    assert "\n" not in str(error.value) and not cli.out.exists()


def test_the_shipped_configurations_are_whole(loaded):
    folder = run.Path(run.__file__).parent / "configs"
    for path in sorted(folder.glob("*.yaml")):
        config = run.read_config(path)
        assert config["specs"] and all(tasks.task(name) for name in config["tasks"])
        assert contenders.available(config["specs"], loaded.model.config)[0] == "dynamic"
