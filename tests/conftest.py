import dataclasses
import signal
from contextlib import closing

import pytest
import torch
from hypothesis import HealthCheck, settings

from streamclr import resnet18
from streamclr.base.files import write_json
from streamclr.base.tensors import save_tensors
from streamclr.classifier import Head
from streamclr.encoders.inference import infer
from streamclr.encoders.projection import ContrastiveModel
from streamclr.records.directory import RunDirectory
from streamclr.records.plan import RunPlan, make_encoder

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # in the background of a shell; the tests' own processes would too
    signal.signal(signal.SIGINT, signal.default_int_handler)


settings.register_profile(  # the same examples each time, however busy the machine is
    "repeatable", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")


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


def random_images(n, size=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (n, 3, size, size), dtype=torch.uint8, generator=generator)


def run_plan(**options):
    filled = {"size": 32, "batch": 256, "segment": 256, "stem": "small", "guards": "off"}
    return RunPlan(**filled | options)


def made_run(path, size=32, **options):
    """A run directory with a model that has seen a few images."""
    config = run_plan(size=size, **{"width": 4} | options)
    directory = RunDirectory(path)
    path.mkdir()
    write_json(path / "config.json", dataclasses.asdict(config))
    torch.manual_seed(0)
    model = ContrastiveModel(make_encoder(config))
    for seed in range(3):
        model(random_images(16, size, seed) / 255)
    head = Head(model.n_features, 5)
    head.fit_scale(infer(model, random_images(64, size), model.features))
    torch.nn.init.normal_(head.linear.weight, std=0.3)
    directory.save_model(model)
    directory.save_classifiers({1.0: head}, tuple("abcde"))
    save_tensors(path / "buffer.safetensors", {"images": random_images(48, size)})
    directory.save_results({"images": 48, "labels": {}})
    return directory


@pytest.fixture
def serve():
    """Starts a server as `pages.Served` does; all that were started end with the test."""
    from pages import Served

    started = []

    def start(*words, port=0):
        started.append(Served(*words, port=port))
        return started[-1]

    yield start
    for served in started:
        served.close()


@pytest.fixture(scope="session")
def shipped_run(tmp_path_factory):
    """A run directory, and its classifier as ONNX and as a program of torch: 32 px, classes a to e."""
    pytest.importorskip("onnxscript")
    from streamclr.models.export import export

    torch.set_num_threads(1)
    directory = made_run(tmp_path_factory.mktemp("shipped") / "run")
    return directory.path, export(directory)[0], export(directory, "torch")[0]


@pytest.fixture
def held_port():
    """A port at which a server may be started again and again: nobody else is given it in between."""
    from camera import HeldPort

    with closing(HeldPort()) as port:
        yield port.number


@pytest.fixture
def camera():
    """Makes cameras that send over the network; all are closed at the end."""
    from camera import Camera

    cameras = []

    def make(*args, **kwargs):
        cameras.append(Camera(*args, **kwargs))
        return cameras[-1]

    yield make
    for one in cameras:
        one.close()
