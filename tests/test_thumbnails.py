"""What a person is shown of a frame, beside the pixels that the encoder saw, and the way of both to the page."""

import csv
import dataclasses
import io
import json
from contextlib import closing

import numpy as np
import pytest
from PIL import Image

from streamclr import UserError
from streamclr.cli.entry import main
from streamclr.labelling.candidates import pixels, read_candidates
from streamclr.labelling.exchange import export_labels
from streamclr.labelling.session import LabelSession
from streamclr.labelling.store import Labels, Question
from streamclr.models.formats.reader import Predictor
from streamclr.models.predict import usual_options
from streamclr.records.directory import RunDirectory
from streamclr.records.options import RunOptions
from streamclr.runs.prepare import prepare
from streamclr.runs.run import run
from streamclr.streams.sight import Sight
from streamclr.streams.spec import fit_of
from support.images import make_folder

SIZE, WIDTH, HEIGHT, N = 16, 320, 180, 160


def test_a_question_keeps_its_thumbnail_as_long_as_it_is_asked(tmp_path):
    with closing(Labels(tmp_path / "labels.sqlite")) as labels:
        first, second = (Question(f"{i:032x}", i, i) for i in range(2))
        labels.ask([(first, b"png"), (second, b"png")], thumbnails={first.key: b"jpeg"})
        assert (labels.thumbnail(first.key), labels.thumbnail(second.key)) == (b"jpeg", None)
        labels.ask([(second, b"png")])
        assert labels.thumbnail(first.key) is None


def test_labels_of_an_earlier_version_have_no_thumbnails(tmp_path):
    with closing(Labels(tmp_path / "labels.sqlite")) as labels:
        labels._connection.execute("DROP TABLE thumbnails")
    with closing(Labels(tmp_path / "labels.sqlite")) as labels:
        assert labels.thumbnail("0" * 32) is None


def opened(path):
    session = LabelSession(RunDirectory(path))
    session.prepare()
    return session


def small_run(source, path, **options):
    options = {"size": SIZE, "width": 1, "buffer": 16, "recipe": "paper", "probes": 0, "guards": "off"} | options
    return run(RunOptions(source=str(source), label_budget="12", out=str(path), **options))


def test_images_of_a_folder_are_shown_as_they_are_and_those_of_a_dataset_enlarged(tmp_path):
    small_run(f"folder:{make_folder(tmp_path / 'images', 20, 80)}", tmp_path / "run", fractions="1", images=40)
    with closing(opened(tmp_path / "run")) as session:
        for question in session.questions:
            shown = Image.open(io.BytesIO(session.labels.thumbnail(question.key)))
            assert (shown.format, shown.size) == ("JPEG", (80, 80))
            small = np.asarray(shown.resize((SIZE, SIZE), Image.Resampling.BOX)).astype(int)
            assert np.abs(small - pixels(session.labels.picture(question.key)).permute(1, 2, 0).numpy()).mean() < 12
    source = "synthetic:?train=20&test=20"
    small_run(source, tmp_path / "other", fractions="1", images=40)
    assert not any(candidate.thumbnail for candidate in read_candidates(tmp_path / "other" / "candidates.bin"))


