"""Whose states are these? Keys and values belong to the weights that made them, and to no others.

    identity = H(decoder's config) / H(names, shapes, dtypes and sampled values of all weights, switches of adapters)

Names of models, shapes and configs say too little: a fine-tune shares all of them. Of each parameter and each saved
buffer below the head, ``SAMPLES`` values, evenly spread, are hashed: a training step, a merge or another checkpoint
changes them; a reload, another folder and another device (in the same dtype) do not. Switches that are no tensors (an
adapter that is off, or scaled) count too: they are attributes of modules that come neither from torch nor transformers.

The values are read at every call. Counting on version counters or addresses instead would be faster and wrong:
``p.data.copy_(new)``, which is how weights are synchronised and adapters merged, changes neither. 290 tensors take
about 10 ms on a CPU; on a GPU it is one copy to the host per dtype.

A cache is handed states, never a model. Who reuses one names the model; where there is only ``model.config``, the model
that holds this very object is looked for among the objects of the process (the garbage collector knows who refers to
it: about 0.1 s, remembered until somebody builds a model on this config). Models that share one config object cannot be
told apart by it, so that is an error. The frames of a running forward also lead to the model, but reading their locals
keeps the forward's tensors alive. A config without a model has no weights: it is known by its name, and what was made
by known weights is never mistaken for it.

Not seen: changes of few single values (the embedding of one added token), hooks, and functions that were replaced. For
these there are namespaces.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import secrets
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules.module import register_module_module_registration_hook

from . import compat

SAMPLES = 256  # values per tensor
# What a config says about the session or about text, but not about the keys and values that a model makes.
BESIDE = set("transformers_version architectures dtype torch_dtype use_cache".split())
BESIDE |= set("bos_token_id eos_token_id pad_token_id unk_token_id".split())
LIBRARIES = ("torch", "transformers")  # whose modules keep no switches of adapters
EVERY_MODULE = {*vars(Module()), "config"}

_models: dict[int, weakref.ref[Any]] = {}  # by id of a config: the only model that holds it
_unread: weakref.WeakKeyDictionary[Module, str] = weakref.WeakKeyDictionary()  # models whose weights are elsewhere


def of(source: Any) -> str:
    """The identity of a model's states; ``source``: the model, or ``model.config``.

    Raises:
        ValueError: several models of different weights hold this config object.
    """
    if isinstance(source, Module):
        return f"{of_config(config_of(source))}/{weights(root(source))}"
    found = find(source)
    if not found:
        text = json.dumps(getattr(compat.decoder_config(source), "_name_or_path", ""))
        return f"{of_config(source)}/named {text}"
    different = {weights(model) for model in found}
    if len(different) > 1:
        raise ValueError(
            f"{len(found)} models of different weights share this {type(source).__name__} object: pass the model itself"
        )
    return f"{of_config(source)}/{different.pop()}"


def has_weights(identity: str) -> bool:
    """Whether it is that of weights, not only of a name."""
    return not identity.partition("/")[2].startswith("named ")


def same_config(first: str, second: str) -> bool:
    """Whether two identities differ at most in their weights."""
    return first.partition("/")[0] == second.partition("/")[0]


def config_of(source: Any) -> Any:
    """``model.config``, given either."""
    return root(source).config if isinstance(source, Module) else source


def of_config(config: Any) -> str:
    """A hash of what the decoder's config says about states."""
    config = config.get_text_config(decoder=True)
    facts = {k: v for k, v in config.to_diff_dict().items() if k not in BESIDE and not k.startswith("_")}
    return hashlib.sha256(json.dumps([config.model_type, facts], sort_keys=True, default=str).encode()).hexdigest()


# -- the weights -------------------------------------------------------------------------------------------------------


def walk(module: Module, name: str = "") -> Iterator[tuple[str, Module]]:
    """Modules with their names, outermost first; one that is shared comes once."""
    seen, waiting = set(), [(name, module)]
    for name, module in waiting:
        if id(module) not in seen:
            seen.add(id(module))
            yield name, module
            waiting += [(f"{name}.{key}", child) for key, child in module._modules.items() if child is not None]


def root(model: Module) -> Module:
    """The part of a model that makes states: inside of wrappers (adapters, compilation), and without its head."""
    for _, module in walk(model):
        if isinstance(module, compat.PreTrainedModel):
            return module.base_model
    return model


