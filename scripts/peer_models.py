"""Models for the tests of an sdist, which has the common tests of models but not those of each family.

``scripts/peer_tests.py`` copies this file to ``tests/peer/test_models.py`` of the sdist. A class per family of
``tests/families.py`` inherits the common tests.
"""

from __future__ import annotations

import importlib
import os
import sys
import unittest
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(os.environ["PEER_ROOT"]) / "tests"))
families = importlib.import_module("families")
common: Any = importlib.import_module("tests.test_modeling_common")


class Tester:
    """What the common tests ask about a model."""

    batch_size, seq_length, is_training = 3, 7, True
    encoder_seq_length, decoder_seq_length = 7, 9  # a decoder that is fed more than its encoder was

    def __init__(self, family: str) -> None:
        self.family = family
        config = families.Case(family).model.config
        self.hidden_size, self.num_hidden_layers = config.hidden_size, config.num_hidden_layers
        self.num_attention_heads = config.num_attention_heads

    def get_config(self) -> Any:
        config = families.Case(self.family).model.config
        config._attn_implementation = None  # what the test asks for
        return config

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        encodes = self.family in families.ENCODER_DECODERS
        inputs = ids("", self.batch_size, self.encoder_seq_length if encodes else self.seq_length)
        if encodes:
            inputs |= ids("decoder_", self.batch_size, self.decoder_seq_length)
        return self.get_config(), inputs


def ids(prefix: str, rows: int, tokens: int) -> dict[str, torch.Tensor]:
    """Tokens [rows, tokens], and the mask of pads on the left: two in the first row."""
    mask = torch.ones(rows, tokens, dtype=torch.long)
    mask[0, :2] = 0
    return {f"{prefix}input_ids": torch.randint(1, 90, (rows, tokens)), f"{prefix}attention_mask": mask}


def classes(config: Any) -> tuple[Any, ...]:
    """The base model and the one that generates."""
    name = type(config).__name__.removesuffix("Config")
    endings = ("Model", "ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    found = (getattr(transformers, name + ending, None) for ending in endings)
    return tuple(model for model in found if model is not None and (not config.is_encoder_decoder or keeps(model)))


def keeps(model: Any) -> bool:
    return not model.__name__.endswith("ForCausalLM")  # a decoder alone has other inputs


for family in os.environ["PEER_FAMILIES"].split():
    tester = Tester(family)
    body = dict(
        all_model_classes=classes(tester.get_config()),
        model_tester=tester,
        is_encoder_decoder=family in families.ENCODER_DECODERS,
        has_attentions=True,
    )
    globals()[f"{family}_Test"] = type(f"{family}_Test", (common.ModelTesterMixin, unittest.TestCase), body)
