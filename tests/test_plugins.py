"""Parts of a researcher by name, from a file outside of the package, in every command and process."""

import json
import math
import os
import re
import signal
import sys
from contextlib import closing
from types import SimpleNamespace

import pytest

from streamclr import Learner, UserError, resnet18
from streamclr.base.files import read_json
from streamclr.base.plugins import Plugin, bring, full_name, look_in, names_plugin, plugins_of
from streamclr.cli.entry import main
from streamclr.encoders.architecture import Architecture
from streamclr.fleet.options import SHARED, SimulateOptions, learner_options
from streamclr.fleet.simulate import prepared, simulated
from streamclr.policy import POLICIES, build_policy
from streamclr.records.options import RunOptions
from streamclr.sweeps.job import DESCRIPTION, Job
from streamclr.sweeps.lab import Lab, LabOptions
from support.images import make_folder, random_images
from support.plugins import POLICY, at_home, forget
from support.runs import content

TINY = "--recipe paper --buffer 16 --width 2 --stem small --fractions 1 --classifier linear --probes 0".split()


@pytest.fixture
def home(tmp_path, monkeypatch):
    yield at_home(tmp_path / "home", monkeypatch)
    forget("mine", "installed")


@pytest.fixture
def source(tmp_path):
    return f"folder:{make_folder(tmp_path / 'images', 40, 8)}?stc=5"


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("nowhere:Brightest", "no module nowhere for the policy nowhere:Brightest: install it, or add its directory"),
        ("mine.sub:Brightest", "no module mine.sub for the policy"),
        ("mine:Brigthest", r"mine has no class Brigthest: .* did you mean 'Brightest'\?"),
        ("mine:function", r"mine has no class function \(it is of the type function\): give package.module:Class"),
        ("mine:NUMBER", r"mine has no class NUMBER \(it is of the type int\)"),
        ("mine:Brightest?shade=1", "the policy mine:Brightest has no option 'shade': .*use share, seed"),
        ("mine:Brightest?share=much", "the policy mine:Brightest, option share is 'much': use a number"),
        ("mine:", "no policy 'mine:': .*package.module:Class"),
        (".mine:Brightest", "no module '.mine' for the policy .mine:Brightest: write package.module:Class"),
        ("brightest", "no policy 'brightest': use contrast, .*package.module:Class"),
        ("mine:torch.Tensor?x=1", "mine:torch.Tensor has no method keep"),
        (
            "mine:torch.Generator",
            r"mine:torch.Generator has no method keep: a policy is a class with keep\(pool, size, model\)",
        ),
    ],
)
def test_what_cannot_be_a_policy_is_one_line(home, source, policy, told, capsys):
    assert main(["run", source, *TINY, "--policy", policy, "--out", str(home / "run")]) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    with pytest.raises(UserError, match=told):
        raise UserError(said.removeprefix("streamclr: "))
    assert not (home / "run").exists()


def test_a_mistake_inside_a_plugin_is_shown_as_it_is(home):
    (home / "mine.py").write_text("import no_such_module_at_all")
    look_in(str(home))
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        build_policy("mine:Brightest")


def test_options_become_what_the_defaults_or_annotations_say(home):
    (home / "mine.py").write_text(
        "from typing import Optional\n"
        "class Any:\n"
        "    def __init__(self, a=1, b=0.5, c='x', d: bool = False, e: Optional[int] = None, f=None, g=(1, 2)):\n"
        "        self.given = (a, b, c, d, e, f)\n"
        "    def keep(self, pool, size, model): ...\n"
    )
    look_in(str(home))
    assert build_policy("mine:Any?a=2&b=2&c=2&d=on&e=2&f=2").given == (2, 2.0, "2", True, 2, "2")
    for options, told in (("a=x", "a whole number"), ("d=1", "d is '1': use on or off"), ("g=3", "give it in Python")):
        with pytest.raises(UserError, match=told):
            build_policy(f"mine:Any?{options}")


def install(path, name="installed", policy=POLICY):
    """A package with entry points, as pip leaves it."""
    (path / f"{name}.py").write_text(policy + "\n\ndef net():\n    return torch.nn.Flatten()\n")
    about = path / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        f"[streamclr.policies]\nbrightest = {name}:Brightest\ncontrast = {name}:Brightest\n"
        f"[streamclr.encoders]\nflat = {name}:net\n"
    )


