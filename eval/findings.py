"""What do the records say, and how sure is it?

One model at a time. Of each task the records that can share a table are used: those whose settings agree with the
largest number of others. Claims are cautious by construction:

- an answer task shows a loss only if its sign test, adjusted for all comparisons of the report (`paired.holm`), is
  below 0.05; otherwise "no difference shown", however the two percentages look;
- predictions count as kept where the mean KL divergence from the full cache is at most 0.01 nats a token and perplexity
  rises by at most 1 %;
- a cache with all kinds of evidence goes before one that lacks what others have: a test not made finds nothing.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from eval.contenders import BASELINE, ZEROED
from eval.paired import holm, mean_se, paired
from eval.records import Record, latest

LEVEL, KEPT_KL, KEPT_PERPLEXITY = 0.05, 0.01, 0.01
# What may differ between records of one table or picture
FREE = {
    "quality": ("attn",),
    "speed": ("attn", "context"),
    "prefill": ("attn", "scene", "rounds", "tokens"),
    "retrieval": ("attn", "length", "depth", "items"),
    "streaming": ("attn", "context"),
}
NOT_SHOWN = {"doctor", "profile", "decode"}  # they have a say of their own


class Answer(NamedTuple):
    """One cache on one task, against the stock full-precision cache on the same items. Shares of 1."""

    task: str
    spec: str
    items: int
    accuracy: float
    accuracy_se: float
    difference: float
    difference_se: float
    better: int
    worse: int
    sign_p: float
    adjusted: float  # p, given all the comparisons of this report
    bytes_ratio: float

    @property
    def verdict(self) -> str:
        """In words."""
        if self.spec == BASELINE:
            return "baseline"
        if self.spec == ZEROED:
            return "control"
        if not self.better and not self.worse:
            return "same on every item"
        if self.adjusted >= LEVEL:
            return "no difference shown"
        return "worse" if self.worse > self.better else "better"


class Row(NamedTuple):
    """A cache over all tasks; None where nothing was measured."""

    spec: str
    bytes_ratio: float | None
    kl: float | None
    perplexity_change: float | None
    answers: list[Answer]
    speed: float | None  # step time of the stock cache over this one's, at the longest context
    first: float | None  # time to the first token, likewise, of the prompt that most caches were fed
    retrieval: float | None
    complete: bool  # whether it was measured in every way that others were

    @property
    def judged(self) -> bool:
        """Whether anything was measured that a loss would show in."""
        return self.kl is not None or bool(self.answers)

    @property
    def kept(self) -> bool:
        """Whether no loss was shown."""
        lost = any(answer.verdict == "worse" for answer in self.answers)
        lost |= (self.kl or 0) > KEPT_KL or (self.perplexity_change or 0) > KEPT_PERPLEXITY
        return self.judged and not lost

    @property
    def verdict(self) -> str:
        """In words."""
        if self.spec == BASELINE:
            return "baseline"
        if not self.judged:
            return "not judged"
        return "loss" if not self.kept else "no loss shown" if self.complete else "not all measured"


class Findings(NamedTuple):
    """Everything a report shows, as numbers."""

    model: str
    others: list[str]  # models that are not shown
    quality: list[Record]
    speed: list[Record]
    prefill: list[Record]
    retrieval: list[Record]
    streaming: list[Record]
    answers: list[Answer]
    rows: list[Row]  # ranked
    context: int | None  # of the speed in `rows`
    prompt: int | None  # tokens of the prompts in `rows`
    used: list[Record]
    left_out: int  # records of this model with other settings


def find(records: Iterable[Record], model: str | None = None) -> Findings:
    """The findings for one model: as named, or the one with the most records."""
    known = [record for record in latest(list(records)) if record["task"] not in NOT_SHOWN]
    counts = Counter(record["model"] for record in known)
    if not counts:
        raise ValueError("there are no result records; measure something first: python -m eval quality, or run")
    if model is not None and model not in counts:
        raise ValueError(f"there are no records of model {model!r}; there are some of {', '.join(counts)}")
    model = model or counts.most_common(1)[0][0]
    mine = [record for record in known if record["model"] == model]
    chosen = {task: comparable(mine, task) for task in FREE}
    asked = [
        one for task in dict.fromkeys(r["task"] for r in mine) if task not in FREE for one in comparable(mine, task)
    ]
    answers = compare(asked)
    context = max((record["settings"]["context"] for record in chosen["speed"]), default=None)
    prompts = Counter(tokens for record in chosen["prefill"] if (tokens := prompt_of(record)))
    prompt = max(prompts, key=lambda tokens: (prompts[tokens], tokens), default=None)
    used = [record for group in chosen.values() for record in group] + asked
    first = {r["spec"]: 1 / r["metrics"]["ratio"] for r in chosen["prefill"] if prompt and prompt_of(r) == prompt}
    rows = rank(chosen["quality"], chosen["speed"], chosen["retrieval"], answers, context, first)
    others = [name for name in counts if name != model]
    left_out = len(mine) - len(used)
    return Findings(
        model,
        others,
        **chosen,
        answers=answers,
        rows=rows,
        context=context,
        prompt=prompt,
        used=used,
        left_out=left_out,
    )


def prompt_of(record: Record) -> int | None:
    """Tokens of a prompt that was fed in one forward; None for other scenes of ``eval.prefill``."""
    scene, _, tokens = record["settings"]["scene"].partition(" ")
    return int(tokens) if scene == "once" else None


def comparable(records: list[Record], task: str) -> list[Record]:
    """The records of a task whose settings agree: of several such groups the largest, then the latest."""
    groups: dict[str, list[Record]] = defaultdict(list)
    free = FREE.get(task, ())
    for record in records:
        if record["task"] == task:
            fixed = {key: value for key, value in record["settings"].items() if key not in free}
            groups[json.dumps(fixed, sort_keys=True)].append(record)
    return max(reversed(list(groups.values())), key=len, default=[])


def compare(records: list[Record]) -> list[Answer]:
    """Paired comparisons of answer records with the baseline of their task; tasks without one are left out."""
    found = []
    base = {record["task"]: record["metrics"]["right"] for record in records if record["spec"] == BASELINE}
    for record in records:
        if record["task"] in base:
            m, right = record["metrics"], record["metrics"]["right"]
            pair, (accuracy, error) = paired(right, base[record["task"]]), mean_se(right)
            about = {**pair._asdict(), "adjusted": pair.sign_p, "bytes_ratio": m["bytes_ratio"]}
            found.append(Answer(record["task"], record["spec"], len(right), accuracy, error, **about))
    tested = [i for i, answer in enumerate(found) if answer.spec not in (BASELINE, ZEROED)]
    for i, adjusted in zip(tested, holm([found[i].sign_p for i in tested]), strict=True):
        found[i] = found[i]._replace(adjusted=adjusted)
    return found


def rank(
    quality: list[Record],
    speed: list[Record],
    retrieval: list[Record],
    answers: list[Answer],
    context: int | None,
    first: dict[str, float],
) -> list[Row]:
    """Caches without a shown loss first, by bytes, the completely measured before others; then those with a loss."""
    q = {record["spec"]: record["metrics"] for record in quality}
    s = {r["spec"]: r["metrics"]["speed_ratio"] for r in speed if r["settings"]["context"] == context}
    found: dict[str, list[float]] = defaultdict(list)
    for record in retrieval:
        found[record["spec"]].append(record["metrics"]["accuracy"])
    specs = dict.fromkeys([*q, *(answer.spec for answer in answers), *found, *s, *first])
    rows = []
    for spec in specs:
        if spec == ZEROED:
            continue
        own = [answer for answer in answers if answer.spec == spec]
        ratio = q[spec]["bytes_ratio"] if spec in q else _mean([answer.bytes_ratio for answer in own])
        change = q[spec]["perplexity"] / q[spec]["baseline_perplexity"] - 1 if spec in q else None
        kl = q[spec]["kl_mean"] if spec in q else None
        complete = (spec in q or not q) and {a.task for a in own} == {a.task for a in answers}
        rows.append(
            Row(spec, ratio, kl, change, own, s.get(spec), first.get(spec), _mean(found.get(spec, [])), complete)
        )
    return sorted(rows, key=_order)


def _order(row: Row) -> tuple[Any, ...]:
    if row.spec == BASELINE:
        return (-1,)
    size = row.bytes_ratio if row.bytes_ratio is not None else float("inf")
    if row.kept:
        return (0 if row.complete else 1, size)
    worst = min((answer.difference for answer in row.answers), default=0.0)
    return (2 if row.judged else 3, row.kl if row.kl is not None else -worst, size)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


# ---- in words ----------------------------------------------------------------------------------------------


def recommend(found: Findings) -> list[str]:
    """Paragraphs: what to use, on what evidence, and what that evidence cannot say."""
    measured = [(row, row.bytes_ratio) for row in found.rows if row.spec != BASELINE and row.bytes_ratio is not None]
    kept = [(row, size) for row, size in measured if row.kept and size < 0.999]
    told = ["No cache that was measured holds fewer bytes without a shown loss: keep the full-precision cache."]
    least = 1.0
    if kept:
        best, least = kept[0]
        told = [f"Use {best.spec}. {evidence(best, found)}"]
    smaller = [row for row, size in measured if row.judged and size < 0.8 * least]
    if smaller:
        told.append(f"If memory counts for more than answers, look at {smaller[0].spec}. {evidence(smaller[0], found)}")
    return told + [text for text in (_controls(found), _limits(found)) if text]


def evidence(row: Row, found: Findings) -> str:
    """The numbers behind a row, as sentences."""
    told = [f"It holds {row.bytes_ratio:.2f} of the full-precision cache's bytes."]
    if row.kl is not None:
        told.append(
            f"Its predictions differ from the full cache's by {row.kl:.2g} nats a token (mean KL divergence), "
            f"and perplexity changes by {100 * (row.perplexity_change or 0):+.2f} %."
        )
    else:
        told.append("Its predictions were not compared token by token.")
    told.append(_answers(row.answers) if row.answers else "It was not asked to answer anything.")
    if row.retrieval is not None:
        told.append(f"It found {100 * row.retrieval:.0f} % of the hidden keys.")
    if row.first is not None and found.prompt is not None:
        told.append(f"The first token of a prompt of {found.prompt:,} comes {_pace(row.first)}.")
    if row.speed is not None and found.context is not None:
        told.append(f"At {found.context:,} tokens of context its decode step is {_pace(row.speed)}.")
    return " ".join(told)


def _pace(ratio: float) -> str:
    word = "slower than" if ratio < 0.98 else "faster than" if ratio > 1.02 else "as fast as"
    return f"{word} the stock cache's ({ratio:.2f}x)"


def _answers(answers: list[Answer]) -> str:
    lost = [answer for answer in answers if answer.verdict == "worse"]
    worst = min(answers, key=lambda answer: answer.difference)
    points = (
        f"{100 * worst.difference:+.1f} +- {100 * worst.difference_se:.1f} points on {worst.task}, {worst.items} items"
    )
    tasks = f"{len(answers)} task{'s' if len(answers) > 1 else ''}"
    if not lost:
        return f"On {tasks} no loss of right answers was shown (lowest: {points})."
    return f"On {', '.join(answer.task for answer in lost)} it gives fewer right answers (lowest: {points})."


def _controls(found: Findings) -> str:
    """What shows that the harness would have noticed."""
    told = []
    for spec, start in (("full", "The library's own full-precision cache"), (ZEROED, "A cache of zeros")):
        own = [answer for answer in found.answers if answer.spec == spec]
        if not own:
            continue
        if spec == "full":
            same = all(not answer.better and not answer.worse for answer in own)
            told.append(
                f"{start} gave {'the same' if same else 'not the same'} answers as the stock one on {_count(own)}."
            )
        else:
            left = ", ".join(f"{100 * answer.accuracy:.0f} % on {answer.task}" for answer in own)
            told.append(f"{start} is left with {left}: what a score is worth that reads nothing.")
    return " ".join(told)


def _count(answers: list[Answer]) -> str:
    return (
        f"all {sum(answer.items for answer in answers)} items of {len(answers)} task{'s' if len(answers) > 1 else ''}"
    )


def _limits(found: Findings) -> str:
    tested = [answer for answer in found.answers if answer.spec not in (BASELINE, ZEROED)]
    errors = sorted(answer.difference_se for answer in tested if answer.difference_se)
    if not errors:
        return ""
    unseen = 200 * errors[len(errors) // 2]
    return (
        f"What this cannot say: with these numbers of items a difference below about {unseen:.1f} points would not be "
        f"seen. {len(tested)} comparisons were made, and the tests are adjusted for that."
    )
