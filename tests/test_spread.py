import csv
import json
import shutil

import pytest
import torch
import torch.nn.functional as F

from streamclr.base.tensors import load_metadata
from streamclr.cli.entry import main
from streamclr.labelling import session as session_module
from streamclr.labelling.candidates import Candidate, key_of, pixels, read_clips
from streamclr.labelling.exchange import export_labels
from streamclr.labelling.spread import find_companions, same_scene
from streamclr.records.options import RunOptions
from streamclr.runs.run import run
from streamclr.scenes import SPREAD_WEIGHT
from support.camera import write_clip
from support.images import random_images
from support.labelling import COLOURS, SIZE, colours, make_run, opened

LENGTH, CLIP = 12, 8  # frames of a scene and of a clip: every third clip has a cut in its middle


def scenes(n_scenes, length=LENGTH, noise=6):
    """Frames of scenes; the class of a scene is its number modulo 3."""
    frames = colours(n_scenes).repeat_interleave(length, 0)
    generator = torch.Generator().manual_seed(1)
    return frames - torch.randint(noise, frames.shape, dtype=torch.uint8, generator=generator).minimum(frames)


def class_of(question, length=LENGTH):
    return question.arrival // length % COLOURS + 1


def label(one, n=None):
    for question in one.questions[:n]:
        one.labels.answer(f"answer-{question.key}", "label", [question.key], class_of(question))


def arrivals(one, question):
    rows = one.labels._read("SELECT arrival FROM companions WHERE key = ? ORDER BY arrival", question.key)
    return [arrival for (arrival,) in rows]


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    path = make_run(tmp_path_factory.mktemp("spread") / "run", scenes(18), budget="24", clip=CLIP)
    one = opened(path)
    for name in ("red", "green", "blue"):
        one.labels.add_class(name)
    one.close()
    return path


@pytest.fixture
def session(asked, tmp_path):
    one = opened(shutil.copytree(asked, tmp_path / "run"))
    yield one
    one.close()


# ----------------------------------------------------------------------------------------------------------------------
# Which frames.


def clip_of(images, tracks=None, first=0):
    tracks = [-1] * len(images) if tracks is None else tracks
    return [
        Candidate(key_of(image), first + i, 0.0, image, track)
        for i, (image, track) in enumerate(zip(images, tracks, strict=True))
    ]


