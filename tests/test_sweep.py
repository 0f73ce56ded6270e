"""Sweeps on several workers give the records of a serial run, none twice, also when a worker is killed."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import letters
import pytest
import torch

from eval import cluster, models, ranks, records, run, tasks
from eval.__main__ import main
from eval.ranks import Ranks
from hf_kvcache import KVCache, likelihood

ROOT = Path(__file__).parent.parent
CONFIG = """
models: [MODEL]
specs: [full, int8, "sink(2,6)", int4]
tasks: [arc_easy, lambada, {name: copy, length: 140, items: 3}]
items: 12
batch: 4
"""
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, a tokenizer, tasks and a configuration as files."""
    path = tmp_path_factory.mktemp("sweep")
    model = letters.model()
    model.save_pretrained(path / "tiny")
    letters.tokenizer().save_pretrained(path / "tiny")
    choices = ["it is so", "it is not", "no"]
    lines = [
        {"query": f"Is {n * 37} more than {n}?" + " So?" * (n % 5), "choices": choices, "gold": n % 3}
        for n in range(12)
    ]
    words = [{"context": f"Count to {n * 11} and", "continuation": "stop"} for n in range(6)]
    for name, made in (("arc_easy", lines), ("lambada_openai", words)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made))
    (path / "c.yaml").write_text(CONFIG.replace("MODEL", str(path / "tiny")))
    return path


@pytest.fixture(scope="module")
def serial(folder):
    """The records of this process alone, and what it refused: int4 keeps such short contexts plain."""
    return start(folder, folder / "serial.jsonl")


def arguments(folder, out):
    return ["run", "--config", str(folder / "c.yaml"), "--data", str(folder), "--out", str(out)]


def start(folder, out, *more):
    with pytest.raises(SystemExit, match="error: 3 cells gave no result: .*int4") as error:
        main([*arguments(folder, out), *more])
    return comparable(out), sorted(str(error.value).removeprefix("error: 3 cells gave no result: ").split("; "))


def comparable(out):
    """Records without the machine, in one order; none is there twice."""
    found = [{key: value for key, value in record.items() if key != "machine"} for record in records.read(out)]
    assert len({records.identity(record) for record in found}) == len(found)
    return sorted(found, key=records.identity)


def test_the_serial_run_is_what_others_are_compared_with(serial):
    found, refused = serial
    assert len(found) == 12 and len(refused) == 3
    assert {record["task"] for record in found} == {"arc_easy", "lambada", "copy"}


# ---- items over processes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["full", "sink(2,6)"])  # padded batches, and batches of one length
@pytest.mark.parametrize("of", [1, 2, 3, 9])
def test_parts_are_whole_batches_of_all(spec, of, monkeypatch):
    model, draw = letters.model(), torch.Generator().manual_seed(5)
    requests = []
    for _ in range(11):
        context = torch.randint(2, 258, (int(torch.randint(5, 9, (), generator=draw)),), generator=draw).tolist()
        requests += [likelihood.Request(tuple(context), (n, n + 1)) for n in (7, 90)]

    def scored(asked):
        fed = []
        prefill = likelihood.Reader.prefill
        with monkeypatch.context() as patch:
            patch.setattr(
                likelihood.Reader,
                "prefill",
                lambda self, contexts, cache: fed.append(contexts) or prefill(self, contexts, cache),
            )
            make = lambda: KVCache.from_spec(model.config, spec)  # noqa: E731
            return likelihood.score(model, asked, make, batch_size=3), fed

    want, batches = scored(requests)
    got, dealt = {}, []
    for number in range(of):
        mine = likelihood.part(requests, KVCache.from_spec(model.config, spec), 3, number, of)
        found, fed = scored([requests[index] for index in mine])
        assert not set(got) & set(mine)
        got |= dict(zip(mine, found, strict=True))
        dealt += fed
    assert sorted(dealt) == sorted(batches) and len(got) == len(requests)
    for index, one in enumerate(want):
        assert torch.equal(one.logprobs, got[index].logprobs) and torch.equal(one.greedy, got[index].greedy)


