"""What an experiment would run: the plan, and which classes of ImageNet."""

from types import SimpleNamespace

import pytest
from PIL import Image

from streamclr import UserError
from streamclr.base.files import write_json
from streamclr.cli.entry import main
from streamclr.sweeps import lab as lab_module
from streamclr.sweeps.lab import Lab, LabOptions

NAMES = [f"n{label:08}" for label in range(24)]


@pytest.fixture(autouse=True)
def _cifar10_alone(monkeypatch):
    """There is CIFAR-10, whose size and length are all that a plan needs, and a folder of ImageNet if it is given."""
    real = lab_module._open

    def opened(config, data_dir):
        if config.source.startswith("imagenet:"):
            return real(config, data_dir)
        if config.source != "cifar10":
            raise UserError("not here")
        return SimpleNamespace(epoch=50_000, n_images=None, size=32, live=False, in_time=False, train=())

    monkeypatch.setattr(lab_module, "_open", opened)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    lab_module._resolve.cache_clear()
    yield
    lab_module._resolve.cache_clear()


@pytest.fixture
def imagenet(tmp_path):
    """A folder of 24 classes, of one image each."""
    for split in ("train", "val"):
        for name in NAMES:
            (tmp_path / "imagenet" / split / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / "imagenet" / split / name / "1.JPEG")
    return tmp_path / "imagenet"


def listed(tmp_path, names, file="classes.txt"):
    (tmp_path / file).write_text("\n".join(names))
    return str(tmp_path / file)


def plan_of(capsys, *words):
    """Rows by name, and what else was said."""
    with pytest.raises(SystemExit) as end:
        main(["reproduce", *map(str, words), "--plan"])
    assert end.value.code == 0
    out, said = capsys.readouterr()
    rows = {line.split("  ")[0].strip(): " ".join(line.split()) for line in out.splitlines()[3:] if line.strip()}
    return rows, said


def test_the_plan_for_gpus_needs_none(tmp_path, capsys):
    words = ["labels", "--scale", "paper", "--device", "cuda", "--seeds", "2", "--out", tmp_path / "out"]
    rows, said = plan_of(capsys, *words)
    encoder = "resnet18 of width 64 with the small stem and batch norm"
    assert rows["fifo"] == f"fifo 2 0 cifar10, 32 px {encoder} 5,000,000 0, 1"
    assert rows["supervised"] == f"supervised 2 0 cifar10, 32 px {encoder} – 0, 1"
    assert len(rows) == 7
    assert "14 jobs, 0 of them done; how long they take is unknown: this machine has no GPU" in said
    assert not (tmp_path / "out" / "runs").exists()
    assert main([str(word) for word in ("reproduce", *words)]) == 2
    assert capsys.readouterr().err.strip().splitlines() == [
        "streamclr: no device 'cuda' on this machine or in this build of torch: use cpu"
    ]


def test_the_plan_tells_which_jobs_are_done(tmp_path, capsys):
    lab = Lab(LabOptions(out=str(tmp_path), scale="paper", device="cuda", plan=True))
    (tmp_path / "jobs").mkdir()
    for job in lab.runs(policy="random", images=5_000_000)[:2]:
        write_json(lab._result(job), {})
    rows, said = plan_of(capsys, "labels", "--scale", "paper", "--device", "cuda", "--out", tmp_path)
    assert rows["random"].startswith("random 3 2 ")
    assert "21 jobs, 2 of them done" in said


def test_steps_of_the_papers_scale_are_not_timed_on_a_cpu(tmp_path, capsys):
    _, said = plan_of(capsys, "gradient", "--scale", "paper", "--out", tmp_path)
    assert "for GPUs, is not timed on a CPU" in said


def test_the_plan_tells_what_is_left_out_and_how_to_get_it(tmp_path, imagenet, capsys):
    words = ["curves", "--scale", "paper", "--device", "cuda", "--data", imagenet, "--out", tmp_path / "out"]
    rows, said = plan_of(capsys, *words, "--classes", listed(tmp_path, NAMES[:21]))
    assert {row.partition(" ")[0] for row in rows} == {"CIFAR-10", "ImageNet-20"}
    assert "imagenet, 20 classes, 224 px resnet18 of width 64 with the imagenet stem" in rows["ImageNet-20 contrast"]
    assert "CIFAR-100 is left out (not here): give --data DIR with cifar-100-binary.tar.gz" in said
    assert "SVHN is left out (not here): give --data DIR with train_32x32.mat, test_32x32.mat" in said
    assert "classes.txt lists 21 classes: list 50 or more): unpack ImageNet (image-net.org) as DIR/train/CLASS" in said
    rows, said = plan_of(capsys, *words)
    assert "imagenet, 20 classes, 224 px" in rows["ImageNet-20 fifo"]
    assert "ImageNet-50 is left out (classes=50, and " in said


def test_a_job_is_known_by_its_classes_and_not_by_the_file_that_lists_them(tmp_path, imagenet):
    def key(classes=None, **options):
        more = {"scale": "paper", "device": "cuda", "plan": True, "out": str(tmp_path / "out"), "data": str(imagenet)}
        lab = Lab(LabOptions(classes=classes, **more | options))
        return lab.runs(n_imagenet=20, images=1000)[0].key

    first = key(listed(tmp_path, NAMES[:20]))
    assert key(listed(tmp_path, NAMES[:24], "longer.txt")) == first
    others = {key(), key(listed(tmp_path, NAMES[1:21])), key(listed(tmp_path, NAMES[20::-1])), key(precision="bf16")}
    assert len(others | {first}) == 5


def test_bad_lists_of_classes(tmp_path, imagenet, capsys):
    unknown, twice = listed(tmp_path, [*NAMES, "cat"], "a.txt"), listed(tmp_path, [*NAMES, NAMES[2]], "b.txt")
    paper = ["curves", "--scale", "paper", "--device", "cuda", "--plan", "--out", tmp_path / "out"]
    for words, told in (
        (
            [*paper, "--data", imagenet, "--classes", unknown],
            f"{unknown} lists 'cat', which is not in {imagenet}/train",
        ),
        ([*paper, "--data", imagenet, "--classes", twice], "lists 'n00000002' twice"),
        ([*paper, "--data", imagenet, "--classes", "no.txt"], "no file 'no.txt': give --classes a file"),
        ([*paper, "--data", tmp_path, "--classes", unknown], "say with --data where its train/ and val/ are"),
        ([*paper, "--classes", unknown], "say with --data where its train/ and val/ are"),
        (["labels", *paper[1:], "--classes", unknown], "classes is for 'curves --scale paper', and labels reads no"),
        (["labels", "--precision", "half"], "precision is 'half': use fp32 or bf16"),
    ):
        assert main(["reproduce", *map(str, words)]) == 2
        error = capsys.readouterr().err.strip()
        assert told in error
        assert "\n" not in error
