"""How likely is a continuation, when the model reads its context through a cache?

One forward over context and continuation never reads a compressed cache: its keys are the ones just computed. So the
context c goes in first, all but its last token; then, in steps of a few tokens,

    fed      c_n  a_1  a_2  ...  a_(m-1)
    scored   a_1  a_2  a_3  ...  a_m

and every token of the answer a is predicted from what the cache stored. Answers to one question share its context: it
is fed once, and the cache is forked for them. Every group of requests starts with a fresh cache.

Rows of a batch are padded on the left where the cache stores a token alone, whatever stands before it (``full`` and 8
bits, ``retention="all"``). For the other caches a pad is not nothing: there, a batch holds contexts of one length.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from . import compat
from .caches import KVCache

Tokens = tuple[int, ...]


class Request(NamedTuple):
    """Token ids of a context and of the continuation to be scored, at least one each."""

    context: Tokens
    continuation: Tokens


class Scored(NamedTuple):
    """Per token of the continuation: its log-probability [m], and whether it was the likeliest token [m]."""

    logprobs: torch.Tensor
    greedy: torch.Tensor


class Row(NamedTuple):
    """What is fed after a context: ``slot`` is the context's row, ``asks`` the requests that this answers."""

    slot: int
    fed: Tokens
    asks: list[int]


def _nothing(*args: Any) -> None:
    pass


@torch.inference_mode()
def score(
    model: Any,
    requests: Sequence[Request],
    make_cache: Callable[[], Any],
    *,
    step: int = 1,
    batch_size: int = 1,
    dtype: torch.dtype | None = None,
    filled: Callable[[Any, int], object] = _nothing,
    tick: Callable[[int], object] = _nothing,
) -> list[Scored]:
    """Score continuations through caches, in the order of the requests.

    Args:
        model: a causal language model.
        make_cache: a fresh cache at every call.
        step: tokens of the answer fed at a time. Above 1, the tokens of a step read each other as they are.
        batch_size: contexts, and then answers, fed at a time.
        dtype: of the softmax; that of the logits if ``None``.
        filled: is told each cache once it holds its contexts, and the tokens fed into it, pads included.
        tick: is told how many requests were answered, whenever some were.

    Raises:
        ValueError: an empty context or continuation, or a step or batch size below 1.
    """
    if step < 1 or batch_size < 1:
        raise ValueError(f"step={step} and batch_size={batch_size} must be at least 1")
    results: list[Scored | None] = [None] * len(requests)
    rows = rows_by_context(requests)
    size, pads = shape_of_batches(make_cache(), batch_size)
    reader = Reader(model, step, dtype)
    for contexts in batches(list(rows), size, pads):
        cache = make_cache()
        padded = reader.prefill(contexts, cache)
        filled(cache, len(contexts) * (max(map(len, contexts)) - 1))
        pending = [row._replace(slot=slot) for slot, context in enumerate(contexts) for row in rows[context]]
        chunks = [pending[start : start + size] for start in range(0, len(pending), size)]
        for number, chunk in enumerate(chunks, 1):
            own = cache if number == len(chunks) else fork(cache)
            for index, answer in reader.answer(contexts, chunk, own, padded, requests):
                results[index] = answer
            tick(sum(len(row.asks) for row in chunk))
    return results  # type: ignore[return-value]  # every request is in one row


def part(requests: Sequence[Request], cache: Any, batch_size: int, number: int, of: int) -> list[int]:
    """Indices of the requests in every ``of``-th batch, from batch ``number`` on.

    Scored alone, they are in the same batches as among all of them: results are the same to the last bit.
    """
    rows = rows_by_context(requests)
    dealt = list(batches(list(rows), *shape_of_batches(cache, batch_size)))[number::of]
    return sorted(index for batch in dealt for context in batch for row in rows[context] for index in row.asks)


def shape_of_batches(cache: Any, batch_size: int) -> tuple[int, bool]:
    """(rows of a batch, whether their lengths may differ) with a cache like this one."""
    return (batch_size, takes_padding(cache)) if takes_batches(cache) else (1, False)


