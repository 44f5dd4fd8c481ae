"""How the benchmarks measure, and what they measure."""

import inspect
import random
import subprocess
import sys
from importlib import import_module

import pytest
import torch

import bench
import peers
from sections import SECTIONS, report
from sections.contestant import layers_of
from sections.measure import Cost, Ratio, Spread, below, cost_of, cpu_seconds, in_turns
from sections.plain_simclr import NTXentLoss, PlainLoop, SimCLR, SimCLRTransform
from sections.rivals import Contestant
from sections.subjects import Steps, clips_at_hand, frames, full, make_clip
from streamclr import ContrastScoring, FIFOReplace, Guarded, compact, mobilenet_v2, nt_xent, open_stream
from streamclr.policy import Reservoir
from support.images import random_images
from support.tiny import tiny


def test_cases_take_turns_after_a_warm_up():
    told = []
    costs = in_turns({"a": lambda: told.append("a"), "b": lambda: told.append("b")}, turns=3)
    assert told == ["a", "b"] * 4
    assert {name: len(found) for name, found in costs.items()} == {"a": 3, "b": 3}


def test_a_ratio_is_within_a_turn():
    """The machine was four times as slow in the second turn: that is no difference of the two."""
    ratio = Ratio.of([Cost(2, 3), Cost(8, 12), Cost(2, 3)], [Cost(1, 1), Cost(4, 4), Cost(1, 1)])
    assert ratio.wall == Spread(2, 2, 2)
    assert ratio.cpu == Spread(3, 3, 3)
    assert str(ratio) == "wall 2.00 (2.00 to 2.00), CPU 3.00 (3.00 to 3.00)"
    assert ratio.at_most(3)
    assert not ratio.at_most(2.5)
    assert ratio.at_least(2)
    assert not ratio.at_least(2.5)


def test_the_spread_is_that_of_the_quartiles():
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 100.0]) == Spread(3, 2, 4)
    assert Spread.of([7.0]) == Spread(7, 7, 7)


def test_a_case_may_say_which_seconds_count():
    assert cost_of(lambda: 1234.5).wall == 1234.5


BURN = """
import sys, time
while time.process_time() < 0.3:
    pass
print("burnt", flush=True)
sys.stdin.read()
"""


@pytest.mark.system
def test_cpu_time_includes_processes_that_run_and_those_that_have_ended():
    before = cpu_seconds()
    with subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert child.pid in below()
        running = cpu_seconds() - before
        child.stdin.close()
        child.wait()
    assert running > 0.25
    assert cpu_seconds() - before >= running - 0.03  # ticks of a hundredth
    assert child.pid not in below()


def test_frames_are_different_and_have_numbers():
    found = frames(600, 16)
    assert found.shape == (600, 3, 16, 16)
    assert len(found.unique(dim=0)) == 600
    assert torch.equal(frames(100, 16, start=250), found[250:350])


@pytest.mark.parametrize("policy", [FIFOReplace(), ContrastScoring(20), Guarded(ContrastScoring(20))])
def test_a_full_buffer_is_as_after_a_long_run(policy):
    learner = full(tiny(policy=policy, buffer=100), 16)
    assert len(learner.buffer) == 100
    assert sorted(learner.buffer.ages.tolist()) == list(range(1, 101))
    assert learner.buffer.scores.isfinite().all()
    step = learner.learn_many(frames(8, 16, 5000))
    assert step.number == 1
    assert step.rescored == (0 if isinstance(policy, FIFOReplace) else 0.05)  # a 20th, as in each step


def test_a_case_of_steps_takes_a_new_segment_each_time():
    steps = Steps(tiny(policy=Reservoir()), 16, 3, segment=12)
    for number in range(3):
        steps()
        assert steps.learner.n_steps == number + 1
    assert steps.learner.buffer.n_seen == 40 + 3 * 12


# ----------------------------------------------------------------------------------------------------------------------
# The rival


def test_the_plain_loss_is_nt_xent():
    z0, z1 = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(NTXentLoss(0.3)(z0, z1), nt_xent(*(torch.nn.functional.normalize(z) for z in (z0, z1)), 0.3))


@pytest.mark.parametrize("size", [32, 64])
def test_plain_views_are_what_they_say(size):
    from PIL import Image

    random.seed(0)
    picture = Image.fromarray(random_images(1, size)[0].permute(1, 2, 0).numpy())
    transform = SimCLRTransform(size)
    views = torch.stack([transform(picture) for _ in range(200)])
    assert views.shape == (200, 3, size, size)
    assert views.dtype == torch.float32
    assert len(views.unique(dim=0)) > 190
    grey = (views * torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)) + torch.tensor([0.485, 0.456, 0.406]).view(
        3, 1, 1
    )
    assert grey.min() >= -1e-6
    assert grey.max() <= 1 + 1e-6
    is_grey = (grey.std(1) < 1e-3).flatten(1).all(1)
    assert 0.1 < is_grey.float().mean() < 0.35  # 20 %