def test_a_question_takes_the_frames_of_its_scene_with_it(session):
    images = scenes(18)
    assert len(session.questions) == 24
    n_companions = []
    for question in session.questions:
        own = arrivals(session, question)
        assert {arrival // CLIP for arrival in own} <= {question.arrival // CLIP}
        assert {arrival // LENGTH for arrival in own} <= {question.arrival // LENGTH}  # never across the cut
        assert question.arrival not in own
        for arrival, picture in zip(own, session.labels.companions(question.key), strict=True):
            assert torch.equal(pixels(picture), images[arrival])
        n_companions.append(len(own))
    assert set(n_companions) == {3, 7}  # clips with a cut, and without


def test_frames_of_two_cameras_are_apart_although_they_look_the_same():
    clip = clip_of(scenes(1, 8), tracks=[-10] * 5 + [-11] * 3)
    assert [frame.arrival for frame in same_scene(clip, clip[4])] == [0, 1, 2, 3]
    assert [frame.arrival for frame in same_scene(clip, clip[6])] == [5, 7]


def test_a_known_track_counts_whatever_the_pixels_say():
    clip = clip_of(random_images(8, SIZE), tracks=[7, 7, 7, 8, 8, 7, -1, -1])
    assert [frame.arrival for frame in same_scene(clip, clip[1])] == [0, 2, 5]
    features = torch.randn(1, 4, generator=torch.Generator().manual_seed(0))

    def never(images):
        raise AssertionError

    found = find_companions([clip[1]], [clip], features, torch.zeros(4), never)
    assert [frame.arrival for frame in found[clip[1].key]] == [0, 2, 5]


def test_where_the_track_is_not_known_the_features_have_their_say():
    """A change that the pixels hardly show, as of the sign in the middle of the same road."""
    clip = clip_of(scenes(1, 4))
    mean = torch.tensor([100.0, 100.0])  # without it all would be alike
    of_clip = {key: mean + torch.tensor(x) for key, x in zip(
        [frame.key for frame in clip], [[1.0, 0.1], [1.0, 0.0], [0.0, 1.0], [0.9, 0.3]], strict=True
    )}  # fmt: skip
    found = find_companions(
        [clip[1]], [clip], of_clip[clip[1].key][None], mean,
        lambda images: torch.stack([of_clip[key_of(image)] for image in images]),
    )  # fmt: skip
    assert [frame.arrival for frame in found[clip[1].key]] == [0, 3]


def test_frames_that_lie_are_no_companions_where_guards_are_on(tmp_path):
    images = scenes(18)
    images[1::8] = torch.randint(256, images[1::8].shape, dtype=torch.uint8)
    one = opened(make_run(tmp_path / "run", images, budget="24", clip=CLIP, tracks=torch.zeros(216), guards="on"))
    companions = [arrival for question in one.questions for arrival in arrivals(one, question)]
    assert {arrival % 8 for arrival in companions} == {0, 2, 3, 5, 6, 7}  # 4 is asked about
    one.close()


def test_companions_last_as_long_as_their_question(tmp_path):
    path = make_run(tmp_path / "run", scenes(18), budget="12", clip=CLIP, finished=False, step=1)
    one = opened(path)
    stays = one.questions[-1]
    one.labels.answer("answer-1", "unsure", [stays.key])
    before = arrivals(one, stays)
    assert before
    (path / "candidates.bin").unlink()
    make_run(path, scenes(36)[216:], budget="12", clip=CLIP, finished=False, step=2)  # others in their place
    one.prepare()
    assert arrivals(one, stays) == before
    held = {key for (key,) in one.labels._read("SELECT DISTINCT key FROM companions")}
    assert held <= {question.key for question in one.questions}
    assert len(held) == 12
    one.close()


# ----------------------------------------------------------------------------------------------------------------------
# Training.


def test_spread_labels_have_their_weight_and_the_group_of_their_question(session, monkeypatch):
    shown = []

    def spy(name):
        real = getattr(session_module, name)

        def called(features, targets, n_classes, weights=None, groups=None, **options):
            shown.append((features, targets, weights, groups))
            return real(features, targets, n_classes, weights, groups, **options)

        monkeypatch.setattr(session_module, name, called)

    spy("cross_validate")
    for start in (0, 2, 4, 6, 8, 10):  # two at one go
        keys = [question.key for question in session.questions[start : start + 2]]
        session.labels.answer(f"answer-{start}", "label", keys, class_of(session.questions[start]))
    n_companions = [len(arrivals(session, question)) for question in session.questions[:12]]
    trained = session.train()
    ((features, targets, weights, groups),) = shown
    assert (trained.n_labels, trained.n_spread) == (12, sum(n_companions))
    assert weights.tolist() == [1.0] * 12 + [SPREAD_WEIGHT] * sum(n_companions)
    assert torch.equal(features[:12], session.features[:12])
    whose = torch.arange(12).repeat_interleave(torch.tensor(n_companions))
    assert torch.equal(targets[12:], targets[:12][whose])
    assert torch.equal(groups[12:], groups[:12][whose])
    assert len(groups.unique()) == 6
    near = (features[12:] - features[:12][whose]).norm(dim=1).mean()
    assert near < 0.5 * (features[:12] - features[:12].mean(0)).norm(dim=1).mean()  # they are those of its neighbours


def test_only_given_labels_are_counted(session):
    label(session, 20)
    trained = session.train()
    state = session.state()
    assert state["progress"] == {"asked": 24, "labelled": 20, "skipped": 0, "unsure": 0, "left": 4}
    assert state["accuracy"]["n"] == sum(one["n"] for one in state["classes"]) == 20
    assert [n for n, *_ in session.history()] == [20]
    info = session.heads.labelled()
    assert (info.n_labels, info.n_spread) == (20, trained.n_spread)
    assert trained.n_spread > 60
    assert json.loads(load_metadata(session.heads.labelled_file)["about"])["n_spread"] == trained.n_spread


def test_an_answer_that_is_taken_back_takes_its_spread_labels_with_it(session):
    label(session, 13)
    n_spread = session.train().n_spread
    session.labels.undo("undo-1")
    trained = session.train()
    assert trained.n_labels == 12
    assert trained.n_spread == n_spread - len(arrivals(session, session.questions[12]))
    session.labels.answer("other", "unsure", [session.questions[0].key])
    assert session.train().n_spread == trained.n_spread - len(arrivals(session, session.questions[0]))


def test_a_frame_that_is_asked_about_itself_is_no_companion(session):
    """As in a second pass over the same images, whose clips begin elsewhere."""
    label(session)
    n_spread = session.train().n_spread
    one, other = session.questions[:2]
    with session.labels._change() as db:
        picture = session.labels._connection.execute("SELECT picture FROM questions WHERE key = ?", [one.key])
        db.execute("INSERT INTO companions VALUES (?, 999, ?)", [other.key, picture.fetchone()[0]])
    session._companions.clear()
    assert len(session.labels.companions(other.key)) == len(session._companion_images([other.key])[other.key]) + 1
    assert session.train().n_spread == n_spread


def test_the_encoder_is_tuned_on_the_neighbouring_frames_too(session, monkeypatch):
    shown, real = [], session_module.choose_classifier

    def choose(model, images, targets, *rest):
        shown.append((images, targets))
        return real(model, images, targets, *rest, steps=2, quiet=True)

    monkeypatch.setattr(session_module, "choose_classifier", choose)
    label(session, 15)
    trained = session.train("auto")
    ((images, targets),) = shown
    assert len(images) == len(targets) == 15 + trained.n_spread
    stream = {key_of(image): number // LENGTH % COLOURS for number, image in enumerate(scenes(18))}
    assert [stream[key_of(image)] for image in images] == [trained.classes[target] - 1 for target in targets.tolist()]
    assert trained.why.split(":")[1].split(" held")[0].endswith("of 3")  # a fifth of those given
    assert session.train("auto", spread=False).n_spread == 0
    assert len(shown[1][0]) == 15


def test_frames_without_an_answer_are_for_self_training(session):
    label(session, 10)
    answered = {question.arrival // CLIP for question in session.questions[:10]}
    images, numbers = session._other_frames()
    frames = {
        key_of(frame.image): frame for clip in read_clips(session.directory.path / "candidates.bin") for frame in clip
    }
    found = [frames[key_of(image)].arrival for image in images]
    assert {arrival // CLIP for arrival in found} == set(range(18 * LENGTH // CLIP)) - answered
    for number in numbers.unique():
        own = [arrival for arrival, one in zip(found, numbers, strict=True) if one == number]
        assert len({arrival // LENGTH for arrival in own}) == 1  # no cut within
    label(session)
    assert len(session._other_frames().scenes.unique()) == 18 * LENGTH // CLIP - 24  # clips that are not asked about


@pytest.mark.system
def test_self_training_is_a_candidate_while_there_are_questions_left(session):
    label(session, 18)
    assert "self-trained" in session.train("auto").why
    assert session.train("selftrained").kind == "selftrained"
    assert "self-trained" not in session.train("auto", spread=False).why


def noisy_scenes(n_scenes, length, generator):
    """Frames and their classes, which are hard to see: each frame has a pattern of its own."""
    classes = torch.arange(n_scenes).repeat_interleave(length) % COLOURS
    patterns = torch.randint(100, (len(classes), 3, 4, 4), generator=generator).float()
    images = F.interpolate(patterns, SIZE, mode="bicubic").clamp(0, 120)
    images[torch.arange(len(classes)), classes] += 40
    return images.byte(), classes


@pytest.mark.parametrize("seed", [0, 1])
def test_spreading_makes_a_better_classifier(tmp_path, seed):
    """The more patterns of a class are shown, the less they are taken for the class."""
    generator = torch.Generator().manual_seed(seed)
    images, _ = noisy_scenes(30, CLIP, generator)
    tracks = torch.arange(len(images)) // CLIP
    one = opened(make_run(tmp_path / "run", images, budget="24", clip=CLIP, tracks=tracks, width=4))
    for name in ("red", "green", "blue"):
        one.labels.add_class(name)
    for i, question in enumerate(one.questions):
        one.labels.answer(f"answer-{i}", "label", [question.key], class_of(question, CLIP))
    test, truth = noisy_scenes(600, 1, generator)
    right = {}
    for spread in (False, True):
        trained = one.train(spread=spread)
        right[spread] = float((one.heads.load().probabilities(test).argmax(1) == truth).float().mean())
    assert trained.n_spread == 24 * 7
    assert right[True] > right[False] + 0.08
    one.close()


# ----------------------------------------------------------------------------------------------------------------------
# Around it.


def test_the_command_says_how_far_labels_were_spread(session, capsys):
    label(session, 16)
    run = str(session.directory.path)
    n_spread = session.train().n_spread
    assert main(["label", "train", run, "--classifier", "linear"]) == 0
    assert f"classifier from 16 labels, spread to {n_spread} neighbouring frames, " in capsys.readouterr().out
    assert main(["label", "train", run, "--classifier", "linear", "--spread", "off"]) == 0
    assert "classifier from 16 labels, " in (said := capsys.readouterr().out)
    assert "spread" not in said
    assert main(["label", "train", run, "--spread", "far"]) == 2
    assert "spread is 'far': use on or off" in capsys.readouterr().err


def test_other_tools_get_given_answers_only(session, tmp_path):
    label(session, 16)
    session.train()
    assert export_labels(session, tmp_path / "tasks.csv") == 24
    rows = list(csv.DictReader((tmp_path / "tasks.csv").open()))
    assert len(rows) == len(list((tmp_path / "tasks-images").iterdir())) == 24
    assert sum(row["answer"] == "label" for row in rows) == 16


def test_a_run_keeps_the_tracks_of_its_stream(tmp_path):
    options = {"source": "synthetic:?stc=12&size=16", "encoder": "resnet18", "width": 1, "buffer": 10, "images": 120}
    options |= {"probes": 0, "fractions": "1", "classifier": "linear", "label_budget": "6"}
    path, _ = run(RunOptions(**options, out=str(tmp_path / "run")))
    clips = read_clips(path / "candidates.bin")
    assert [len(clip) for clip in clips] == [CLIP] * 15
    assert all(frame.track == frame.arrival // 12 for clip in clips for frame in clip)
    one = opened(path)
    for question in one.questions:
        expected = range(question.arrival // CLIP * CLIP, question.arrival // CLIP * CLIP + CLIP)
        same = [n for n in expected if n // 12 == question.arrival // 12 and n != question.arrival]
        assert arrivals(one, question) == same
    one.close()


def test_two_recordings_in_one_clip_are_told_apart(tmp_path):
    pytest.importorskip("av")
    files = [write_clip(tmp_path / f"{name}.mp4", 24, size=16) for name in "ab"]
    (tmp_path / "both.txt").write_text("\n".join(map(str, files)))
    options = {
        "source": str(tmp_path / "both.txt"),
        "size": 16,
        "encoder": "resnet18",
        "width": 1,
        "buffer": 12,
        "segment": 12,
        "guards": "off",
    }
    path, _ = run(RunOptions(**options, label_budget="1", label_disk="1M", out=str(tmp_path / "run")))
    frames = [frame for clip in read_clips(path / "candidates.bin") for frame in clip]
    camera = {frame.arrival: frame.arrival % 12 // 6 for frame in frames}  # half of each segment
    assert len(frames) > 20
    for one in frames:
        assert one.track < -1
        for other in frames:
            if one.arrival // 12 != other.arrival // 12 or camera[one.arrival] != camera[other.arrival]:
                assert one.track != other.track
