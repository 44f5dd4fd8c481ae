import signal
from contextlib import closing

import pytest
import torch
from hypothesis import HealthCheck, settings

from streamclr import resnet18
from streamclr.encoders.projection import ContrastiveModel
from support.runs import made_run

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # in the background of a shell; the tests' own processes would too
    signal.signal(signal.SIGINT, signal.default_int_handler)


settings.register_profile(  # the same examples each time, however busy the machine is
    "repeatable", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")


SYSTEM_FIXTURES = {  # they export a model, or start other processes of torch, Ray or a server
    "exported_run", "onnx_file", "torch_file", "serve", "found", "left_alone", "ray_here",
}  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    for item in items:
        if SYSTEM_FIXTURES.intersection(item.fixturenames):
            item.add_marker(pytest.mark.system)


@pytest.fixture(autouse=True)
def _same_start():
    torch.set_num_threads(1)  # the tests run in two processes side by side
    torch.manual_seed(0)  # weights do not depend on the tests before, of which each process has others each time


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


@pytest.fixture
def serve():
    """Starts a server as `support.pages.Served` does; all that were started end with the test."""
    from support.pages import Served

    started = []

    def start(*words, port=0):
        started.append(Served(*words, port=port))
        return started[-1]

    yield start
    for served in started:
        served.close()


@pytest.fixture(scope="session")
def exported_run(tmp_path_factory):
    """A run directory, and its classifier as ONNX and as a program of torch: 32 px, classes a to e."""
    pytest.importorskip("onnxscript")
    from streamclr.models.export import export

    torch.set_num_threads(1)
    directory = made_run(tmp_path_factory.mktemp("exported") / "run")
    return directory.path, export(directory)[0], export(directory, "torch")[0]


@pytest.fixture
def held_port():
    """A port at which a server may be started again and again: nobody else is given it in between."""
    from support.camera import HeldPort

    with closing(HeldPort()) as port:
        yield port.number


@pytest.fixture
def camera():
    """Makes cameras that send over the network; all are closed at the end."""
    from support.camera import Camera

    cameras = []

    def make(*args, **kwargs):
        cameras.append(Camera(*args, **kwargs))
        return cameras[-1]

    yield make
    for one in cameras:
        one.close()
