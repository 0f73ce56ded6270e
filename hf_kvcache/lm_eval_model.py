"""How good are its answers? The lm-evaluation-harness, with every answer read through a cache.

    lm_eval --model hf-kvcache --model_args "pretrained=...,cache=int8+sink(4,1020),step=1" --tasks ...

lm-eval finds this model through the entry point ``lm_eval.models`` (in its releases after 0.4.13). For 0.4.13, which
does not look for entry points, ``lm_eval_kvcache`` is the same command with this module imported first.

Stock ``hf`` scores a request in one forward that reads no cache at all. Here log-likelihood and rolling tasks are
scored as ``likelihood.py`` says, and generation tasks give ``generate`` a fresh cache per batch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from . import compat, likelihood
from .attention import register
from .caches import KVCache

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from lm_eval.utils import handle_arg_string
except ImportError as error:
    raise ImportError(
        f"hf_kvcache.lm_eval_model needs lm-eval 0.4.13 or later ({error}): pip install 'hf-kvcache[eval]'"
    ) from error


@register_model("hf-kvcache")
class KVCacheLM(HFLM):
    """lm-eval's ``hf`` model, reading through a cache.

    Args:
        pretrained: as for ``hf``, and so is every argument that is not named here; with
            ``attn_implementation=kvcache`` attention reads the stored form.
        cache: the spec of the cache, such as ``int8+sink(4,1020)``.
        step: tokens of an answer fed at a time.

    Raises:
        ValueError: an unknown spec, a step below 1, or a model with an encoder.
    """

    def __init__(self, pretrained: Any, cache: str = "full", step: int = 1, **kwargs: Any) -> None:
        register()
        super().__init__(pretrained, **kwargs)
        if self.backend != "causal":
            raise ValueError("hf-kvcache scores decoder-only models; use --model hf for a model with an encoder")
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            raise ValueError(f"step={step!r} is not an integer of at least 1")
        self.spec, self.step = cache, step
        self.spec = self.make_cache().spec  # refuses what is unknown, before any request

    def make_cache(self) -> KVCache:
        """A fresh cache of this model's spec."""
        return KVCache.from_spec(self.model.config, self.spec)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> KVCacheLM:
        """As lm-eval's, except that commas in brackets do not separate: ``cache=int8+sink(4,1020),step=1``."""
        given = {name: value for name, value in (additional_config or {}).items() if value is not None}
        return cls(**model_args(arg_string), **given)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results about the model."""
        return {**super().get_model_info(), "kv_cache": self.spec, "kv_cache_step": self.step}

    # -- log-likelihood, rolling -------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """(sum of log-probabilities, whether all tokens are the likeliest) of (strings, context ids, answer ids)."""
        from tqdm import tqdm

        asked = [self._fitted(context, continuation) for _, context, continuation in requests]
        with tqdm(total=len(asked), disable=disable_tqdm or self.rank != 0, desc=f"Reading through {self.spec}") as bar:
            with self._autocast():
                scored = likelihood.score(
                    self.model,
                    asked,
                    self.make_cache,
                    step=self.step,
                    batch_size=override_bs or self._rows(),
                    dtype=self.softmax_dtype,
                    tick=bar.update,
                )
        answers = [(float(one.logprobs.sum()), bool(one.greedy.all())) for one in scored]
        for (strings, _, _), answer in zip(requests, answers, strict=True):
            if strings is not None:  # windows of a rolling request are recorded by the caller
                self.cache_hook.add_partial("loglikelihood", strings, answer)
        return answers

    def _fitted(self, context: Sequence[int], continuation: Sequence[int]) -> likelihood.Request:
        """Cut from the left to what the model can hold, as ``hf`` does; the last token of an answer is never fed."""
        if not 0 < len(continuation) <= self.max_length:
            raise ValueError(f"an answer of {len(continuation)} tokens does not fit in max_length={self.max_length}")
        tokens = tuple(context) + tuple(continuation)
        tokens = tokens[-(self.max_length + 1) :]
        return likelihood.Request(tokens[: -len(continuation)], tuple(continuation))

    def _rows(self) -> int:
        return self._detect_batch_size() if self.batch_size == "auto" else int(self.batch_size)

    def _autocast(self) -> torch.autocast:
        enabled = self.mixed_precision_dtype is not None
        return torch.autocast(device_type=self.device.type, dtype=self.mixed_precision_dtype, enabled=enabled)

    # -- generation --------------------------------------------------------------------------------------------------

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **kwargs: Any) -> torch.Tensor:
        """``generate`` with a fresh cache: tokens [B, S] after the prompts [B, T], S up to ``max_length``."""
        cache, mask = self.make_cache(), kwargs.get("attention_mask")
        if mask is None or bool(mask.all()) or likelihood.takes_padding(cache):
            kwargs[compat.cache_argument(self.model.forward)] = cache
            return super()._model_generate(context, max_length, stop, **kwargs)
        return self._generate_by_length(context, max_length, stop, **kwargs)

    def _generate_by_length(
        self, context: torch.Tensor, max_length: int, stop: list[str], attention_mask: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Where a pad would be stored: the rows of each length by themselves, without their pads."""
        pads = (attention_mask == 0).sum(-1)  # [B], on the left
        made: dict[int, torch.Tensor] = {}
        for pad in pads.unique().tolist():
            rows = (pads == pad).nonzero()[:, 0]
            prompts, mask = context[rows, pad:], attention_mask[rows, pad:]
            out = self._model_generate(prompts, max_length - pad, stop, attention_mask=mask, **kwargs)
            made |= dict(zip(rows.tolist(), out[:, prompts.shape[1] :], strict=True))
        result = context.new_full((len(context), max(map(len, made.values()))), self.tokenizer.pad_token_id)
        for row, tokens in made.items():
            result[row, : len(tokens)] = tokens
        return torch.cat([context, result], 1)


def model_args(arg_string: str) -> dict[str, Any]:
    """``"cache=sink(4,8),step=1"`` -> ``{"cache": "sink(4,8)", "step": 1}``: commas in brackets do not separate."""
    found = {}
    for piece in filter(None, re.split(r",(?![^(]*\))", arg_string.strip())):
        name, equals, value = piece.partition("=")
        if not equals:
            raise ValueError(f"model_args: {piece!r} is not NAME=VALUE")
        found[name.strip()] = handle_arg_string(value)
    return found


def main() -> None:
    """``lm_eval_kvcache``: lm_eval's own command line; importing this module has registered the model."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
