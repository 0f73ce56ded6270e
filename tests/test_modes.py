"""Every way people call ``generate``, for every kind of cache: one table of modes times one table of specs.

What is right is said by ``Case.by_hand``, one forward after the other with nothing of ``generate`` in it. Caches that
lose nothing in the lengths at hand are held against ``DynamicCache``, the others against a fresh one of their own
spec, fed token by token, or, where what stays depends on the schedule by definition, in the mode's own forwards.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.utils import send_to_device
from models import build, feed, llama, llama_config, prompt
from test_caches import padded
from transformers import AutoModelForCausalLM, Cache, CompileConfig, DynamicCache, GenerationConfig, GenerationMixin
from transformers.cache_utils import DynamicLayer

from hf_kvcache import KVCache
from hf_kvcache.policies import Policy
from hf_kvcache.retention import Importance

NEW, LENGTH = 5, 13
LOW = "(group=4,residual=4,sinks=2)"
SMALL = "budget=10,sinks=2,recent=4"
EXACT = (  # in the lengths at hand
    "full",
    "cpu",
    "disk",
    "sink(2,60)",
    "int4(residual=60)",
    "knorm(budget=60,sinks=2)",
    "int8(residual=60)+snapkv(budget=60)",
)
SPECS = (
    *EXACT,
    "int8",
    "fp8",
    f"int4{LOW}",
    f"k4v2{LOW}",
    "sink(2,6)",
    "sink(2,6,reposition=on)",
    "int8+sink(2,6)",
    f"int4{LOW}+sink(2,8)",
    f"random({SMALL})",
    f"knorm({SMALL})",
    f"keydiff({SMALL})",
    f"tova({SMALL})",
    f"h2o({SMALL})",
    f"snapkv({SMALL},window=4,kernel=3)",
    f"expected({SMALL},future=16)",
    f"int8+snapkv({SMALL},window=4,kernel=3,adaptive)",
    f"fp8+h2o({SMALL},pyramid)",
    f"int4{LOW}+tova({SMALL})",
    "int8+cpu(keep_recent=5)",
    "int8+sink(2,6)+cpu",
    f"int4{LOW}+disk",
)
MODES: dict[str, Callable[[Case], None]] = {}


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Memory that nobody wrote holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def mode(run: Callable[[Case], None]) -> Callable[[Case], None]:
    MODES[run.__name__] = run
    return run


def argmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1, keepdim=True)


def sample(logits: torch.Tensor) -> torch.Tensor:
    return torch.multinomial((logits.float() / 0.8).softmax(-1), 1)


SAMPLE = dict(do_sample=True, temperature=0.8, top_k=0, top_p=1.0)


class Case:
    """One spec under one attention, and what is right for it."""

    def __init__(self, spec: str, attention: str, directory: Any = None, model: Any = None) -> None:
        self.spec, self.attention, self.directory = spec, attention, directory
        self.model = model if model is not None else llama(attention)
        probe = self.cache()
        self.exact, self.by_forward = spec in EXACT, isinstance(probe.retention, Importance)
        self.kind = "importance" if self.by_forward else probe.retention.spec.split("(")[0]
        self.grouped = probe.storage.group > 1 and not self.exact
        self.croppable = probe.is_croppable
        self.reposition = probe.retention.reposition
        policy = probe.retention.policy if self.by_forward else Policy()
        self.at_once = False  # the prompt in one forward, as ``generate`` feeds it
        self.drafts = self.croppable or self.exact and policy.rolls_back  # rejected tokens can go while nothing is lost

    def cache(self) -> KVCache:
        return KVCache.from_spec(self.model.config, self.spec.replace("disk", f"disk({self.directory})"))

    def expected(self) -> Any:
        """A cache to compare with."""
        return DynamicCache(config=self.model.config) if self.exact else self.cache()

    @torch.no_grad()
    def by_hand(
        self,
        ids: torch.Tensor,
        cache: Any = None,
        new: int = NEW,
        chunk: int | None = None,
        pick: Callable[[torch.Tensor], torch.Tensor] = argmax,
        mask: torch.Tensor | None = None,
        first: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids with ``new`` more, their logits [B, new, V]): each token is picked from the last forward's logits.

        Args:
            chunk, first: tokens per forward of the prompt, and in its first one, where the schedule matters; otherwise
                they come one by one.
        """
        cache, out = self.expected() if cache is None else cache, []
        mask = torch.ones_like(ids) if mask is None else mask
        start, size = cache.get_seq_length(), (chunk or ids.shape[1]) if self.by_forward or self.at_once else 1
        stop = start + (first if first and self.by_forward else size)
        for _ in range(new):
            while start < ids.shape[1]:
                stop = min(stop, ids.shape[1])
                positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)[:, start:stop]
                given = mask[:, :stop] if not mask.all() else None
                logits = self.model(
                    ids[:, start:stop], attention_mask=given, position_ids=positions, past_key_values=cache
                ).logits[:, -1]
                start, stop = stop, stop + size
            out.append(logits)
            ids = torch.cat([ids, pick(logits)], 1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        return ids, torch.stack(out, 1)

    def generate(self, ids: torch.Tensor | None, cache: Any = None, new: int = NEW, **options: Any) -> Any:
        options = {"do_sample": False, **options}
        cache = self.cache() if cache is None else cache
        return self.model.generate(ids, past_key_values=cache, max_new_tokens=new, min_new_tokens=new, **options)


def refused(call: Callable[[], Any], *words: str) -> None:
    """``call`` raises a ValueError of one line that says these words."""
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


# -- the modes ---------------------------------------------------------------------------------------------------------


@mode
def greedy(case: Case) -> None:
    ids = prompt(LENGTH, 2)
    assert torch.equal(case.generate(ids), case.by_hand(ids)[0])


@mode
def sampling(case: Case) -> None:
    ids = prompt(LENGTH, 2)
    torch.manual_seed(3)
    expected = case.by_hand(ids, pick=sample)[0]
    torch.manual_seed(3)
    assert torch.equal(case.generate(ids, **SAMPLE), expected)


@mode
def num_return_sequences(case: Case) -> None:
    ids = prompt(LENGTH, 2)
    torch.manual_seed(3)
    expected = case.by_hand(ids.repeat_interleave(3, 0), pick=sample)[0]
    torch.manual_seed(3)
    assert torch.equal(case.generate(ids, num_return_sequences=3, **SAMPLE), expected)
    assert len(expected.unique(dim=0)) > 2


@mode
def beams(case: Case) -> None:
    """A batch of two, and its first row alone."""
    ids, options = prompt(LENGTH, 2), dict(num_beams=3, num_return_sequences=3, length_penalty=0.0)
    expected = torch.cat([beam_search(case, row[None], 3, 3) for row in ids])
    assert torch.equal(case.generate(ids, new=3, **options), expected)
    assert torch.equal(case.generate(ids[:1], new=3, **options), expected[:3])


def beam_search(case: Case, ids: torch.Tensor, beams: int, new: int) -> torch.Tensor:
    """Each hypothesis has a cache of its own; no row is ever moved."""
    first = case.expected()
    held = [(0.0, ids, first, case.by_hand(ids, first, 1)[1])]
    for step in range(new):
        options = []
        for score, past, cache, logits in held:
            best = logits[0, -1].log_softmax(-1).topk(beams)
            options += [
                (score + p, past, cache, token)
                for p, token in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            ]
        held = []
        for score, past, cache, token in sorted(options, key=lambda option: -option[0])[:beams]:
            longer, own = torch.cat([past, torch.tensor([[token]])], 1), copy.deepcopy(cache)
            held.append((score, longer, own, case.by_hand(longer, own, 1)[1] if step < new - 1 else None))
    return torch.cat([ids for _, ids, _, _ in held])


@mode
def prefill_in_chunks(case: Case) -> None:
    ids = prompt(LENGTH, 2)
    for chunk in (1, 5):
        assert torch.equal(case.generate(ids, prefill_chunk_size=chunk), case.by_hand(ids, chunk=chunk)[0])


@mode
def with_draft_model(case: Case) -> None:
    assisted(case, assistant_model=llama(seed=5))


@mode
def with_itself_as_draft_model(case: Case) -> None:
    assisted(case, assistant_model=llama("sdpa"))


@mode
def with_prompt_lookup(case: Case) -> None:
    assisted(case, prompt_lookup_num_tokens=3)


@mode
def with_early_exit(case: Case) -> None:
    assisted(case, assistant_early_exit=1)


ASKS_FIRST = "is_croppable" in inspect.getsource(GenerationMixin._assisted_decoding)


def assisted(case: Case, **helper: Any) -> None:
    """Equal, or refused at the first draft, or (by transformers that do not ask) when tokens have to be taken back."""
    ids, run = prompt(6).repeat(1, 2), functools.partial(case.generate, **helper)
    try:
        found = run(ids)
    except ValueError:
        assert not case.drafts
        refused(lambda: run(ids), "crop")
        return
    assert case.drafts or not ASKS_FIRST
    if case.exact or not case.by_forward:
        assert torch.equal(found, case.by_hand(ids)[0])


@mode
def as_the_assistant(case: Case) -> None:
    """Our cache drafts, and where it can it checks, too. Drafts are what they are without a rollback before them."""
    ids, drafts = prompt(LENGTH), []
    assistant, own, cache = copy.copy(case.model), case.model.generate, case.cache()

    def draft(input_ids: torch.Tensor, **options: Any) -> Any:
        if "cache" not in options and "past_key_values" not in options:
            options["past_key_values"] = cache
        out = own(input_ids, **options)
        drafts.append((input_ids, out.sequences))
        return out

    assistant.generate = draft
    checks = case.spec if case.croppable else "full"
    target = Case(checks, case.attention, case.directory, llama(case.attention, seed=5))
    run = lambda: target.generate(ids, assistant_model=assistant)  # noqa: E731
    if not case.drafts:
        refused(run, "crop")
        return
    assert torch.equal(run(), target.by_hand(ids)[0])
    assert len(drafts) > 2 and cache.get_seq_length() > LENGTH
    for given, drafted in drafts:
        assert torch.equal(drafted, case.by_hand(given, new=drafted.shape[1] - given.shape[1])[0])


@mode
def streaming(case: Case) -> None:
    """Text piece by piece, from a thread, as servers do it."""
    from transformers import TextIteratorStreamer

    ids = prompt(LENGTH)
    streamer = TextIteratorStreamer(tokenizer(), skip_prompt=True, timeout=60)
    out: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: out.append(case.generate(ids, streamer=streamer)))
    thread.start()
    pieces = list(streamer)
    thread.join()
    expected = case.by_hand(ids)[0]
    assert torch.equal(out[0], expected)
    assert "".join(pieces) == tokenizer().decode(expected[0, LENGTH:]) and len(pieces) > NEW // 2


