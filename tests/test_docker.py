"""The Dockerfile and the compose file, as far as they can be checked without Docker."""

import dataclasses
import json
import re
import shlex
from contextlib import closing
from pathlib import Path

import pytest

from streamclr.cli.parser import parse
from streamclr.records.options import RunOptions
from streamclr.runs.metrics import Metrics

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
INSTRUCTIONS = re.findall(
    r"^([A-Z]+) (.+)$", (ROOT / "Dockerfile").read_text().replace("\\\n", " "), re.MULTILINE
)  # in order
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
OURS = {name: service for name, service in COMPOSE["services"].items() if service["image"] == "streamclr"}


def of(instruction):
    return [rest for name, rest in INSTRUCTIONS if name == instruction]


@pytest.mark.parametrize("name", OURS)
def test_each_service_runs_a_command_that_there_is(name):
    words = [re.sub(r"\$\{CAMERA:\?[^}]*\}", "rtsp://camera/1", str(word)) for word in OURS[name]["command"]]
    if any(word.startswith("--to=") for word in words) and "to" not in {f.name for f in dataclasses.fields(RunOptions)}:
        pytest.skip("run has no --to yet")
    _, config = parse(words)
    if name == "learner":
        assert (config.source, config.metrics, config.out) == ("rtsp://camera/1", 9108, "/data/runs/camera")
    else:
        assert OURS[name]["ports"] == [f"127.0.0.1:{config.port}:{config.port}"]  # its pages check the Host header
        assert (config.host, list(config.runs)) == ("0.0.0.0", ["/data/runs"])


def test_a_service_is_an_ordinary_user_who_can_write_its_data_alone():
    assert of("USER") == ["10001:10001"]
    assert of("VOLUME") == ["/data"]
    for service in OURS.values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["volumes"] == ["data:/data"]
    assert "ports" not in COMPOSE["services"]["broker"]  # which takes anybody


def test_the_builder_gets_all_that_is_copied_and_nothing_else():
    copied = [word for line in of("COPY") if not line.startswith("--from") for word in shlex.split(line)[:-1]]
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sorted(copied) == sorted(allowed)
    assert all((ROOT / name).exists() for name in copied)
    (mounted,) = (place.split(":")[0] for place in COMPOSE["services"]["broker"]["volumes"] if place.startswith("."))
    assert (ROOT / mounted).is_file()


def test_a_run_is_healthy_while_it_serves_its_metrics():
    (check,) = of("HEALTHCHECK")
    python, flag, code = json.loads(check.partition("CMD ")[2])
    assert (python, flag) == ("python", "-c")
    with closing(Metrics(0)) as metrics:
        code = code.replace(":9108/", f":{metrics.port}/")
        exec(code, {})
    with pytest.raises(OSError, match="refused"):
        exec(code, {})
