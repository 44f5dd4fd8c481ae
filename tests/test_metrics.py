import http.client
import math
import re
import socket
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from streamclr import Learner, UserError, resnet18
from streamclr.runs import metrics
from streamclr.runs.metrics import METRICS, Metrics, of_account, of_answers, of_served, of_step
from streamclr.streams.account import Account
from support.images import random_images
from support.waiting import until

DOCS = Path(__file__).parent.parent / "docs" / "service.md"


@pytest.fixture
def served():
    served = Metrics(0)
    yield served
    served.close()


def ask(port, path="/metrics", method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.connect()
    with connection.sock.dup() as client:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        body = answer.read().decode()
        assert client.recv(1) == b""  # it is done with us: those who are not yet gone take places
    connection.close()
    return answer, body


def parse(text):
    """A strict reading of text format 0.0.4, without timestamps: samples by name and labels; anything odd is an error.

    HELP and TYPE stand once before the samples of a name, which stand together; counters are called so.
    """
    assert text.endswith("\n")
    samples, kinds, helped, current = {}, {}, set(), None
    for line in text[:-1].split("\n"):
        if match := re.fullmatch(r"# HELP ([a-z_]+) (\S.*)", line):
            assert match[1] not in helped
            helped.add(match[1])
            current = match[1]
        elif match := re.fullmatch(r"# TYPE ([a-z_]+) (counter|gauge)", line):
            assert match[1] == current
            assert match[1] not in kinds
            kinds[match[1]] = match[2]
        else:
            match = re.fullmatch(
                r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{([a-z_]+)="((?:[^"\\]|\\["\\n])*)"\})? (NaN|[+-]Inf|-?\d\S*)', line
            )
            assert match, line
            name, label, value, number = match.groups()
            assert name == current
            assert name in kinds
            plain = re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], value or "")
            key = (name,) if label is None else (name, label, plain)
            assert key not in samples
            samples[key] = float(number)
            assert name.endswith("_total") == (kinds[name] == "counter")
            assert kinds[name] == "gauge" or samples[key] >= 0
    return samples


def test_a_step_and_an_account_are_served(served):
    learner = Learner(resnet18(width=2), buffer=4)
    step = learner.learn_many(random_images(6))
    account = Account(9, 6, Counter(late=2), Counter(broken=1), predicted=8)
    served.update(**of_served({"version": 3, "accuracy": 0.75}), challengers_total={"taken": 3, "refused": 4})
    served.update(
        **of_step(step), **of_account(account), checkpoint_step=0, checkpoint_failures_total=0, steps_undone_total=2
    )
    served.update(source_connected={"rtsp://a:secret@h/1": 1, "camera:0": 0})
    served.update(source_disconnects_total={"rtsp://a:secret@h/1": 3}, source_connected={"camera:0": 1})
    hook = {"sent": 7, "dropped": 2, "waiting": 1, "connected": True}
    served.update(**of_answers({"mqtt://a/b": hook | {"sent": 5, "connected": False}, "https://h/***": hook}))
    answer, body = ask(served.port)
    assert answer.status == 200
    assert answer.getheader("Content-Type") == "text/plain; version=0.0.4; charset=utf-8"
    samples = parse(body)
    assert {key[0] for key in samples} == {metric.name for metric in METRICS}
    assert samples["streamclr_up",] == 1
    assert samples["streamclr_steps_total",] == 1
    assert samples["streamclr_loss",] == step.loss
    assert samples["streamclr_replaced_ratio",] == 1
    assert samples["streamclr_frames_received_total",] == 9
    assert samples["streamclr_frames_passed_total", "reason", "late"] == 2
    assert samples["streamclr_frames_rejected_total", "reason", "broken"] == 1
    assert samples["streamclr_predictions_total",] == 8
    assert samples["streamclr_served_version",] == 3
    assert samples["streamclr_served_accuracy",] == 0.75
    assert samples["streamclr_challengers_total", "verdict", "refused"] == 4
    assert samples["streamclr_answers_sent_total", "destination", "https://h/***"] == 7
    assert samples["streamclr_answers_dropped_total", "destination", "https://h/***"] == 2
    assert samples["streamclr_answers_waiting", "destination", "mqtt://a/b"] == 1
    assert samples["streamclr_destination_connected", "destination", "mqtt://a/b"] == 0
    assert samples["streamclr_step_seconds", "phase", "training"] == step.seconds_training
    assert samples["streamclr_source_connected", "source", "rtsp://a:***@h/1"] == 1
    assert samples["streamclr_source_connected", "source", "camera:0"] == 1
    assert samples["streamclr_source_disconnects_total", "source", "rtsp://a:***@h/1"] == 3
    assert samples["streamclr_resident_memory_bytes",] > 2**20
    assert "secret" not in body