def rows_by_context(requests: Sequence[Request]) -> dict[Tokens, list[Row]]:
    """Per context its rows: requests that differ in their last token only are answered by one row."""
    found: dict[Tokens, dict[Tokens, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, (context, continuation) in enumerate(requests):
        if not context or not continuation:
            raise ValueError(f"request {index}: context and continuation need at least one token each")
        context = tuple(context)
        found[context][context[-1:] + tuple(continuation[:-1])].append(index)
    return {context: [Row(0, fed, asks) for fed, asks in fed_by.items()] for context, fed_by in found.items()}


def batches(contexts: list[Tokens], size: int, padded: bool) -> Iterator[list[Tokens]]:
    """Longest first, so that what does not fit in memory fails at once; of one length unless ``padded``."""
    batch: list[Tokens] = []
    for context in sorted(contexts, key=len, reverse=True):
        if batch and (len(batch) == size or (not padded and len(context) != len(batch[0]))):
            yield batch
            batch = []
        batch.append(context)
    if batch:
        yield batch


def takes_batches(cache: Any) -> bool:
    """Whether rows can be selected: not so in stock quantized caches, which leave their packed part as it is."""
    return isinstance(cache, (KVCache, DynamicCache))


def takes_padding(cache: Any) -> bool:
    """Whether a left-padded row is stored as it would be alone."""
    if not all(hasattr(layer, "get_mask_sizes") for layer in cache.layers):
        return False  # recurrent states have no mask
    return not isinstance(cache, KVCache) or not (cache.storage.has_tail or cache.retention.evicts)


def fork(cache: Any) -> Any:
    """An independent copy that continues from here."""
    return cache.fork() if hasattr(cache, "fork") else copy.deepcopy(cache)


class Reader:
    """Feeds tokens to a model through a cache."""

    def __init__(self, model: Any, step: int, dtype: torch.dtype | None) -> None:
        self.model, self.step, self.dtype = model, step, dtype
        known = inspect.signature(model.forward).parameters
        self.cache_name = compat.cache_argument(model.forward)
        self.one_logit = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        self.takes_positions = "position_ids" in known

    def forward(
        self, ids: torch.Tensor, cache: Any, mask: torch.Tensor | None, positions: torch.Tensor | None, **options: Any
    ) -> torch.Tensor:
        """Logits [B, S, V] of tokens [B, S]; where there are pads, ``mask`` [B, past + S] and ``positions`` [B, S]."""
        if mask is not None:
            options["attention_mask"] = mask
            if self.takes_positions:
                options["position_ids"] = positions
        return self.model(ids, use_cache=True, **{self.cache_name: cache}, **options).logits

    def prefill(self, contexts: list[Tokens], cache: Any) -> torch.Tensor | None:
        """Feed contexts but for their last tokens. Returns the mask [B, width], if there are pads."""
        width = max(map(len, contexts)) - 1
        pads = [width - len(context) + 1 for context in contexts]
        ids = [[0] * pad + list(context[:-1]) for pad, context in zip(pads, contexts, strict=True)]
        mask = self._tensor([[0] * pad + [1] * (width - pad) for pad in pads]) if any(pads) else None
        if width:
            positions = None if mask is None else (mask.cumsum(-1) - 1).clamp_min(0)
            self.forward(self._tensor(ids), cache, mask, positions, **self.one_logit)
        return mask

    def answer(
        self,
        contexts: list[Tokens],
        rows: list[Row],
        cache: Any,
        mask: torch.Tensor | None,
        requests: Sequence[Request],
    ) -> Iterator[tuple[int, Scored]]:
        """Feed rows after their contexts in steps, and hand out what each request was worth."""
        pieces: dict[int, list[Scored]] = defaultdict(list)
        slots, wanted, done = list(range(len(contexts))), [row.slot for row in rows], 0
        while rows:
            if wanted != slots:  # the rows of this chunk, then those that are not finished
                cache.batch_select_indices(self._tensor(wanted))
                mask = None if mask is None else mask[wanted]
            size = min(self.step, max(len(row.fed) for row in rows) - done)
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones(len(rows), size)], 1)
            logits = self.forward(
                self._block(rows, done, size), cache, mask, self._positions(contexts, rows, done, size)
            )
            for row, own in zip(rows, logits, strict=True):
                for index in row.asks:
                    pieces[index].append(self._compare(own, requests[index].continuation[done : done + size]))
            done += size
            slots, wanted = list(range(len(rows))), [i for i, row in enumerate(rows) if len(row.fed) > done]
            for index in [index for row in rows if len(row.fed) <= done for index in row.asks]:
                yield index, Scored(*map(torch.cat, zip(*pieces[index], strict=True)))
            rows = [rows[i] for i in wanted]

    def _compare(self, logits: torch.Tensor, targets: Tokens) -> Scored:
        """Logits [S, V] of one row against its next targets [s], s <= S: what lies beyond answers nothing."""
        wanted = self._tensor(targets).to(logits.device)
        logprobs = logits[: len(targets)].log_softmax(-1, dtype=self.dtype)
        return Scored(logprobs.gather(-1, wanted[:, None])[:, 0].cpu(), (logprobs.argmax(-1) == wanted).cpu())

    def _block(self, rows: list[Row], done: int, size: int) -> torch.Tensor:
        pieces = [row.fed[done : done + size] for row in rows]
        return self._tensor([list(piece) + [0] * (size - len(piece)) for piece in pieces])

    def _positions(self, contexts: list[Tokens], rows: list[Row], done: int, size: int) -> torch.Tensor:
        """[R, S]: counted from the row's own first token; what is fed past a row's end stays at its last position."""
        starts = [len(contexts[row.slot]) - 1 for row in rows]
        ends = [start + len(row.fed) - 1 for start, row in zip(starts, rows, strict=True)]
        positions = self._tensor(starts)[:, None] + torch.arange(done, done + size, device=self.model.device)
        return positions.minimum(self._tensor(ends)[:, None])

    def _tensor(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.model.device)
