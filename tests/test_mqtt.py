"""MQTT against a real broker that is killed and comes back."""

import datetime
import json
import signal
import socket
from contextlib import closing

import pytest

from streamclr.answers.discovery import ATTRIBUTES, topics
from support.answering import Feeding, Told
from support.waiting import until

pytest.importorskip("paho.mqtt")
from support.broker import Broker, Listener

pytestmark = pytest.mark.system


@pytest.fixture
def broker(tmp_path):
    with closing(Broker(tmp_path / "broker")) as broker:
        yield broker


def first_of_each(answers):
    """Each answer once, in the order in which they came first, and how often one came again."""
    numbers = [answer["id"] for answer in answers]
    once = list(dict.fromkeys(numbers))
    return once, len(numbers) - len(once)


@pytest.mark.parametrize("n_kills", [5, pytest.param(20, marks=pytest.mark.long)])
def test_a_broker_that_is_killed_again_and_again_gets_every_answer_in_order(broker, tmp_path, n_kills):
    """30 answers a second; every other kill is SIGKILL, after which the broker knows only what it last saved."""
    told = Told(tmp_path, f"mqtt://127.0.0.1:{broker.port}/home/door", every_frame=True)
    with closing(Listener(broker.port, "home/#")) as listener:
        broker.save()
        feeding = Feeding(told, a_second=30)
        for i in range(n_kills):
            n = told.answers.outbox.last + 10
            # What the broker has confirmed has left it, or a SIGKILL would take it along.
            until(lambda n=n: listener.is_connected and told.state()["connected"] and told.state()["sent"] > n)
            until(lambda: len(first_of_each(listener.answers())[0]) >= told.state()["sent"])
            broker.kill(signal.SIGTERM if i % 2 else signal.SIGKILL)
            until(lambda: not told.state()["connected"] and told.state()["waiting"] >= 10)
            broker.start()
        feeding.close()
        until(lambda: not told.state()["waiting"])
        until(lambda: len(first_of_each(listener.answers())[0]) == told.n)
        once, n_again = first_of_each(listener.answers())
        assert once == list(range(1, told.n + 1))
        assert told.state() == {"sent": told.n, "dropped": 0, "waiting": 0, "connected": True}
        assert listener.n_sessions == 1
        told.close()
    assert sum("its answers wait" in event for event in told.events) == n_kills
    assert sum("reached again" in event for event in told.events) == n_kills
    print(f"{n_kills} kills, {told.n} answers, all arrived in order; {n_again} of them again")


def test_what_does_not_fit_is_dropped_and_counted_the_oldest_first(broker, tmp_path):
    outbox = {"file_bytes": 1000, "n_files": 3}
    told = Told(tmp_path, f"mqtt://127.0.0.1:{broker.port}/home/door", every_frame=True, outbox=outbox)
    with closing(Listener(broker.port, "home/#")) as listener:
        told.frame(0.9)
        until(lambda: told.state()["sent"] == 1)
        broker.kill(signal.SIGTERM)
        until(lambda: not told.state()["connected"])
        for _ in range(200):
            told.frame(0.9)
        state = told.state()
        assert state["dropped"] > 150
        assert state["sent"] + state["dropped"] + state["waiting"] == 201
        broker.start()
        until(lambda: not told.state()["waiting"])
        state = told.state()
        until(lambda: len(first_of_each(listener.answers())[0]) == state["sent"])
        once, _ = first_of_each(listener.answers())
        told.close()
    assert once == sorted(once)
    assert once[-1] == 201
    assert state["dropped"] == 201 - len(once)
    assert any("answers dropped: more waited than are kept" in event for event in told.events)


def test_what_waits_when_the_run_ends_goes_out_when_it_goes_on(broker, tmp_path):
    to = f"mqtt://127.0.0.1:{broker.port}/home/door"
    told = Told(tmp_path, to, every_frame=True)
    with closing(Listener(broker.port, "home/#")) as listener:
        until(lambda: told.state()["connected"])
        broker.kill(signal.SIGTERM)
        for _ in range(30):
            told.frame(0.9)
        told.close()
        assert any("30 answers were not sent" in event for event in told.events)
        broker.start()
        again = Told(tmp_path, to, every_frame=True)
        until(lambda: again.state()["sent"] == 30)
        again.frame(0.9, image=30)
        until(lambda: first_of_each(listener.answers())[0] == list(range(1, 32)))
        again.close()
        assert again.state()["waiting"] == 0


def certificate(directory):
    """A certificate of its own for 127.0.0.1, which is its own authority."""
    from ipaddress import ip_address

    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.timezone.utc)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "broker")])
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), False)
    made = made.add_extension(x509.BasicConstraints(True, None), True)
    files = directory / "broker.crt", directory / "broker.key"
    files[0].write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    return files


