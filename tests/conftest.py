import pytest
import torch

from streamclr import resnet18
from streamclr.encoder import ContrastiveModel


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)  # the tests run in two processes side by side


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def model():
    """A small model whose BatchNorm statistics are not the initial ones."""
    torch.manual_seed(0)
    model = ContrastiveModel(resnet18(width=4))
    model.train()
    for _ in range(3):
        model(torch.rand(8, 3, 16, 16))
    return model


def random_images(n, size=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (n, 3, size, size), dtype=torch.uint8, generator=generator)