def test_an_installed_package_gives_names(home, monkeypatch):
    install(home)
    monkeypatch.syspath_prepend(home)
    assert type(build_policy("brightest?share=0.5")).__name__ == "Brightest"
    assert type(build_policy("contrast")).__name__ == "ContrastScoring"  # what is built in keeps its name
    assert full_name("policy", "brightest?share=1", POLICIES) == "installed:Brightest?share=1"
    assert full_name("policy", "contrast", POLICIES) == "contrast"
    assert Architecture.resolve("flat", 8).encoder == "installed:net"
    with pytest.raises(UserError, match="no policy 'brighest': did you mean 'brightest'"):
        build_policy("brighest")


def test_where_a_command_looks_for_it(home):
    for options, looks in (
        ({"policy": "mine:Brightest?share=1"}, True),
        ({"policies": "contrast,mine:Brightest"}, True),
        ({"encoder": "mine:net"}, True),
        ({"encoder": "hf:microsoft/resnet-18", "policy": "contrast?a=b:c"}, False),
        ({}, False),
    ):
        assert names_plugin(options) == looks
    look_in(str(home))
    assert sys.path[-1] == os.environ["PYTHONPATH"].split(os.pathsep)[-1] == str(home)  # so that it hides nothing
    look_in(str(home))
    assert sys.path.count(str(home)) == os.environ["PYTHONPATH"].count(str(home)) == 1


def test_the_source_of_a_plugin_is_its_file_or_its_package(home):
    look_in(str(home))
    one = Plugin.of("mine:Brightest")
    assert one.files == {"mine.py": (home / "mine.py").read_text()}
    (home / "common.py").write_text("# beside it")
    assert Plugin.of("mine:Brightest") == one
    package = home / "installed"
    (package / "deep").mkdir(parents=True)
    for file in ("__init__.py", "deep/__init__.py", "deep/policy.py"):
        (package / file).write_bytes(b"# \xe9")
    two = Plugin.of("installed.deep.policy:Name")
    assert list(two.files) == ["installed/__init__.py", "installed/deep/__init__.py", "installed/deep/policy.py"]
    (package / "deep" / "policy.py").write_text("# another")
    assert Plugin.of("installed.deep.policy:Name").hash != two.hash != one.hash
    assert "installed" not in sys.modules  # nothing was imported
    assert Plugin.of("nowhere:Name").hash == ""
    assert Plugin.of("numpy:sort").hash  # of an installed package: known by its source, and never sent
    assert Plugin.of("numpy:sort").files == {}
    assert plugins_of({"policy": "mine:Brightest?share=1", "encoder": "hf:a/b", "seed": 0}) == [one]


def test_another_machine_gets_the_source_that_was_sent(home, tmp_path, monkeypatch):
    look_in(str(home))
    sent = Plugin.of("mine:Brightest")
    bring([sent], tmp_path / "same")
    assert not (tmp_path / "same").exists()
    (home / "mine.py").write_text("class Brightest: ...")  # what that machine has under the name
    bring([sent], tmp_path / "other")
    assert build_policy("mine:Brightest?share=0.5").share == 0.5
    with pytest.raises(UserError, match="numpy:sort is another here, or not installed: install the package as it is"):
        bring([Plugin("numpy:sort", "00000000", {})], tmp_path / "no")