def test_generated_answers_are_dealt_out(monkeypatch):
    loaded = models.Loaded(letters.model(), letters.tokenizer(), "tiny")
    monkeypatch.setattr(run, "NEW_TOKENS", 5)
    monkeypatch.setattr(run, "last_number", len)
    items = [tasks.Item("1" * (n + 3), ("x" * n,)) for n in range(5)]
    config = {**run.DEFAULTS}

    def part(rank, size):
        return run.share(loaded, tasks.GENERATE, items, [], "full", config, Ranks(rank, size))

    whole, parts = part(0, 1), [part(rank, 2) for rank in (0, 1)]
    assert parts[0].scored | parts[1].scored == whole.scored and len(parts[0].scored) == 3
    assert sum(one.nbytes for one in parts) == whole.nbytes and sum(one.tokens for one in parts) == whole.tokens


def test_answers_may_come_in_any_order(serial, tmp_path):
    """The baseline's last: the others wait for it. Every order gives the same records."""
    answers = {
        "dynamic": run.Answers([1.0, 0.0], [-1.0, -2.0], 40, 10),
        "int8": run.Answers([0.0, 0.0], [-1.5, -2.0], 20, 10),
        "int4": run.Answers([1.0, 0.0], [-1.0, -2.0], 40, 10),  # not smaller: refused
        "full": run.Answers([1.0, 0.0], [-1.0, -2.0], 40, 10),
    }
    frames = [{**serial[0][0], "spec": spec, "machine": {}} for spec in answers]
    made = []
    for number, order in enumerate(itertools.permutations(frames)):
        out = tmp_path / f"{number}.jsonl"
        book = run.Book({"name": "arc_easy"}, frames, {}, out)
        assert book.missing() == frames
        for frame in order:
            book.add(frame, answers[frame["spec"]])
        made.append(comparable(out))
        assert len(book.refused) == 1 and "arc_easy with int4: holds 4 bytes" in book.refused[0]
    assert all(one == made[0] for one in made) and len(made[0]) == 3
    known = {record["spec"]: record["metrics"] for record in made[0]}
    assert known["int8"]["difference"] == -0.5 and known["int8"]["bytes_ratio"] == 0.5


LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
LAUNCH += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
FATAL = """
import os, pathlib, signal, sys
from eval import run
from eval.__main__ import main
real, calls, mark = run.measure, [], pathlib.Path({mark!r})
def measure(*args):
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) == 2 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args)
run.measure = measure
main(sys.argv[1:])
"""


def launch(*command):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([*LAUNCH, *command], env=environment, capture_output=True, text=True, timeout=240)


def test_two_processes_write_the_records_of_one(folder, serial, tmp_path):
    done = launch("-m", "eval", *arguments(folder, tmp_path / "out.jsonl"))
    assert comparable(tmp_path / "out.jsonl") == serial[0], done.stderr
    assert done.returncode and done.stderr.count("error: 3 cells gave no result") == 1
    assert done.stdout.count("of the bytes") == 12


def test_a_killed_process_costs_nothing_but_time(folder, serial, tmp_path):
    out, script = tmp_path / "out.jsonl", tmp_path / "fatal.py"
    script.write_text(FATAL.format(mark=str(tmp_path / "killed")))
    done = launch("--max_restarts", "1", str(script), *arguments(folder, out), "--tasks", "arc_easy", "--specs", "int8")
    assert (tmp_path / "killed").exists() and done.returncode == 0, done.stderr
    kept = ("dynamic", "int8")
    assert comparable(out) == [r for r in serial[0] if r["task"] == "arc_easy" and r["spec"] in kept]
    assert done.stdout.count("of the bytes") == 3, "the first cell is measured, and then known"


def test_only_a_sweep_is_shared(monkeypatch, folder, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="quality runs in one process, and 2 were launched"):
        main(["quality"])
    monkeypatch.setattr(run, "join", lambda: Ranks(0, 2))
    with pytest.raises(SystemExit, match="start one process, not 2"):
        main([*arguments(folder, tmp_path / "out.jsonl"), "--ray"])