def test_plain_colours_change_and_stay_in_proportion():
    from PIL import Image

    random.seed(0)
    red = Image.new("RGB", (8, 8), (200, 40, 40))
    found = {SimCLRTransform(8).jitter(red).getpixel((0, 0)) for _ in range(50)}
    assert len(found) > 40
    assert any(blue > green for _, green, blue in found)
    assert any(green > blue for _, green, blue in found)  # the hue turns both ways


@pytest.mark.parametrize("make", [lambda: compact(4), mobilenet_v2])
def test_the_rival_has_the_same_layers(make):
    encoder = make().eval().requires_grad_(False)
    images = torch.rand(2, 3, 32, 32)
    layers = layers_of(encoder)
    assert torch.allclose(layers(images).flatten(1), encoder(images), atol=1e-5)
    assert all(parameter.requires_grad for parameter in layers.parameters())
    assert not any(parameter.requires_grad for parameter in encoder.parameters())  # it is a copy


@pytest.mark.system
def test_the_plain_loop_learns():
    encoder = compact(4)
    model = SimCLR(layers_of(encoder), encoder.n_features)
    images = random_images(32, 16).permute(0, 2, 3, 1).contiguous().numpy()
    loop = PlainLoop(model, images, 8)
    before = [parameter.clone() for parameter in model.parameters()]
    assert loop.epoch() > 0
    assert below()  # its workers wait for the next epoch
    assert not any(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert len(list(loop.loader)) == 4


@pytest.mark.system
def test_a_contestant_tells_its_cost_and_its_memory():
    contestant = Contestant("plain", "compact", 2)
    assert all(cost.wall > 0 and cost.cpu > 0 for cost in (contestant.turn(), contestant.turn()))
    contestant.close()
    assert contestant.process.returncode == 0
    assert contestant.memory > 100
    assert contestant.memory_of_workers > 1


def test_why_python_failed_is_a_line():
    assert peers.failure(sys.executable, "-c", "pass") == ""
    assert peers.failure(sys.executable, "-c", "import nothing_of_this_name").startswith("ModuleNotFoundError")
    assert peers.failure(sys.executable, "-c", "raise SystemExit(3)") == "exit code 3"


@pytest.mark.system
def test_a_peer_that_cannot_be_had_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peers, "VENV", tmp_path / "venv")
    peers_of = {"streamclr-no-such-package": ("rivals", "pass"), "pip": ("capture", "import nothing_of_this_name")}
    monkeypatch.setattr(peers, "PEERS", peers_of)
    monkeypatch.setattr(sys, "argv", ["peers.py"])
    peers.main()
    not_installed, not_working = capsys.readouterr().out.splitlines()
    assert not_installed.startswith("streamclr-no-such-package is left out: ")
    assert not_working.startswith("pip is left out: ModuleNotFoundError")
    sees = "import torch, sys; assert sys.prefix != sys.base_prefix"
    assert peers.failure(tmp_path / "venv" / "bin" / "python", "-c", sees) == ""


# ----------------------------------------------------------------------------------------------------------------------
# The tables


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.setattr(report, "TABLES", {})
    monkeypatch.setattr(report, "QUESTIONS", {})
    return report.TABLES


def test_each_section_has_a_table(tables, tmp_path):
    report.begin("one", "What is one?")
    report.row("a figure", "1.2", "at most 1", False)
    report.begin("two", "What is two?")
    report.row("another", 3)
    text = report.write(tmp_path / "results", ["one", "two"], 1.0).read_text()
    assert "Made by `python benchmarks/bench.py one two`" in text
    table = "| figure | measured | target |\n|---|---|---|\n| a figure | 1.2 | at most 1 (not met) |\n"
    assert f"## one\n\nWhat is one?\n\n{table}" in text
    assert text.endswith("| another | 3 |  |\n")


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_says_what_it_measures(name):
    if name == "two_clips":
        pytest.importorskip("playwright")
    section = getattr(import_module(f"sections.{SECTIONS[name]}"), name)
    assert inspect.getdoc(section)
    assert all(parameter.default is not parameter.empty for parameter in inspect.signature(section).parameters.values())


@pytest.mark.parametrize(("words", "told"), [(["nonsense"], "no section 'nonsense'"), (["--help"], "start_up")])
def test_the_command(words, told, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.py", *words])
    try:
        bench.main()
    except SystemExit as error:
        print(error)
    assert told in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------------------
# Clips


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    pytest.importorskip("av")
    return make_clip(tmp_path_factory.mktemp("clip") / "clip.mp4", n_frames=20, width=160, height=120)


def test_a_made_clip_moves(clip):
    images = torch.cat(list(open_stream(clip, size=32).segments(8)))
    assert len(images) == 20
    assert (images[1:].int() - images[:-1].int()).abs().float().mean((1, 2, 3)).min() > 1


def test_clips_at_hand_are_those_that_are_named(clip, monkeypatch, tmp_path):
    monkeypatch.setenv("CLIPS", f"{tmp_path / 'none.mp4'}:{clip}")
    assert clips_at_hand() == [clip]