def test_a_run_keeps_the_hash_of_its_plugins_and_says_when_one_has_changed(home, source, monkeypatch, capsys):
    words = ["run", source, *TINY, "--policy", "mine:Brightest?share=0.5", "--images", "80"]
    assert main([*words, "--out", "whole"]) == 0
    hash_ = read_json(home / "whole" / "plugins.json")["mine:Brightest"]
    assert hash_ == Plugin.of("mine:Brightest").hash
    assert read_json(home / "whole" / "config.json")["policy"] == "mine:Brightest?share=0.5"

    def stopped(out):
        with monkeypatch.context() as patch:
            patch.setattr("streamclr.runs.loop.Pace.due", lambda self: signal.raise_signal(signal.SIGTERM))
            assert main([*words, "--out", out]) == 143
        capsys.readouterr()

    stopped("same")
    assert main([*words, "--out", "same"]) == 0
    assert "has changed" not in capsys.readouterr().err
    assert content(home / "same") == content(home / "whole")

    stopped("changed")
    (home / "mine.py").write_text(POLICY + "\n# changed\n")
    assert main([*words, "--out", "changed"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "has changed" in line]
    new = Plugin.of("mine:Brightest").hash
    assert said == [
        f"streamclr: the source of a part of this run has changed (mine:Brightest was {hash_}, is {new}): "
        "its steps from here on are by the new source"
    ]
    assert read_json(home / "changed" / "plugins.json") == {"mine:Brightest": new}
    assert "has changed" in (home / "changed" / "events.jsonl").read_text()


PARTS = "--loss mine:decorrelated?weight=0.5 --views mine:shaded?least=0.7 --weak-view mine:turned".split()


def test_a_loss_and_views_in_a_run_that_is_stopped_and_goes_on(home, source, monkeypatch):
    words = ["run", source, *TINY, *PARTS, "--images", "64"]
    assert main([*words, "--out", "whole"]) == 0
    assert set(read_json(home / "whole" / "plugins.json")) == {"mine:decorrelated", "mine:shaded", "mine:turned"}
    with monkeypatch.context() as patch:
        patch.setattr("streamclr.runs.loop.Pace.due", lambda self: signal.raise_signal(signal.SIGTERM))
        assert main([*words, "--out", "stopped"]) == 143
    assert main([*words, "--out", "stopped"]) == 0
    assert content(home / "stopped") == content(home / "whole")


def test_parts_by_name_in_python(home):
    look_in(str(home))
    learner = Learner(
        resnet18(2), "mine:Brightest?share=0.5", 8, loss="mine:decorrelated?weight=0.5", views="mine:shaded?least=0.7",
        weak_view="mine:turned", device="cpu",
    )  # fmt: skip
    assert learner.policy.share == 0.5
    assert math.isfinite(learner.learn_many(random_images(8)).loss)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--loss mine:decorrelate", "mine has no function decorrelate: .*did you mean 'decorrelated'"),
        ("--loss mine:decorrelated?wait=1", "the loss mine:decorrelated has no option 'wait': .*use weight"),
        ("--loss mine:decorrelated?weight=x", "option weight is 'x': use a number"),
        ("--loss mine:NUMBER", r"mine has no function NUMBER \(it is of the type int\)"),
        ("--loss mine:Brightest", "mine:Brightest cannot be called: .* a function of z0 and z1"),
        ("--views mine:shades", "mine has no function shades"),
        ("--views nowhere:shaded", "no module nowhere for the views nowhere:shaded"),
        ("--weak-view mine:turn", "mine has no function turn: .*did you mean 'turned'"),
        ("--weak-view flipp", "no weak view 'flipp': did you mean 'flip'"),
    ],
)
def test_what_cannot_be_another_part_is_one_line(home, source, words, told, capsys):
    assert main(["run", source, *TINY, *words.split(), "--out", str(home / "run")]) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    assert re.search(told, said), said
    assert not (home / "run").exists()


@pytest.mark.parametrize(("name", "value"), [("loss", "mine:decorrelated"), ("views", "mine:shaded")])
def test_a_server_cannot_name_a_part_of_a_device(name, value):
    sent = {option: getattr(RunOptions(), option) for option in SHARED} | {name: value}
    with pytest.raises(UserError, match=rf"a fleet has one of streamclr's own \w+, not '{value}'"):
        learner_options(sent, {})
    assert "mine" not in sys.modules


def test_a_run_without_plugins_keeps_no_hash(home, source):
    assert main(["run", source, *TINY, "--policy", "fifo", "--images", "16", "--out", "run"]) == 0
    assert not (home / "run" / "plugins.json").exists()


def test_a_run_is_named_by_the_class(home, source):
    assert main(["run", source, *TINY, "--policy", "mine:Brightest", "--images", "16"]) == 0
    assert (home / "runs" / "folder-Brightest" / "results.json").is_file()