def test_each_process_has_a_device_of_its_own():
    two = Ranks(1, 2, "cuda:1")
    assert [two.device_of(asked) for asked in (None, "cuda", "cpu")] == ["cuda:1", "cuda:1", "cpu"]
    assert [Ranks().device_of(asked) for asked in (None, "auto")] == [None, "auto"]
    with pytest.raises(ValueError, match='device "auto" spreads one model over all GPUs, and there are 2'):
        two.device_of("auto")


def test_one_process_where_several_were_asked_for_is_told(monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert ranks.join() == Ranks() and "--multi_gpu" in capsys.readouterr().err


# ---- cells over a cluster ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray():
    """A cluster of this machine with two workers."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RAY_worker_niceness", "0")  # 15 starves beside other tests, until a worker is given up
        ray.init(
            address="local", num_cpus=2, num_gpus=0, include_dashboard=False, logging_level="ERROR", log_to_driver=False
        )
        yield ray
        ray.shutdown()


@needs_ray
def test_a_cluster_writes_the_records_of_one(ray, folder, serial, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert start(folder, out, "--ray") == serial
    printed = capsys.readouterr().out
    assert "ray: 1 nodes, 0 GPUs, 2 CPUs" in printed and printed.count("of the bytes") == 12
    before = out.read_text()
    assert start(folder, out, "--ray") == serial and out.read_text() == before  # nothing is measured again


@needs_ray
def test_a_killed_worker_costs_nothing_but_time(ray, folder, serial, tmp_path, monkeypatch):
    mark, real = tmp_path / "killed", cluster.answer

    def answer(*args):
        if args[3] == "int8" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)

    monkeypatch.setattr(cluster, "answer", answer)
    assert start(folder, tmp_path / "out.jsonl", "--ray") == serial and mark.exists()


@needs_ray
def test_a_cell_that_kills_every_worker_is_refused(ray, folder, serial, tmp_path, monkeypatch):
    real = cluster.answer

    def answer(*args):
        if args[3] == "int8":
            os.kill(os.getpid(), signal.SIGKILL)
        if args[3] == "full":
            raise RuntimeError("out of memory")
        return real(*args)

    monkeypatch.setattr(cluster, "answer", answer)
    monkeypatch.setattr(cluster, "RETRIES", 0)
    out = tmp_path / "out.jsonl"
    with pytest.raises(SystemExit) as error:
        main([*arguments(folder, out), "--ray", "--tasks", "arc_easy", "arc_easy"])
    assert "arc_easy with full: failed on a worker (RuntimeError: out of memory)" in str(error.value)
    assert "arc_easy with int8: no worker finished it in 1 attempts" in str(error.value)
    assert comparable(out) == [
        r for r in serial[0] if r["task"] == "arc_easy" and r["spec"] in ("dynamic", "sink(2,6)")
    ]


@needs_ray
def test_a_task_without_its_baseline_has_no_records(ray, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(
        cluster, "answer", lambda *args: "no" if args[3] == "dynamic" else run.Answers([1.0], [-1.0], 1, 1)
    )
    with pytest.raises(SystemExit, match="error: 1 cells gave no result: lambada with dynamic: no$"):
        main([*arguments(folder, tmp_path / "out.jsonl"), "--ray", "--tasks", "lambada"])
    assert not (tmp_path / "out.jsonl").exists()


@needs_ray
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--ray-cpus", "3"], "--ray-cpus 3: the cluster has 2"),
        (["--ray-cpus", "0"], "--ray-cpus 0: a cell needs at least 1"),
        (["--models", "nowhere"], "model 'nowhere'.*could not be loaded"),
    ],
)
def test_refusals_of_a_cluster_are_one_line(ray, folder, tmp_path, more, message):
    with pytest.raises(SystemExit, match=message) as error:
        main([*arguments(folder, tmp_path / "out.jsonl"), "--ray", *more])
    assert "\n" not in str(error.value)


def test_without_ray_the_extra_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit, match=r"--ray needs the package ray, .*pip install 'hf-kvcache\[sweep\]'"):
        main([*arguments(folder, tmp_path / "out.jsonl"), "--ray"])