@functools.cache
def chunks_go_on() -> bool:
    """Whether this transformers feeds only what is new where a later turn comes in chunks."""
    model, cache = llama(), DynamicCache(config=llama_config())
    for length in (6, 9):
        out = model.generate(prompt(length), past_key_values=cache, max_new_tokens=1, prefill_chunk_size=2)
    return bool(cache.get_seq_length() == out.shape[1] - 1)


@mode
def turns(case: Case) -> None:
    """Three turns of one conversation with one cache, the last one in chunks."""
    cache, mine, theirs = case.cache(), prompt(LENGTH, 2), prompt(LENGTH, 2)
    other = case.expected()
    for seed, chunk in ((3, None), (4, None), (5, 2)):
        if chunk and not chunks_go_on():
            refused(functools.partial(case.generate, mine, cache, 2, prefill_chunk_size=2), "already holds")
            return
        mine = case.generate(mine, cache, 2, prefill_chunk_size=chunk)
        theirs = case.by_hand(theirs, other, 2, chunk)[0]
        assert torch.equal(mine, theirs) and cache.get_seq_length() == mine.shape[1] - 1
        mine, theirs = (torch.cat([ids, prompt(3, 2, seed=seed)], 1) for ids in (mine, theirs))


@mode
def return_dict(case: Case) -> None:
    ids, cache = prompt(LENGTH, 2), case.cache()
    more = dict(output_logits=True, output_scores=True, output_hidden_states=True)
    out = case.generate(ids, cache, return_dict_in_generate=True, **more)
    expected, logits = case.by_hand(ids)
    assert torch.equal(out.sequences, expected) and out.past_key_values is cache
    assert len(out.hidden_states) == NEW
    torch.testing.assert_close(torch.stack(out.logits, 1), logits, atol=5e-2 if not case.exact else 2e-4, rtol=0)