def write_clip(path):
    """Something that crosses a background of stripes."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=30)
        stream.width, stream.height, stream.bit_rate = WIDTH, HEIGHT, 8_000_000
        for number in range(N):
            frame = np.full((HEIGHT, WIDTH, 3), 60, np.uint8)
            frame[:, ::8] = 90
            x = 2 * number % (WIDTH - 60)
            frame[60:120, x : x + 60] = (220, 200, 30) if number < N // 2 else (30, 60, 220)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")))
        container.mux(stream.encode())
    return path


@pytest.fixture(scope="module")
def of_a_clip(tmp_path_factory):
    """A run on a clip, with regions."""
    pytest.importorskip("av")
    path = tmp_path_factory.mktemp("clip")
    clip = write_clip(path / "clip.mkv")
    small_run(f"{clip}?regions=all:0,0,100%,100%;left:0,0,50%,100%", path / "run", predict=True)
    return path


@pytest.mark.system
def test_each_question_of_a_camera_has_a_picture_of_the_same_frame(of_a_clip, tmp_path):
    with closing(opened(of_a_clip / "run")) as session:
        assert len(session.questions) == 12
        sizes = set()
        for question in session.questions:
            shown = Image.open(io.BytesIO(session.labels.thumbnail(question.key)))
            sizes.add(shown.size)
            seen = np.asarray(shown.resize((SIZE, SIZE), Image.Resampling.BILINEAR)).astype(int)
            own = pixels(session.labels.picture(question.key)).permute(1, 2, 0).numpy()
            assert np.abs(seen - own).mean() < 10
        assert sizes == {(256, 144), (160, 180)}  # of both regions, in their own proportions
        export_labels(session, tmp_path / "labels.csv")
        for row in csv.DictReader((tmp_path / "labels.csv").open()):
            assert (tmp_path / row["image"]).read_bytes() == session.labels.thumbnail(row["key"])
            assert row["image"].endswith(".jpeg")
        export_labels(session, tmp_path / "tasks.json")
        tasks = json.loads((tmp_path / "tasks.json").read_text())
        assert all(task["data"]["image"].startswith("data:image/jpeg;base64,") for task in tasks)


@pytest.mark.system
def test_the_page_serves_it(of_a_clip):
    pytest.importorskip("fastapi")
    from fastapi.testclient import TestClient

    from streamclr.web.app import make_app
    from streamclr.web.site import Site

    site = Site([of_a_clip / "run"])
    (run_id,) = site.views
    try:
        labels = site.worker(run_id).session.labels
        site.worker(run_id).session.prepare()
        client, key = TestClient(make_app(site)), labels.questions()[0].key
        answer = client.get(f"/api/runs/{run_id}/pictures/{key}")
        assert (answer.headers["content-type"], answer.content) == ("image/jpeg", labels.thumbnail(key))
        with labels._change() as db:
            db.execute("DELETE FROM thumbnails")
        answer = client.get(f"/api/runs/{run_id}/pictures/{key}")
        assert (answer.headers["content-type"], answer.content) == ("image/png", labels.picture(key))
        assert client.get(f"/api/runs/{run_id}/pictures/{'0' * 32}").status_code == 404
    finally:
        site.close()


@pytest.mark.system
def test_predictions_and_the_account_are_by_region(of_a_clip):
    lines = [json.loads(line) for line in (of_a_clip / "run" / "predictions.jsonl").read_text().splitlines()]
    places = [(line["source"], line["region"]) for line in lines]
    assert [places.count((str(of_a_clip / "clip.mkv"), region)) for region in ("all", "left")] == [N, N]
    account = RunDirectory(of_a_clip / "run").results["account"]
    assert account["received"] == account["learned"] == account["predicted"] == 2 * N


# ----------------------------------------------------------------------------------------------------------------------
# What a model sees is what it learned from.


def test_a_model_opens_a_source_as_it_learned(tmp_path, capsys):
    clip = write_clip(tmp_path / "clip.mkv")
    for fit in ("crop", "letterbox", "stretch"):
        model = Predictor(["a", "b"], 24, len, fit)
        assert usual_options(model, str(clip)) == {"size": 24, "fit": fit}
        assert usual_options(model, f"{clip}?size=48") == {"fit": fit}
        assert usual_options(model, f"{clip}?fit={fit}") == {"size": 24}
        assert usual_options(model, "cifar10") == {}
        assert usual_options(model, "synthetic:") == {"size": 24}
    assert capsys.readouterr().err == ""
    assert usual_options(model, f"{clip}?fit=crop") == {"size": 24}
    assert capsys.readouterr().err == (
        "streamclr: fit=crop, and the model learned from frames with fit=stretch: it sees others now\n"
    )


@pytest.mark.system
@pytest.mark.parametrize("fit", [None, "crop", "letterbox"])
def test_an_exported_model_sees_the_pixels_that_the_run_saw(tmp_path, capsys, fit):
    """The file says how frames became squares, and predict opens any source so."""
    pytest.importorskip("onnxscript")
    folder, rng = tmp_path / "images", np.random.default_rng(0)
    for c in range(2):
        (folder / f"class{c}").mkdir(parents=True)
        for i in range(10):
            picture = rng.integers(0, 255, (40, 90, 3), np.uint8)
            picture[:, 45 * c : 45 + 45 * c] //= 4
            Image.fromarray(picture).save(folder / f"class{c}" / f"{i}.png")
    source = f"folder:{folder}" + (f"?fit={fit}" if fit else "")
    small_run(source, tmp_path / "run", fractions="1", images=20)
    assert "of each 90x40 frame" in capsys.readouterr().err
    assert fit_of(RunDirectory(tmp_path / "run").config.source) == (fit or "stretch")
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "m.onnx")]) == 0
    assert main(["export", str(tmp_path / "run"), "--format", "pretrained", "--out", str(tmp_path / "p")]) == 0
    capsys.readouterr()
    found = []
    for model, asked in (("run", f"folder:{folder}"), ("m.onnx", f"folder:{folder}"), ("p", f"folder:{folder}"),
                         ("m.onnx", f"folder:{folder}?fit={fit or 'stretch'}&size={SIZE}")):  # fmt: skip
        assert main(["predict", str(tmp_path / model), "--source", asked]) == 0
        found.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            assert one["class"] == same["class"]
            assert one["probability"] == pytest.approx(same["probability"], abs=2e-3)
    about = json.loads((tmp_path / "m.onnx.json").read_text())["metadata"]
    assert about["fit"] == (fit or "stretch") == Sight(fit=about["fit"]).fit


def test_a_run_that_was_left_unfinished_goes_on_with_its_fit(tmp_path):
    """Of an earlier version, whose source says nothing: with the command that it was started with."""
    folder = make_folder(tmp_path / "images", 20, 24)
    small = {"size": SIZE, "width": 1, "buffer": 16, "recipe": "paper", "fractions": "1"}
    options = RunOptions(source=f"folder:{folder}", out=str(tmp_path / "r"), **small)
    assert fit_of(prepare(options)[0].source) == "stretch"
    plan = dataclasses.asdict(prepare(options)[0]) | {"source": f"folder:{folder}", "out": None}
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.json").write_text(json.dumps(plan))
    again, stream, _ = prepare(options)
    assert again.source == f"folder:{folder}?fit=crop"
    assert fit_of(again.source) == stream.source.streamed.sight.fit == "crop"
    with closing(RunDirectory.of(again)) as directory:
        assert not directory.differences(again)
    given = prepare(dataclasses.replace(options, source=f"folder:{folder}?fit=letterbox"))[0]
    assert fit_of(given.source) == "letterbox"
    with pytest.raises(UserError, match=r"source is .*fit=crop there, .*fit=letterbox here"):
        RunDirectory.of(given)
