"""Continuations scored through caches, against one forward without any cache."""

from __future__ import annotations

import pytest
import torch
from models import build, llama, prompt, states
from transformers import DynamicCache, GPT2Config

from eval import contenders
from hf_kvcache import KVCache
from hf_kvcache.likelihood import Request, batches, fork, rows_by_context, score, takes_padding

SHORT = "int4(residual=0,sinks=0,group=8)"


def ids(length: int, seed: int) -> tuple[int, ...]:
    return tuple(prompt(length, seed=seed)[0].tolist())


@pytest.fixture(scope="module")
def requests():
    """Five contexts, two of one length, with some answers each; some answers share all but the last token."""
    found = [
        Request(ids(n, 10 * n + extra), ids(m, 100 + m))
        for n, extra in ((1, 0), (9, 0), (17, 0), (17, 1), (12, 0))
        for m in (1, 3, 6)
    ]
    return found + [Request(one.context, (*one.continuation[:-1], 42)) for one in found[::3]]


def make(model, spec):
    return lambda: contenders.make_cache(spec, model.config)


@torch.no_grad()
def uncached(model, request: Request) -> torch.Tensor:
    whole = torch.tensor([request.context + request.continuation])
    logits = model(whole[:, :-1], use_cache=False).logits[0, -len(request.continuation) :]
    return logits.log_softmax(-1)


@pytest.mark.parametrize(("step", "batch_size"), [(1, 1), (1, 50), (3, 4), (50, 3)])
@pytest.mark.parametrize("spec", ["dynamic", "full", "sink(2,200)"])
def test_lossless_caches_score_as_one_forward_does(requests, spec, step, batch_size):
    model = llama()
    for request, one in zip(
        requests, score(model, requests, make(model, spec), step=step, batch_size=batch_size), strict=True
    ):
        logprobs, targets = uncached(model, request), torch.tensor(request.continuation)
        torch.testing.assert_close(one.logprobs, logprobs.gather(-1, targets[:, None])[:, 0], atol=1e-4, rtol=0)
        assert torch.equal(one.greedy, logprobs.argmax(-1) == targets)


@pytest.mark.parametrize("spec", ["int8", "fp8", "sink(2,6)", "int8+sink(2,6)", SHORT])
def test_a_batch_scores_as_its_rows_alone(requests, spec):
    model = llama()
    alone = score(model, requests, make(model, spec))
    limit = 2e-2 if "8" in spec or "4" in spec else 1e-4  # a code may be rounded the other way; a wrong mask costs 1
    for step, batch_size in ((1, 4), (3, 50)):
        together = score(model, requests, make(model, spec), step=step, batch_size=batch_size)
        for a, b in zip(alone, together, strict=True):
            torch.testing.assert_close(a.logprobs, b.logprobs, atol=limit, rtol=0)


def test_with_kvcache_attention_too(requests):
    plain, ours = llama(), llama("kvcache")
    expected = score(plain, requests, make(plain, "int8"), batch_size=4)
    for a, b in zip(expected, score(ours, requests, make(ours, "int8"), batch_size=4), strict=True):
        torch.testing.assert_close(a.logprobs, b.logprobs, atol=2e-2, rtol=0)


def test_every_scored_token_reads_what_was_stored(requests):
    """Answers of one token, too: with zeros in place of what was stored, all of them change."""
    model = llama()
    whole, zeroed = (score(model, requests, make(model, spec)) for spec in ("dynamic", "zeroed"))
    long = [i for i, request in enumerate(requests) if len(request.context) > 1]
    assert all((whole[i].logprobs[0] - zeroed[i].logprobs[0]).abs() > 1e-3 for i in long)