def test_before_there_is_a_head_its_accuracy_is_not_a_number(served):
    served.update(**of_served(None))
    samples = parse(served.text())
    assert samples["streamclr_served_version",] == 0
    assert math.isnan(samples["streamclr_served_accuracy",])


def test_before_the_first_step_there_is_no_count_yet(served):
    assert {key[0] for key in parse(served.text())} == {"streamclr_up", "streamclr_resident_memory_bytes"}


def test_odd_labels_and_numbers_come_through(served):
    odd = 'a "b"\\n\nc\\ é'
    served.update(frames_passed_total={odd: 2**60}, loss=math.inf, score_mean=-math.inf, projection_spread=math.nan)
    samples = parse(ask(served.port)[1])
    assert samples["streamclr_frames_passed_total", "reason", odd] == 2**60
    assert samples["streamclr_loss",] == math.inf
    assert samples["streamclr_score_mean",] == -math.inf
    assert math.isnan(samples["streamclr_projection_spread",])


def test_a_name_or_a_shape_that_is_not_known_is_a_mistake(served):
    with pytest.raises(KeyError):
        served.update(losss=1)
    with pytest.raises(TypeError):
        served.update(loss={"a": 1})
    with pytest.raises(TypeError):
        served.update(frames_passed_total=1)


def test_only_loopback_names_are_served(served):
    for host in ("127.0.0.1", "localhost", "LocalHost:9108", "[::1]:9108", "127.0.0.1:1"):
        assert ask(served.port, Host=host)[0].status == 200
    for host in ("evil.example", "evil.example:9108", "localhost.evil.example", "127.0.0.1.nip.io", ""):
        answer, body = ask(served.port, Host=host)
        assert answer.status == 403
        assert "streamclr_" not in body


def test_a_request_without_a_name_or_with_two_is_refused(served):
    for hosts in ("", "Host: localhost\r\nHost: evil.example\r\n"):
        with socket.create_connection(("127.0.0.1", served.port), timeout=10) as client:
            client.sendall(f"GET /metrics HTTP/1.1\r\n{hosts}\r\n".encode())
            assert b" 403 " in client.recv(4096)


def test_only_one_page_and_only_to_read(served):
    assert ask(served.port, "/")[0].status == 404
    assert ask(served.port, "/metrics/../etc")[0].status == 404
    assert ask(served.port, "/metrics?x=1")[0].status == 200
    head, body = ask(served.port, method="HEAD")
    assert (head.status, body) == (200, "")
    assert int(head.getheader("Content-Length")) > 0
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(served.port, method=method)[0].status == 405
    assert ask(served.port, method="BREW")[0].status == 501


def test_only_this_machine_is_served(served):
    assert served._server.server_address[0] == "127.0.0.1"


def test_a_port_that_is_taken_is_one_line_and_a_close_frees_it(served, held_port):
    with pytest.raises(UserError, match=rf"port {served.port} of 127.0.0.1 .*: give another port, or --metrics 0"):
        Metrics(served.port)
    with pytest.raises(UserError, match="metrics is 70000: use a port from 1 to 65535"):
        Metrics(70_000)
    first = Metrics(held_port)
    assert ask(first.port)[0].status == 200
    first.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", first.port), timeout=10)
    second = Metrics(first.port)
    assert ask(second.port)[0].status == 200
    second.close()


def test_clients_that_are_stuck_pile_nothing_up(served, monkeypatch):
    monkeypatch.setattr(metrics, "CLIENT_SECONDS", 1.0)
    before = threading.active_count()
    stuck = [socket.create_connection(("127.0.0.1", served.port), timeout=10) for _ in range(20)]
    stuck[0].sendall(b"GET /metr")

    def is_cut_off():
        assert threading.active_count() <= before + metrics.MAX_CLIENTS
        try:
            stuck[0].sendall(b"x")  # one byte now and then
        except OSError:
            return True
        time.sleep(0.1)
        return False

    until(is_cut_off)
    for client in stuck:
        client.close()
    until(lambda: threading.active_count() <= before)
    assert ask(served.port)[0].status == 200


def test_updates_while_pages_are_asked_for(served):
    stop = threading.Event()

    def learn():
        n = 0
        while not stop.is_set():
            n += 1
            served.update(steps_total=n, frames_passed_total={str(n % 500): n})

    thread = threading.Thread(target=learn)
    thread.start()
    last = 0
    for _ in range(50):
        samples = parse(ask(served.port)[1])
        assert samples.get(("streamclr_steps_total",), 0) >= last
        last = samples.get(("streamclr_steps_total",), 0)
    stop.set()
    thread.join()
    assert last > 0


def test_the_docs_list_the_same_names():
    listed = re.findall(
        r"^\| `(streamclr_[a-z_]+)(?:\{([a-z]+)[^}]*\})?` \| (counter|gauge) \|", DOCS.read_text(), re.M
    )
    assert listed == [(metric.name, metric.label, metric.kind) for metric in METRICS]
