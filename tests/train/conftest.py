import pytest
import torch

from tests.train import helpers


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return helpers.corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