@pytest.mark.parametrize("batch_size", [1, 50])
def test_a_shared_context_is_fed_once(requests, batch_size, monkeypatch):
    model, fed = build(llama().config), []
    forward = type(model).forward

    def counted(self, input_ids, **options):
        fed.append(input_ids.numel())
        return forward(self, input_ids, **options)

    monkeypatch.setattr(type(model), "forward", counted)
    one = [Request(requests[4].context, ids(m, 100 + m)) for m in (2, 2, 4)]
    one.append(Request(one[0].context, (*one[0].continuation[:-1], 42)))  # fed alike: no row of its own
    asked = [1, *range(len(one))][1:]
    score(model, [one[i] for i in asked], make(model, "full"), batch_size=batch_size)
    prefill, rows = len(one[0].context) - 1, len(rows_by_context(one)[one[0].context])
    assert fed[0] == prefill and sum(fed) == prefill + 2 + 4
    assert rows == 2


def test_rows_and_batches():
    contexts = [ids(n, n) for n in (3, 5, 3, 4)]
    contexts[2] = ids(3, 9)
    assert [list(map(len, batch)) for batch in batches(contexts, 2, True)] == [[5, 4], [3, 3]]
    assert [list(map(len, batch)) for batch in batches(contexts, 3, False)] == [[5], [4], [3, 3]]
    for bad in (Request((), (1,)), Request((1,), ())):
        with pytest.raises(ValueError, match="request 0: context and continuation need at least one token"):
            rows_by_context([bad])


def test_bad_sizes_are_refused(requests):
    for sizes in ({"step": 0}, {"batch_size": 0}):
        with pytest.raises(ValueError, match="must be at least 1"):
            score(llama(), requests, make(llama(), "full"), **sizes)


def test_filled_and_tick_hear_of_everything(requests):
    model, held, ticks = llama(), [], []
    score(
        model,
        requests,
        make(model, "dynamic"),
        batch_size=2,
        filled=lambda cache, tokens: held.append((cache.get_seq_length(), tokens)),
        tick=ticks.append,
    )
    assert sum(ticks) == len(requests)
    assert held == [(16, 32), (11, 22), (0, 0)]  # 17 and 17, 12 and 9 padded, 1


def test_learned_positions_are_not_exceeded():
    """A row that is done keeps its last position while longer answers of its batch go on."""
    config = GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    model = build(config)
    asked = [Request(ids(31, 1), ids(2, 2)), Request(ids(9, 3), ids(20, 4))]
    for step in (1, 7):
        for request, one in zip(asked, score(model, asked, make(model, "full"), step=step, batch_size=2), strict=True):
            expected = uncached(model, request).gather(-1, torch.tensor(request.continuation)[:, None])[:, 0]
            torch.testing.assert_close(one.logprobs, expected, atol=1e-4, rtol=0)


def test_who_takes_padding():
    config = llama().config
    takes = {spec: takes_padding(contenders.make_cache(spec, config)) for spec in ("dynamic", "full", "int8", "fp8")}
    assert all(takes.values())
    assert not any(takes_padding(KVCache.from_spec(config, spec)) for spec in ("sink(2,6)", "int4", "int8(residual=4)"))


def test_a_zeroed_cache_stays_zeroed_when_forked():
    config = llama().config
    cache = contenders.make_cache("zeroed", config)
    cache.update(*states(3), 0)
    copy = fork(cache)
    assert copy.get_seq_length() == 3
    keys, values = copy.update(*states(2), 0)
    assert not keys.any() and not values.any() and keys.shape[2] == 5
    assert cache.get_seq_length() == 3 and isinstance(cache, DynamicCache)


def test_shorter_rows_go_on_after_the_longest_is_dropped():
    """Positions are compared with those of the last call: not with those of a row that is gone."""
    model = llama()
    cache, mask = KVCache(model.config), torch.tensor([[1] * 6, [0] * 3 + [1] * 3])
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        model(prompt(6, batch=2), attention_mask=mask, position_ids=positions, past_key_values=cache)
        cache.batch_select_indices(torch.tensor([1]))
        mask = torch.tensor([[0] * 3 + [1] * 4])
        model(prompt(1), attention_mask=mask, position_ids=torch.tensor([[3]]), past_key_values=cache)
    assert cache.get_seq_length() == 7