# What a padded batch comes to: each row what it is alone, or a refusal (of policies that need what sdpa has not). None
# are evicted here: pads are refused when the first token would have to go (tests/test_eviction.py).
PADDED = {
    "all": {"sdpa": "alone", "kvcache": "alone"},
    "sink": {"sdpa": "alone", "kvcache": "alone"},
    "importance": {"sdpa": "alone or refused", "kvcache": "alone"},
}


@mode
def left_padding(case: Case) -> None:
    padding(case, (LENGTH, 5))


@mode
def left_padding_in_chunks(case: Case) -> None:
    """The first chunk of the short row is all pads."""
    padding(case, (5, LENGTH), 4)


def padding(case: Case, lengths: tuple[int, int], chunk: int | None = None) -> None:
    """Two turns."""
    rows, ids, mask = padded(lengths)
    outcome, cache = PADDED[case.kind][case.attention], case.cache()
    by_slot = case.attention != "kvcache" or cache.placement.offloads
    if case.kind == "sink" and by_slot and not case.exact:  # tokens have to go
        outcome = "refused"
    try:
        found = case.generate(ids, cache, attention_mask=mask, prefill_chunk_size=chunk)
    except ValueError:
        assert "refused" in outcome
        refused(lambda: case.generate(ids, attention_mask=mask, prefill_chunk_size=chunk), "padding")
        return
    assert "alone" in outcome
    tails, more, real = padded((3, 1), seed=7)
    whole = torch.cat([mask, torch.ones(2, NEW, dtype=torch.long), real], 1)
    again = case.generate(torch.cat([found, more], 1), cache, 4, attention_mask=whole)
    if case.grouped and not case.by_forward and by_slot:  # pads take part in groups
        own = case.expected()
        assert torch.equal(found, case.by_hand(ids, own, mask=mask)[0])
        assert torch.equal(again, case.by_hand(torch.cat([found, more], 1), own, 4, mask=whole)[0])
        return
    for i, row in enumerate(rows):
        own, pads = case.expected(), ids.shape[1] - len(row)
        alone = case.by_hand(row[None], own, chunk=chunk, first=chunk and chunk - pads % chunk)[0]
        assert torch.equal(found[i, pads:], alone[0])
        assert torch.equal(again[i, -4:], case.by_hand(torch.cat([alone, tails[i][None]], 1), own, 4)[0][0, -4:])


