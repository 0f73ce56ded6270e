"""One thread: the models are tiny, and on a shared machine two threads wait for each other most of the time."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # looked at when triton is first imported, which transformers does

import hf_kvcache  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def registered():
    hf_kvcache.register()
