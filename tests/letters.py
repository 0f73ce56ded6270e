"""A tokenizer of single bytes, so that tests need no file, and a tiny model that knows as many."""

from __future__ import annotations

from typing import Any

from models import build, llama_config
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<eos>"]


def tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    core = Tokenizer(tokenizer_models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", bos_token="<eos>")


def model(**options: Any) -> Any:
    """A tiny random Llama over bytes."""
    made = build(llama_config(vocab_size=258, **options))
    made.config.eos_token_id = 1
    return made