@mode
def inputs_embeds(case: Case) -> None:
    ids, cache = prompt(LENGTH, 2), case.cache()
    embed = case.model.get_input_embeddings()
    found = case.generate(None, cache, inputs_embeds=embed(ids))
    expected = case.by_hand(ids)[0]
    assert torch.equal(found, expected[:, LENGTH:])
    assert cache.get_seq_length() == expected.shape[1] - 1


@mode
def half_precision(case: Case) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        half = Case(case.spec, case.attention, case.directory, llama(case.attention, dtype=dtype))
        ids, cache, own = prompt(LENGTH, 2), half.cache(), half.cache()
        half.at_once = True  # another schedule rounds at other places
        found, (expected, logits) = half.generate(ids, cache), half.by_hand(ids, own)
        assert torch.equal(found, expected) and cache.layers[0].keys.dtype is dtype
        if half.exact:
            forced = half.model(found, past_key_values=half.expected()).logits[:, LENGTH - 1 : -1]
            error = (logits - forced).float().abs().mean() / forced.float().abs().mean()
            assert error < {torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]


@mode
def autocast(case: Case) -> None:
    ids, case.at_once = prompt(LENGTH, 2), True
    with torch.autocast("cpu", torch.bfloat16):
        found, (expected, logits) = case.generate(ids), case.by_hand(ids, case.cache())
    assert torch.equal(found, expected) and logits.isfinite().all()