def test_compare(home, source):
    words = [source, *TINY, *PARTS, "--policies", "mine:Brightest?share=0.5,fifo", "--seeds", "1", "--images", "48"]
    assert main(["compare", *words, "--out", "here"]) == 0
    assert list(read_json(home / "here" / "results.json")["accuracy"]) == ["mine:Brightest?share=0.5", "fifo"]
    assert (home / "here" / "mine.Brightest,share=0.5-0" / "plugins.json").is_file()


@pytest.mark.system
def test_compare_in_other_processes(home, source):
    words = [source, *TINY, *PARTS, "--policies", "mine:Brightest?share=0.5,fifo", "--seeds", "1", "--images", "48"]
    assert main(["compare", *words, "--out", "here"]) == 0
    assert main(["compare", *words, "--out", "there", "--on", "cores"]) == 0
    tables = [read_json(home / at / "results.json")["accuracy"] for at in ("here", "there")]
    assert tables[0] == tables[1]


def test_a_job_is_measured_by_its_plugins_too(home, tmp_path, monkeypatch):
    look_in(str(home))
    job = Job("one", "run", "module:function", {"policy": "mine:Brightest", "device": "cpu"})
    assert ":" not in Job("mine:Brightest-0", "run", "module:function", job.arguments).key
    plain = Job("two", "run", "module:function", {"policy": "fifo", "device": "cpu"})
    for one in (job, plain):
        one.write(tmp_path / one.title)
    by = [read_json(tmp_path / name / DESCRIPTION)["measured_by"]["code"] for name in ("one", "two")]
    assert by[0] == f"{by[1]}+{Plugin.of('mine:Brightest').hash}"
    assert "plugins" not in read_json(tmp_path / "two" / DESCRIPTION)


def test_results_of_another_source_are_told(home, source, monkeypatch, capsys):
    look_in(str(home))
    lab = Lab(LabOptions(out=str(home / "out"), seeds=1, device="cpu"))
    job = Job("one", "run", "module:function", {"policy": "mine:Brightest", "device": "cpu", "images": 0})
    job.write(lab.out)
    measured_by = read_json(lab.out / DESCRIPTION)["measured_by"]
    (lab.out / "jobs").mkdir()
    (lab.out / "jobs" / f"{job.key}.json").write_text(json.dumps({"measured_by": measured_by}))
    assert lab._done({job.key: job}) == {job.key}
    assert capsys.readouterr().err == ""
    (home / "mine.py").write_text(POLICY)
    assert lab._done({job.key: job}) == {job.key}
    assert "1 of 1 results were measured by other code" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["labels", "--policies", "mine:Nothing"], "mine has no class Nothing"),
        (["lazy", "--policies", "mine:Brightest"], "lazy has no table of policies: leave --policies out"),
        (["labels", "--policies", "mine:Brightest,mine:Brightest"], "names a policy twice"),
    ],
)
def test_reproduce_refuses_in_one_line(home, words, told, capsys):
    assert main(["reproduce", *words, "--out", str(home / "out")]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.system
def test_a_fleet_of_flowers_engine(home, tmp_path):
    """Whose processes it starts."""
    pytest.importorskip("flwr")
    pytest.importorskip("ray")
    for part in ("train", "val"):
        make_folder(tmp_path / "split" / part, 20, 8)
    words = f"fleet simulate --source folder:{tmp_path / 'split'} --stc 5 --split stc --devices 2 --rounds 1".split()
    words += "--round-images 16 --buffer 8 --width 1 --stem small --workers 1 --patience 1000 --out fleet".split()
    assert main([*words, "--policy", "mine:Brightest?share=0.5"]) == 0
    for device in ("0000", "0001"):
        assert read_json(home / "fleet" / "devices" / device / "plugins.json").keys() == {"mine:Brightest"}


def test_a_fleet(home, source):
    look_in(str(home))
    asked = SimulateOptions(
        source=source, policy="mine:Brightest?share=0.5", devices=2, rounds=1, round_images=16, buffer=8, width=1,
        stem="small", out=str(home / "fleet"),
    )  # fmt: skip
    learner, _ = prepared(asked)
    with closing(
        simulated(asked, learner, home / "devices", SimpleNamespace(node_config={"partition-id": 1}), {})
    ) as one:
        assert one.plan.policy == "mine:Brightest?share=0.5"
        assert (one.directory.path / "plugins.json").is_file()
        assert one.learn({}, 16, "1").n_images == 16
