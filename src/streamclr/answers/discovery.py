"""MQTT topics, and the messages by which Home Assistant finds the sensors behind them."""

import json
import re
from collections import Counter
from collections.abc import Sequence

from streamclr.answers.choice import Place

# All of an answer but its picture: Home Assistant keeps the attributes of each state.
ATTRIBUTES = "{{ dict(value_json.items() | rejectattr('0', 'eq', 'snapshot')) | tojson }}"


def slug(text: str) -> str:
    """Letters, digits, - and _ alone, as names in topics have to be."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text.partition("://")[2] or text).strip("-") or "camera"


def topics(topic: str, places: Sequence[Place]) -> dict[Place, str]:
    """The topic itself for a single camera; else one below it for each, and below that one for each region."""
    sources = list(dict.fromkeys(source for source, _ in places))
    names: dict[str, str] = {}
    used: Counter[str] = Counter()
    for source in sources:
        used[slug(source)] += 1
        n = used[slug(source)]
        names[source] = slug(source) + (f"-{n}" if n > 1 else "")
    found = {}
    for source, region in places:
        below = ([names[source]] if len(sources) > 1 else []) + ([slug(region)] if region else [])
        found[source, region] = "/".join([topic, *below])
    return found


def discovery(prefix: str, device: str, title: str, name: str, topic: str, presence: str) -> tuple[str, bytes]:
    """Topic and content of the message about one camera or region, whose answers are at `topic`."""
    own = f"streamclr_{device}_{slug(topic)}"
    about = {
        "name": name,
        "unique_id": own,
        "state_topic": topic,
        "value_template": "{{ value_json['class'] }}",
        "json_attributes_topic": topic,
        "json_attributes_template": ATTRIBUTES,
        "availability_topic": presence,
        "icon": "mdi:cctv",
        "device": {"identifiers": [f"streamclr_{device}"], "name": title, "manufacturer": "StreamCLR"},
        "origin": {"name": "StreamCLR"},
    }
    return f"{prefix}/sensor/streamclr_{device}/{own}/config", json.dumps(about).encode()
