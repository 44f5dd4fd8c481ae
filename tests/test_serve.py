"""The server as a process: what it tells, and that no answer which it acknowledged is ever lost."""

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid

import httpx
import pytest

from streamclr.cli.entry import main
from streamclr.labelling.store import Labels
from streamclr.web.site import run_id
from support.labelling import make_run
from support.pages import Served, finished_run
from support.waiting import until


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = finished_run(tmp_path_factory.mktemp("runs") / "run", label_budget="250", probes=0)
    served = Served("label", path)
    ready(served, path)
    served.close()
    return path


@pytest.fixture
def copied(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


def ready(served, run):
    for _ in range(600):
        state = served.client.get(served.api(run, "/labels")).json()
        if state["ready"]:
            return state
        time.sleep(0.1)
    raise AssertionError(state["message"])


@pytest.mark.system
def test_what_a_client_is_told(run, serve):
    served = serve("serve", run)
    (one,) = served.client.get("/api/runs").json()["runs"]
    assert one["state"] == "finished"
    assert one["id"] == run_id(run)
    events = {}
    with served.client.stream("GET", "/api/live") as live:
        for line in live.iter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                events[name] = json.loads(line[6:])
            if len(events) == 4:
                break
    journal = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    assert [one["id"] for one in events["runs"]["runs"]] == [run_id(run)]
    assert abs(events["runs"]["time"] - time.time()) < 600
    assert events["now"] == {"run": run_id(run), **served.client.get(served.api(run, "/now")).json()}
    assert events["steps"]["reset"] is True
    assert events["steps"]["loss"] == [step["loss"] for step in journal]
    assert events["status"]["seen"] == journal[-1]["seen"]
    wall = served.client.get(served.api(run, "/wall")).json()
    assert len(wall["cells"]) == 32
    picture = served.client.get(wall["picture"])
    assert picture.headers["content-type"] == "image/png"


@pytest.mark.system
def test_a_run_that_begins_later_appears_and_a_deleted_one_goes(run, serve, tmp_path):
    shutil.copytree(run, tmp_path / "runs" / "one")
    served = serve("serve", tmp_path / "runs")
    with served.client.stream("GET", "/api/live") as live:
        lines = live.iter_lines()
        next(lines)
        shutil.copytree(run, tmp_path / "runs" / "two")
        until(lambda: len(served.client.get("/api/runs").json()["runs"]) == 2, seconds=60)
        shutil.rmtree(tmp_path / "runs" / "one")
        until(lambda: [one["name"] for one in served.client.get("/api/runs").json()["runs"]] == ["two"], seconds=60)
        assert served.client.get(served.api(tmp_path / "runs" / "one", "/now")).status_code == 404


class Client(threading.Thread):
    """Answers its questions one by one, each until it is acknowledged, whatever becomes of the server."""

    def __init__(self, url, keys, place):
        super().__init__()
        self.url, self.keys, self.place = url, keys, place
        self.acknowledged, self.problems = {}, []

    def run(self):
        for i, key in enumerate(self.keys):
            body = {"request": str(uuid.uuid4()), "kind": "label", "tasks": [key], "class": 1 + (self.place + i) % 10}
            while True:
                token, origin = self.url[1], self.url[0].partition("/api")[0]
                headers = {"Authorization": f"Bearer {token}", "Origin": origin}
                try:
                    answer = httpx.post(self.url[0], json=body, headers=headers, timeout=60)
                except httpx.TransportError:
                    time.sleep(0.05)
                    continue
                if answer.status_code == 200:
                    self.acknowledged[key] = body["class"]
                    break
                if answer.status_code != 401:  # which a server that was just replaced gives to the old token
                    self.problems.append(answer.text)
                    break
                time.sleep(0.05)


@pytest.mark.system
def test_200_labels_of_8_clients_survive_kills_of_the_server(copied, serve, held_port):
    served = serve("label", copied, port=held_port)
    ready(served, copied)
    labels = Labels(copied / "labels.sqlite")
    keys = [question.key for question in labels.questions()][:200]
    url = [served.base + served.api(copied, "/labels"), served.token]
    clients = [Client(url, keys[place::8], place) for place in range(8)]
    for client in clients:
        client.start()
    n_killed = 0
    while any(client.is_alive() for client in clients):
        n_before = sum(len(client.acknowledged) for client in clients)
        if n_killed < 3 and n_before >= 45 * (n_killed + 1):
            served.kill()
            known = dict(pair for client in clients for pair in list(client.acknowledged.items()))
            found = labels.answers()
            assert {key: found[key].class_id for key in known} == known
            served = serve("label", copied, port=held_port)
            url[1] = served.token
            n_killed += 1
        time.sleep(0.02)
    served.kill()
    assert n_killed == 3
    assert [client.problems for client in clients] == [[]] * 8
    known = dict(pair for client in clients for pair in client.acknowledged.items())
    assert len(known) == 200
    assert {key: answer.class_id for key, answer in labels.answers().items()} == known
    assert labels.n_answers() == 200  # and none of them twice
    labels.close()


@pytest.mark.system
def test_the_server_of_a_run_ends_with_it(run, tmp_path):
    """However it ends: the pipe to the child closes."""
    command = "run --source synthetic: --images 100000 --width 4 --buffer 32 --probes 0 --serve".split()
    command = [sys.executable, "-m", "streamclr", *command, "--out", str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    url = process.stdout.readline().decode().split()[-1]
    assert httpx.get(url, timeout=60).status_code == 303
    process.kill()
    process.wait()

    def is_refused():
        try:
            httpx.get(url, timeout=60)
        except httpx.ConnectError:
            return True
        except httpx.TransportError:  # it ended when it had just let us in
            return False
        return False

    until(is_refused, seconds=60)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "nowhere"], "no run directory"),
        (["serve", "{run}/config.json"], "no run directory"),
        (["serve", "{run}", "--port", "70000"], "port is 70000"),
        (["serve", "{run}", "--host", "no.such.host.invalid"], "cannot listen on"),
        (["serve", "{run}", "--allow-host", "evil.com:80"], "without a port"),
        (["label", "nowhere"], "no run directory"),
        (["label", "bake", "{run}"], "no command 'label bake'"),
        (["label", "export", "{run}"], "required: FILE (see streamclr label export --help)"),
    ],
)
def test_what_cannot_be_served_is_one_line(words, said, tmp_path, capsys):
    run = make_run(tmp_path / "run")
    assert main([word.format(run=run) for word in words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_port_that_is_taken_is_one_line(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", str(make_run(tmp_path / "run")), "--port", str(taken.getsockname()[1])]) == 2
    error = capsys.readouterr().err
    assert "give another --port" in error
    assert error.count("\n") == 1