@torch.no_grad()
def weights(model: Module) -> str:
    """A hash of the weights as they are now."""
    about: list[Any] = []
    groups: dict[tuple[torch.dtype, torch.device], list[tuple[int, torch.Tensor]]] = {}
    for number, (name, t) in enumerate(_tensors(model)):
        about.append([name, str(t.dtype), list(t.shape)])
        if t.is_meta:
            about.append(_unread.setdefault(model, secrets.token_hex(16)))
        elif t.numel():
            sample = _sample(t)
            groups.setdefault((sample.dtype, sample.device), []).append((number, sample))
    about += [[name, facts] for name, module in walk(model) if (facts := _switches(module))]
    about.append(_autocast(model))
    samples: dict[int, Any] = {}
    for group in groups.values():
        values = torch.cat([sample for _, sample in group]).cpu()
        pieces = values.split([len(sample) for _, sample in group])
        samples.update({number: piece for (number, _), piece in zip(group, pieces, strict=True)})
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for number in sorted(samples):
        digest.update(samples[number].contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _tensors(model: Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and saved buffers; others (tables of rotations) are made from the config, and change with use."""
    for name, module in walk(model):
        for key, t in (*module._parameters.items(), *module._buffers.items()):
            if t is not None and key not in module._non_persistent_buffers_set:
                yield from _plain(f"{name}.{key}", t.detach())


def _plain(name: str, t: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors inside of a tensor subclass (quantized, or distributed), or the tensor."""
    if not hasattr(t, "__tensor_flatten__"):
        yield name, t
        return
    for inner in t.__tensor_flatten__()[0]:
        yield from _plain(f"{name}.{inner}", getattr(t, inner))


def _sample(t: torch.Tensor) -> torch.Tensor:
    """About ``SAMPLES`` values, evenly spread over rows and columns."""
    t = torch.view_as_real(t) if t.is_complex() else t
    t = t.view(torch.uint8) if t.element_size() == 1 else t  # not every operation takes 8-bit floats
    step = max(t.numel() // SAMPLES, 1)
    while t.dim() and math.gcd(step, t.shape[-1]) != 1:  # else they would lie in few columns
        step += 1
    if t.is_contiguous():
        return t.view(-1)[::step]
    return t[torch.unravel_index(torch.arange(0, t.numel(), step, device=t.device), t.shape)]


def _switches(module: Module) -> dict[str, Any]:
    """What is no tensor and may switch or scale an adapter. Not integers, which may count, nor what a model says of
    itself (its folder, its devices)."""
    if type(module).__module__.partition(".")[0] in LIBRARIES or isinstance(module, compat.PreTrainedModel):
        return {}
    facts = {k: _as_text(v) for k, v in vars(module).items() if k not in EVERY_MODULE and not k.startswith("_hf")}
    return {k: v for k, v in facts.items() if v is not None}


def _as_text(value: Any, inside: bool = False) -> str | None:
    if isinstance(value, (bool, float, str)) or (inside and isinstance(value, int)):
        return repr(value)
    if isinstance(value, dict):
        value = [item for pair in value.items() for item in pair]
    elif isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr)
    elif not isinstance(value, (list, tuple)):
        return None
    items = [_as_text(item, inside=True) for item in value]
    return None if None in items else repr(items)


def _autocast(model: Module) -> str:
    """The precision that computes in place of the weights' own, "" if there is none."""
    device = next((t.device.type for _, t in _tensors(model)), "cpu")
    if device == "meta" or not torch.is_autocast_enabled(device):
        return ""
    return str(torch.get_autocast_dtype(device))


# -- the model of a config ---------------------------------------------------------------------------------------------


def known(config: Any) -> Any:
    """The model that holds this config object, if it has been looked for before."""
    reference = _models.get(id(config))
    model = None if reference is None else reference()
    return model if model is not None and model.config is config else None


def find(config: Any) -> list[Module]:
    """All models that hold this config object, without their heads."""
    model = known(config)
    if model is not None:
        return [model]
    if not _hooked:
        _hooked.append(register_module_module_registration_hook(_built))
    found = _search(config)
    if len(found) > 1:  # models whose last user is gone may wait for the collector
        found.clear()
        gc.collect()
        found = _search(config)
    if len(found) == 1:
        _models[id(config)] = weakref.ref(found[0])
    return found


def _search(config: Any) -> list[Module]:
    holders = gc.get_referrers(config)
    spaces = [item for item in holders if isinstance(item, dict) and item.get("config") is config]
    owners = [*holders, *(gc.get_referrers(*spaces) if spaces else ())]
    roots = {
        id(owner.base_model): owner.base_model
        for owner in owners
        if isinstance(owner, compat.PreTrainedModel) and owner.config is config
    }
    inner = {id(module) for top in roots.values() for _, module in walk(top) if module is not top}
    return [model for key, model in roots.items() if key not in inner]


_hooked: list[Any] = []


def _built(module: Module, name: str, child: Any) -> None:
    """A module gets a child: somebody builds or changes a model, perhaps on a config that is known."""
    if _models:
        _models.pop(id(vars(module).get("config")), None)


# -- weights that change under a cache ---------------------------------------------------------------------------------


def mark(config: Any) -> int | None:
    """Changes when a model that is known is trained or its adapters are switched; cheap, and reads no values, so that
    a forward may ask for it. ``None`` where the model is not known, or its weights are elsewhere."""
    model = known(config)
    if model is None:
        return None
    modules = [module for _, module in walk(model)]
    tensors = [t for module in modules for t in module._parameters.values() if t is not None]
    if any(t.is_meta for t in tensors):
        return None
    switches = [str(_switches(module)) for module in modules]
    return hash((*(0 if t.is_inference() else t._version for t in tensors), *switches))


def check_unchanged(cache: Any, source: Any) -> None:
    """Refuse a cache whose model was trained, or had its adapters switched, after the cache was fed.

    Noticed where the model was known by then, and the change counted (``p.data`` does not count)."""
    now = None if cache._made is None else mark(config_of(source))
    if now is not None and now != cache._made:
        raise ValueError(
            "the model's weights or adapters were changed after this cache was fed: keep it before they change, or "
            "reset() it and feed it again"
        )