class Decoded(DynamicLayer):
    """Given history, and one more token whose stored form is given too: its gradient passes straight through."""

    def __init__(self, layer: Any, retention: Any) -> None:
        super().__init__()
        self.given, self.seen, self.is_initialized = (layer.keys, layer.values), layer.get_seq_length() - 1, True
        held, (sinks, window) = self.given[0].shape[2], (retention.sinks, retention.window)
        if window is not None and held > sinks + window:  # whole groups stay a bit longer, unseen
            picked = [*range(sinks), *range(held - window, held)]
            self.given = tuple(x[:, :, picked] for x in self.given)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        pairs = zip(self.given, (key_states, value_states), strict=True)
        return tuple(torch.cat([old[:, :, :-1], new + (old[:, :, -1:] - new).detach()], 2) for old, new in pairs)

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        held = self.given[0].shape[2]
        return held, self.seen + query_length - held


@mode
def gradients(case: Case) -> None:
    """Through one token after a cached prefix; and a suffix of several runs."""
    ids, model, cache = prompt(LENGTH, 2), copy.deepcopy(case.model), case.cache()
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache)
    longer, backward = (
        cache.fork(),
        lambda held: model(ids[:, -1:], past_key_values=held).logits.pow(2).mean().backward(),
    )
    if case.by_forward or case.reposition:
        refused(lambda: backward(cache), "no_grad()")
        assert cache.get_seq_length() == LENGTH - 1
        return
    backward(cache)
    mine = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    backward(Cache(layers=[Decoded(layer, cache.retention) for layer in cache.layers]))
    for a, p in zip(mine, model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, atol=1e-4, rtol=1e-3)
    assert max(a.abs().max() for a in mine) > 0
    expected = feed(model, prompt(4, 2, seed=3), longer.fork())
    logits = model(prompt(4, 2, seed=3), past_key_values=longer).logits
    logits.mean().backward()
    torch.testing.assert_close(logits.detach(), expected, atol=2e-2, rtol=0)


@mode
def in_a_pipeline(case: Case) -> None:
    from transformers import pipeline

    ids = prompt(LENGTH)
    pipe = pipeline("text-generation", model=case.model, tokenizer=tokenizer())
    options = dict(max_new_tokens=NEW, do_sample=False, return_full_text=False)
    (out,) = pipe(tokenizer().decode(ids[0]), past_key_values=case.cache(), **options)
    assert out["generated_text"] == tokenizer().decode(case.by_hand(ids)[0][0, LENGTH:])


@functools.cache
def spread(attention: str) -> Any:
    """As ``device_map="auto"`` does it where memory is short: the first layer on the CPU, the second one on disk."""
    folder = tempfile.TemporaryDirectory()
    llama(attention).save_pretrained(folder.name)
    names = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    where = {**dict.fromkeys(names, "cpu"), "model.layers.1": "disk"}
    options = dict(device_map=where, offload_folder=f"{folder.name}/far", attn_implementation=attention)
    model = AutoModelForCausalLM.from_pretrained(folder.name, **options).eval()
    model.generation_config, model.folder = llama(attention).generation_config, folder  # which goes with the model
    assert next(model.model.layers[1].parameters()).is_meta and model.hf_device_map["model.layers.1"] == "disk"
    return model


@mode
def with_a_device_map(case: Case) -> None:
    ids = prompt(LENGTH, 2)
    found = Case(case.spec, case.attention, case.directory, spread(case.attention)).generate(ids)
    assert torch.equal(found, case.by_hand(ids)[0])


class Elsewhere(ModelHook):
    """A layer that runs on "meta", where mixing devices is an error as between GPUs; zeros come back."""

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return send_to_device(args, "meta"), send_to_device(kwargs, "meta")

    def post_forward(self, module: Any, output: torch.Tensor) -> torch.Tensor:
        assert output.is_meta
        return torch.zeros(output.shape)


