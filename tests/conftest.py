"""Two threads for everything: the models are tiny, and the machines that run this are shared."""

import pytest
import torch

import hf_kvcache

torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def registered():
    hf_kvcache.register()
