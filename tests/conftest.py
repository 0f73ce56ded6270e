"""One thread: the models are tiny, and on a shared machine two threads wait for each other most of the time."""

import pytest
import torch

import hf_kvcache

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def registered():
    hf_kvcache.register()
