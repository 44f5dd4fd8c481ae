"""The pages in a real browser."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from playwright.sync_api import expect

from streamclr.labelling.candidates import key_of, read_clips
from streamclr.labelling.session import LabelSession
from streamclr.labelling.store import Labels
from streamclr.models.heads import Heads
from streamclr.models.versions import Versions
from streamclr.records.directory import RunDirectory
from streamclr.streams.stream import open_stream
from support.labelling import SIZE, make_run
from support.pages import ARTEFACTS, browser, finished_run

pytestmark = pytest.mark.system

chromium = pytest.fixture(scope="module")(browser)
PATIENCE = 60_000  # milliseconds, of a machine that has much else to do
expect.set_options(timeout=PATIENCE)
PHONE = {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return finished_run(tmp_path_factory.mktemp("runs") / "finished")


@pytest.fixture
def page(chromium, serve):
    """A page whose console stays empty: no script error, nothing that the content security policy had to stop; and
    that asks no other host for anything.

    serve: so that it is closed while its servers are still there.
    """
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    told, hosts = [], set()
    page.on("request", lambda request: hosts.add(urlsplit(request.url).hostname))
    page.on("console", lambda message: message.type in ("error", "warning") and told.append(message.text))
    page.on("pageerror", lambda error: told.append(str(error)))
    # A server that was killed on purpose cannot be reached for a while, and perhaps was just about to answer.
    page.foreseen = "ERR_(CONNECTION|INCOMPLETE|EMPTY_RESPONSE|CONTENT_LENGTH|SOCKET)"
    yield page
    context.close()
    assert [text for text in told if not re.search(page.foreseen, text)] == []
    assert hosts <= {"127.0.0.1", None}


def keep(page, name):
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / f"{name}.png", full_page=True)


def until(page, expression, *arg, seconds=60):
    """Wait until it is true. (Playwright's own wait needs `eval`, which these pages do not allow.)"""
    deadline = time.monotonic() + seconds
    while not page.evaluate(expression, *arg):
        assert time.monotonic() < deadline, (expression, page.locator("[role=status]").all_inner_texts())
        page.wait_for_timeout(100)


N_ON_WALL = "() => document.querySelectorAll('#wall [data-arrival]').length"


def number(page, name):
    text = page.locator(f'[data-value="{name}"]').first.inner_text()
    return float(re.sub(r"[^\d.]", "", text.split("/")[0].split("of")[0]) or 0)


def until_more(page, name, than):
    deadline = time.monotonic() + 60
    while number(page, name) <= than:
        assert time.monotonic() < deadline, f"{name} is still {than}"
        page.wait_for_timeout(100)


def until_seen(page):
    """The picture has come: a key that answers a question whose picture nobody has seen does nothing."""
    until(page, "() => document.querySelector('#picture').naturalWidth")


@pytest.fixture
def live_run(tmp_path):
    """`run --serve`, and the URL of its dashboard. Its policy scores random views, so that some images leave in each
    step, also of a stream that has nothing new."""
    options = "--source synthetic: --policy selective-bp --images 1000000 --width 4 --buffer 32 --probes 0 --port 0"
    command = [sys.executable, "-m", "streamclr", "run", *options.split(), "--serve", "--label-budget", "50"]
    command += ["--out", str(tmp_path / "live")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        process.url = re.search(r"http://\S+", process.stdout.readline().decode())[0]
        yield process
    finally:
        process.kill()
        process.wait()


def test_the_dashboard_of_a_live_run_moves(page, live_run):
    """The numbers, the charts and the wall change without a reload."""
    page.goto(live_run.url)
    assert "token" not in page.url
    expect(page.locator('[data-value="state"]').first).to_contain_text("learning")
    until(page, f"() => ({N_ON_WALL})() >= 30")
    until_more(page, "seen", 0)
    seen, first = number(page, "seen"), page.locator("#wall").inner_text()
    until_more(page, "seen", seen)
    # The next picture of the buffer comes after 200 times as long as the last took: on a disk that stalls, minutes.
    until(page, "first => document.querySelector('#wall').innerText !== first", first, seconds=600)
    expect(page.locator("#left")).to_contain_text(re.compile("score .* lowest"))
    expect(page.locator("#account")).to_contain_text("received")
    expect(page.locator("#health")).to_contain_text("collapse")
    expect(page.locator("#say")).to_have_text(re.compile("."))
    frame = page.locator("#frames li[data-source] img")
    expect(frame).to_have_count(1)
    shown = frame.get_attribute("src")
    until(page, "src => document.querySelector('#frames img').getAttribute('src') !== src", shown)
    until(page, "() => document.querySelector('#frames img').naturalWidth === 32")
    expect(page.locator("#frames .live .age")).to_have_text("live")
    until(page, "() => document.querySelectorAll('[data-chart=loss] path[d*=L]').length")
    keep(page, "dashboard")
    live_run.send_signal(signal.SIGTERM)
    assert live_run.wait(60) == 128 + signal.SIGTERM
    expect(page.locator("#connection")).to_contain_text("lost")


PREDICTING = (
    "run --source synthetic:?size=16 --images 1000000 --recipe paper --width 4 --buffer 32 --segment 32 --probes 0"
)


def test_what_the_camera_sees_with_its_class_and_how_good_that_is(page, serve, tmp_path):
    """A classifier from the source's own labels: each frame's class, what changed, counts, accuracy by class."""
    run = tmp_path / "predicting"
    command = [sys.executable, "-m", "streamclr", *PREDICTING.split(), "--predict", "--fractions", "0.1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "--checkpoint-steps", "20", "--out", str(run)], env=environment)
    try:
        while not (run / "served" / f"{1:010}").exists():
            assert process.poll() is None
            time.sleep(0.2)
        page.goto(serve("serve", tmp_path).url)
        expect(page.locator("#frames .class")).to_have_text(re.compile("^(?!no class yet)."))
        expect(page.locator("#frames .sure")).to_have_text(re.compile(r"^\d.* %$"))
        expect(page.locator("#classifier .figure")).to_contain_text(re.compile(r"^\d.* %version \d+"))
        assert page.locator("#classifier .bars tr").count() >= 5
        expect(page.locator("#classifier .bars td").last).to_have_text(re.compile(r"^\d+ of \d+$"))
        expect(page.locator("#counts-title")).to_have_text(re.compile("^Seen in the last"))
        expect(page.locator("#counts tbody tr").first).to_contain_text("%")
        expect(page.locator("#changes [data-kind=class]").first).to_be_visible()
        expect(page.locator("#changes")).to_contain_text("classifier is in use: version 1, from")
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
        expect(page.locator("#say")).to_contain_text("The run has stopped.")
        if len(list((run / "served").glob("0*"))) > 1:
            Versions(RunDirectory(run)).rollback()
            expect(page.locator("#classifier .pinned")).to_contain_text("streamclr unpin")
        expect(page.locator("#frames .age")).to_have_text(re.compile("ago$"))
        keep(page, "predicting")
    finally:
        process.kill()
        process.wait()


def test_runs_come_and_go_while_the_page_is_open(page, serve, finished, tmp_path):
    (tmp_path / "runs").mkdir()
    page.foreseen += r"|404 \(Not Found\)"  # the buffer of a run that was deleted a moment ago
    page.goto(serve("serve", tmp_path / "runs").url)
    expect(page.locator("#no-runs")).to_be_visible()
    shutil.copytree(finished, tmp_path / "runs" / "one")
    expect(page.locator("#runs button")).to_have_text([re.compile("^one")])
    expect(page.locator("#no-runs")).to_be_hidden()
    until(page, "() => document.querySelectorAll('[data-chart=loss] path[d*=L]').length")
    shutil.copytree(finished, tmp_path / "runs" / "two")
    expect(page.locator("#runs button")).to_have_text([re.compile("^one"), re.compile("^two")])
    page.locator("#runs button").last.click()
    until(page, N_ON_WALL)
    shutil.rmtree(tmp_path / "runs" / "two")
    expect(page.locator("#runs button")).to_have_text([re.compile("^one")])
    expect(page.locator("#runs [aria-pressed=true]")).to_have_count(1)  # the other is shown now
    until(page, N_ON_WALL)
    shutil.rmtree(tmp_path / "runs" / "one")
    expect(page.locator("#no-runs")).to_be_visible()
    assert page.locator("#frames:visible").count() == 0


def test_a_page_of_an_earlier_start_says_what_to_do(page, serve, finished, held_port):
    """A page that was left open, and the bookmark of it."""
    page.foreseen += r"|401 \(Unauthorized\)"
    served = serve("serve", finished, port=held_port)
    page.goto(served.url)
    expect(page.locator("#connection")).to_have_text("live")
    bookmark = page.url
    served.kill()
    serve("serve", finished, port=held_port)
    expect(page.locator("#connection")).to_contain_text("open the URL that the server printed")
    assert page.goto(bookmark).status == 401
    expect(page.locator("h1")).to_have_text("This address needs a token, or a new one")
    expect(page.locator("ol")).to_contain_text("streamclr serve RUN")
    keep(page, "old-token")


def label(page, truth, n):
    """Label the next n pictures by keyboard alone, as somebody would who knows the answers."""
    for _ in range(n):
        until_seen(page)
        task = page.locator("#picture").get_attribute("data-task")
        page.keyboard.press(str((truth[task] + 1) % 10))
        until(page, "task => document.querySelector('#picture').dataset.task !== task", task)


def true_classes(run):
    """Of each question, by its key: what a person would see."""
    labels = Labels(run / "labels.sqlite")
    questions = labels.questions()
    source = open_stream("synthetic:").source
    labels.close()
    return {question.key: int(source.labels(np.array([question.arrival]))[0]) for question in questions}


def test_fifty_labels_by_keyboard_through_a_reload_and_a_kill(page, serve, held_port, tmp_path):
    run = finished_run(tmp_path / "run")
    served = serve("label", run, port=held_port)
    page.goto(served.url)
    expect(page.locator("#classes [data-class]")).to_have_count(10)
    expect(page.locator("#picture")).to_be_visible()
    truth = true_classes(run)
    label(page, truth, 20)
    expect(page.locator("#saved")).to_have_text("saved, 20 answers")
    page.reload()
    expect(page.locator("#saved")).to_have_text("saved, 20 answers")
    label(page, truth, 15)
    expect(page.locator("#saved")).to_have_text(re.compile("saved, 3[0-9] answers"))
    acknowledged = int(re.search(r"\d+", page.locator("#saved").inner_text())[0])
    until_seen(page)
    served.kill()
    labels = Labels(run / "labels.sqlite")
    assert labels.n_answers() >= acknowledged >= 20
    label_while_away = page.locator("#picture").get_attribute("data-task")
    page.keyboard.press(str((truth[label_while_away] + 1) % 10))
    expect(page.locator("#saved")).to_contain_text("not saved")
    page.goto("about:blank")  # or it would try the new server with the token of the old one, which is a 401

    served = serve("label", run, port=held_port)
    page.goto(served.url)  # what was not acknowledged is sent now
    expect(page.locator("#saved")).to_have_text("saved, 36 answers")
    assert label_while_away in labels.answers()
    label(page, truth, 14)
    expect(page.locator("#saved")).to_have_text("saved, 50 answers")
    expect(page.locator("#accuracy")).to_contain_text(re.compile(r"\d.*%.*from 50 labels$"))
    expect(page.locator("#progress")).to_contain_text("50 of 80 labelled")
    keep(page, "label")
    right = [truth[key] + 1 == answer.class_id for key, answer in labels.answers().items()]
    assert right == [True] * 50
    labels.close()
    classifier = Heads(RunDirectory(run)).load()  # what `predict` uses from now on
    assert classifier.head.linear.out_features == len(classifier.classes) <= 10


def test_undo_skip_and_not_sure_by_keyboard(page, serve, finished):
    served = serve("label", finished)
    labels = Labels(finished / "labels.sqlite")
    page.goto(served.url)
    expect(page.locator("#picture")).to_be_visible()
    first = page.locator("#picture").get_attribute("data-task")
    page.keyboard.press("s")
    expect(page.locator("#saved")).to_have_text("saved, 1 answers")
    second = page.locator("#picture").get_attribute("data-task")
    assert second != first
    until_seen(page)
    page.keyboard.press("n")
    expect(page.locator("#saved")).to_have_text("saved, 2 answers")
    page.keyboard.press("u")
    expect(page.locator("#saved")).to_have_text("saved, 1 answers")
    assert page.locator("#picture").get_attribute("data-task") == second
    until_seen(page)
    page.keyboard.press("3")
    expect(page.locator("#saved")).to_have_text("saved, 2 answers")
    assert [answer.class_id for answer in labels.answers().values()] == [None, 3]
    page.keyboard.press("a")
    page.keyboard.type("<b>zebra</b>")
    page.keyboard.press("Enter")
    expect(page.locator("#classes [data-class]")).to_have_count(11)
    expect(page.locator("#classes")).to_contain_text("<b>zebra</b>")
    page.keyboard.press("r")
    page.keyboard.press("1")
    page.keyboard.press("Control+a")
    page.keyboard.type("first")
    page.keyboard.press("Enter")
    expect(page.locator("#classes [data-class]").first).to_contain_text("first")
    assert labels.classes()[1] == "first"
    page.keyboard.press("/")
    page.keyboard.type("zeb")
    until_seen(page)
    page.keyboard.press("Enter")
    expect(page.locator("#saved")).to_have_text("saved, 3 answers")
    assert list(labels.answers().values())[-1].class_id == 11
    labels.close()


@pytest.fixture
def looks(tmp_path):
    """A run whose questions have three looks, ten pictures each: to its encoder those of one look are alike."""
    grey = torch.full((30, 3, SIZE, SIZE), 90, dtype=torch.uint8)
    grey += torch.randint(4, grey.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    grey[torch.arange(30), torch.arange(30) % 3] += 100
    return make_run(tmp_path / "run", grey)


def test_look_alikes_and_none_of_these_by_keyboard(page, serve, looks):
    served = serve("label", looks)
    labels = Labels(looks / "labels.sqlite")
    page.goto(served.url)
    expect(page.locator("#add")).to_be_visible()  # there is no class yet
    page.keyboard.type("red")
    page.keyboard.press("Enter")
    expect(page.locator("#classes [data-class]")).to_have_count(1)
    expect(page.locator("#alike button")).to_have_count(9)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    until_seen(page)
    page.keyboard.press("1")
    expect(page.locator("#saved")).to_have_text("saved, 2 answers")
    page.keyboard.press("g")
    until_seen(page)
    n_alike = page.locator("#alike button").count()
    page.keyboard.press("x")
    expect(page.locator("#saved")).to_have_text("saved, 3 answers")  # of the picture alone, whatever is selected
    assert n_alike >= 7
    expect(page.locator("#classes [data-class]")).to_have_count(2)
    expect(page.locator("#classes")).to_contain_text("none of these")
    assert [answer.class_id for answer in labels.answers().values()] == [1, 1, 2]
    page.keyboard.press("g")
    until_seen(page)
    n_alike = page.locator("#alike button").count()
    page.keyboard.press("1")
    expect(page.locator("#saved")).to_have_text(f"saved, {4 + n_alike} answers")
    page.keyboard.press("Backspace")
    expect(page.locator("#saved")).to_have_text("saved, 3 answers")
    labels.close()


def test_a_wrong_label_is_found_and_corrected(page, serve, looks):
    session = LabelSession(RunDirectory(looks))
    session.prepare()
    images = [frame.image for clip in read_clips(looks / "candidates.bin") for frame in clip]
    truth = {key_of(image): int(image.float().mean((1, 2)).argmax()) for image in images}
    for name in ("red", "green", "blue"):
        session.labels.add_class(name)
    asked = [question.key for question in session.questions]
    wrong = asked[4]
    for i, key in enumerate(asked[:24]):
        session.labels.answer(f"answer-{i}", "label", [key], (truth[key] + (key == wrong)) % 3 + 1)
    session.close()
    served = serve("label", looks)
    page.goto(served.url)
    right = ["red", "green", "blue"][truth[wrong]]
    expect(page.locator("#accuracy")).to_contain_text("from 24 labels")
    expect(page.locator("#classes")).to_contain_text("100 %")  # held-back labels of a class
    page.keyboard.press("v")
    doubted = page.locator(f'#given .doubt[data-task="{wrong}"]')
    expect(doubted).to_contain_text(f"{right}?")
    keep(page, "review")
    doubted.click()
    expect(page.locator("#guess")).to_contain_text("labelled: ")
    until_seen(page)
    page.keyboard.press(str(truth[wrong] + 1))
    expect(page.locator("#saved")).to_have_text("saved, 25 answers")
    expect(page.locator("#given .doubt")).to_have_count(0)
    page.keyboard.press("v")
    expect(page.locator("#review")).to_be_hidden()
    labels = Labels(looks / "labels.sqlite")
    assert labels.answers()[wrong].class_id == truth[wrong] + 1
    labels.close()


def test_two_people_label_different_pictures(page, chromium, serve, looks):
    served = serve("label", looks)
    page.goto(served.url)
    expect(page.locator("#picture")).to_be_visible()
    context = chromium.new_context(viewport=PHONE)
    context.set_default_timeout(PATIENCE)
    other = context.new_page()
    other.goto(served.url)
    expect(other.locator("#picture")).to_be_visible()
    expect(other.locator("#progress")).to_contain_text("2 people label now")
    assert page.locator("#picture").get_attribute("data-task") != other.locator("#picture").get_attribute("data-task")
    page.keyboard.press("Escape")
    page.locator('[data-action="skip"]').click()
    expect(page.locator("#saved")).to_have_text("saved, 1 answers")
    other.keyboard.press("Escape")
    other.keyboard.press("u")
    expect(other.locator("#status")).to_have_text("nothing to undo")  # the answer is another's
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_pages_fit_a_phone(chromium, serve, finished, scheme):
    served = serve("serve", finished)
    context = chromium.new_context(viewport=PHONE, color_scheme=scheme, device_scale_factor=2, has_touch=True)
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.goto(served.url)
    until(page, N_ON_WALL)
    for name in ("dashboard", "label"):
        if name == "label":
            page.locator('a[href^="/label/"]:visible').first.click()
            expect(page.locator("#picture")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        small = "b => b.offsetParent && (b.offsetHeight < 32)"
        assert page.evaluate(f"[...document.querySelectorAll('main button')].filter({small}).length") == 0
        keep(page, f"{name}-phone-{scheme}")
    context.close()


def test_several_runs_lie_over_each_other(page, serve, finished, tmp_path):
    other = finished_run(tmp_path / "other", policy="fifo", label_budget=None)
    served = serve("serve", finished, other)
    page.goto(served.url)
    expect(page.locator("#legend li")).to_have_count(2)
    for box in page.locator("#legend input").all():
        box.check()
    until(page, "() => document.querySelectorAll('[data-chart=loss] path[d*=L]').length >= 2")
    page.locator("#runs button", has_text="finished").first.click()
    expect(page.locator('a[href^="/label/"]:visible')).to_have_count(1)
    page.locator("#runs button", has_text="other").click()
    expect(page.locator('a[href^="/label/"]:visible')).to_have_count(0)
    expect(page.locator("#left")).to_contain_text("it was the oldest")
    keep(page, "two-runs")


def test_a_page_without_the_token_shows_nothing(page, serve, finished):
    served = serve("serve", finished)
    page.foreseen += r"|401 \(Unauthorized\)"  # of the page, and of the icon that the browser asks for by itself
    answer = page.goto(f"http://127.0.0.1:{served.port}/")
    assert answer.status == 401
    assert "open the URL" in page.locator("body").inner_text()


def test_the_map_is_used_by_keyboard(page, serve, finished):
    served = serve("serve", finished)
    page.goto(served.url)
    until(page, N_ON_WALL)
    page.locator("#map [tabindex='0'], #map").last.focus()
    page.keyboard.press("ArrowRight")
    first = page.locator("#chosen").inner_text()
    assert "age" in first
    for _ in range(32):  # images in the buffer
        page.keyboard.press("ArrowRight")
        if page.locator("#chosen").inner_text() != first:
            break
    assert page.locator("#chosen").inner_text() != first