def test_tls_and_a_password_that_nobody_sees(tmp_path, monkeypatch):
    crt, key = certificate(tmp_path)
    passwords = tmp_path / "passwords"
    passwords.write_text(f"me:{hashed('se/cr@t')}\n")
    passwords.chmod(0o600)
    more = f"certfile {crt}\nkeyfile {key}\npassword_file {passwords}"
    monkeypatch.setenv("BROKER_PASSWORD", "se/cr@t")
    with closing(Broker(tmp_path / "broker", more, anonymous=False)) as broker:
        where = f"127.0.0.1:{broker.port}/home/door"
        for to in (
            f"mqtts://me@{where}#password_env=BROKER_PASSWORD&ca={crt}",
            f"mqtts://me:se%2Fcr%40t@{where}#ca={crt}",
        ):
            told = Told(tmp_path, to, every_frame=True)
            n = told.state()["sent"] + 1
            told.frame(0.9)
            until(lambda told=told, n=n: told.state()["sent"] == n)
            told.close()
        with closing(Listener(broker.port, "home/#", user="me", password="se/cr@t", ca=crt)) as listener:
            until(lambda: [answer["id"] for answer in listener.answers()] == [2])  # the broker keeps the last
        for to, why in (
            (f"mqtts://me:wrong@{where}#ca={crt}", "refused: Not authorized"),
            (f"mqtts://me:se%2Fcr%40t@{where}", "self-signed certificate"),
        ):
            told = Told(tmp_path, to, every_frame=True)
            until(lambda told=told: told.events)
            told.close()
            assert why in told.events[0]
    content = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert b"cr@t" not in content
    assert b"%40t" not in content
    assert f"mqtts://{where}".encode() in content


def hashed(password):
    """As mosquitto_passwd writes it: PBKDF2 of SHA-512."""
    import base64
    import hashlib

    salt, n = b"twelve bytes", 101
    digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, n)
    return f"$7${n}${base64.b64encode(salt).decode()}${base64.b64encode(digest).decode()}"


def test_home_assistant_finds_each_camera_and_knows_whether_it_is_there(broker, tmp_path):
    names = ["rtsp://me:***@camera/1", "clip.mp4"]
    told = Told(tmp_path, f"mqtt://127.0.0.1:{broker.port}/home", names=names, snapshot=True)
    with closing(Listener(broker.port, "#")) as listener:
        presence = lambda: [payload for topic, payload, _ in listener.messages if topic == "home/availability"]  # noqa: E731
        until(lambda: presence() == [b"online"])
        for source in names:
            told.frame(0.9, source)
        until(lambda: len(listener.answers()) == 2)
        link = told.answers._deliveries[0].destination._client.socket()
        link.shutdown(socket.SHUT_RDWR)  # as when the network is lost: the broker speaks for it
        until(lambda: presence() == [b"online", b"offline", b"online"])
        told.close()
        until(lambda: presence()[-1] == b"offline")
        found = {topic: json.loads(payload) for topic, payload, _ in listener.messages if topic.endswith("/config")}
        answers = {topic: json.loads(payload) for topic, payload, _ in listener.messages if b'"id"' in payload}
    assert len(found) == len(answers) == 2
    by_name = {about["name"]: about for about in found.values()}
    for name in names:
        about = by_name[name]
        assert about["availability_topic"] == "home/availability"
        answer = answers[about["state_topic"]]
        assert (answer["source"], answer["class"]) == (name, "cat")
        assert len(answer["snapshot"]) > 100
        jinja2 = pytest.importorskip("jinja2")  # in which Home Assistant writes its templates
        environment = jinja2.Environment()
        environment.filters["tojson"] = json.dumps
        assert environment.from_string(about["value_template"]).render(value_json=answer) == "cat"
        shown = json.loads(environment.from_string(ATTRIBUTES).render(value_json=answer))
        assert shown == {key: value for key, value in answer.items() if key != "snapshot"}
    assert len({about["unique_id"] for about in found.values()}) == 2


def test_one_camera_has_the_topic_itself_and_several_one_each_below_it():
    assert topics("home", [("clip.mp4", "")]) == {("clip.mp4", ""): "home"}
    places = [("rtsp://me:***@a/1", ""), ("a.mp4", "left"), ("a.mp4", "right"), ("a/mp4", "")]
    assert list(topics("home", places).values()) == [
        "home/me-a-1",
        "home/a-mp4/left",
        "home/a-mp4/right",
        "home/a-mp4-2",
    ]
    assert topics("home", [("0", ""), ("0", "gate")]) == {("0", ""): "home", ("0", "gate"): "home/gate"}