class Nowhere(ModelHook):
    """The same layer here."""

    def post_forward(self, module: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(output)


@functools.cache
def split(attention: str, hook: type[ModelHook]) -> Any:
    model = copy.deepcopy(llama(attention))
    add_hook_to_module(model.model.layers[1], hook())
    if hook is Elsewhere:
        model.model.layers[1].to("meta")
    return model


@mode
def on_two_devices(case: Case) -> None:
    """Beams, with a layer on "meta"."""
    ids, layer = prompt(LENGTH, 2), case.cache().layers[0]
    if case.by_forward and (layer.two or layer.retention.adaptive or layer.policy.needs == "queries"):
        pytest.skip("shapes depend on values, which meta has not")
    far, near = (
        Case(case.spec, case.attention, case.directory, split(case.attention, hook)) for hook in (Elsewhere, Nowhere)
    )
    cache = far.cache()
    assert torch.equal(far.generate(ids, cache, 3, num_beams=2), near.generate(ids, new=3, num_beams=2))
    assert [layer.device.type for layer in cache.layers] == ["cpu", "meta"]


@functools.cache
def tokenizer() -> Any:
    """Token n is the word "wn"."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{n}": n for n in range(97)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", padding_side="left")


def needs_ours(spec: str) -> bool:
    """Whether stock attention is refused (``test_eviction.py``)."""
    retention = KVCache.from_spec(llama_config(), spec.replace("disk", "cpu")).retention
    if not isinstance(retention, Importance):
        return retention.reposition
    return retention.policy.needs != "keys" or retention.pyramid or retention.adaptive


PAIRS = [
    (spec, attention)
    for spec in SPECS
    for attention in ("sdpa", "kvcache")
    if attention == "kvcache" or not needs_ours(spec)
]
BOTH = ("greedy", "left_padding")  # the others take turns, spec by spec
CELLS = [
    (name, spec, attention)
    for row, name in enumerate(MODES)
    for spec, attention in PAIRS
    if name in BOTH or needs_ours(spec) or (row + SPECS.index(spec) + (attention == "sdpa")) % 2
]


@pytest.mark.parametrize("name, spec, attention", CELLS)
def test_every_mode(name: str, spec: str, attention: str, tmp_path: Any) -> None:
    MODES[name](Case(spec, attention, tmp_path))


# -- several processes, compilation ------------------------------------------------------------------------------------

RANK = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed
from pathlib import Path
from transformers import AutoModelForCausalLM
import hf_kvcache, test_modes
torch.set_num_threads(1)
hf_kvcache.register()
folder = Path(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", attn_implementation="kvcache").eval()
assert model.model.layers[0].self_attn.k_proj.weight.to_local().shape == (8, 32)  # one of two heads
rank = torch.distributed.get_rank()
found = test_modes.of_every_spec(model, folder / str(rank))
(folder / f"{rank}.json").write_text(json.dumps(found))
torch.distributed.destroy_process_group()
"""


def of_every_spec(model: Any, directory: Any) -> list[Any]:
    found = []
    for spec in SPECS:
        case = Case(spec, "kvcache", directory, model)
        beams = 2 if spec in ("full", "int8") else 1
        found.append(case.generate(prompt(LENGTH, 2), new=5, num_beams=beams, pad_token_id=0).tolist())
    return found


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch.distributed is missing")
def test_tensor_parallel(tmp_path: Any) -> None:
    """Two processes with one of two KV heads each say the same, and what one process says."""
    model = build(llama_config(vocab_size=98), "kvcache")  # an even number of words, for two
    model.save_pretrained(tmp_path)
    (tmp_path / "rank.py").write_text(RANK)
    tests = Path(__file__).parent
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", tmp_path / "rank.py"]
    paths = os.pathsep.join([str(tests.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*run, tests, tmp_path],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    for spec, mine, expected in zip(SPECS, first, of_every_spec(model, tmp_path), strict=True):
        if not any(word in spec for word in ("random", "tova", "adaptive")):  # they look at all heads
            assert mine == expected, spec


@pytest.mark.parametrize("spec", SPECS)
def test_generate_does_not_compile(spec: str, tmp_path: Any) -> None:
    """Not even when asked to: the caches do not claim to be compileable."""
    case, compiled = Case(spec, "kvcache", tmp_path), CompileConfig()
    compiled._compile_all_devices = True
    cache, settings = case.cache(), GenerationConfig(compile_config=compiled)
    assert not cache.is_compileable
    assert not case.model._valid_auto_compile_criteria({"cache": cache, "past_key_values": cache}, settings)
