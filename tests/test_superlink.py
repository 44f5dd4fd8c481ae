import asyncio

import pytest

from streamclr.fleet.flower.superlink import Gate, is_allowed, own_address


@pytest.mark.parametrize(
    ("path", "client", "server", "allowed"),
    [
        ("/v1/fleet/pull-messages", "203.0.113.9", "192.0.2.1", True),
        ("/v1/control/register-node", "203.0.113.9", "192.0.2.1", False),
        ("/v1/runtime/acquire-task", "203.0.113.9", "192.0.2.1", False),
        ("/docs", "203.0.113.9", "192.0.2.1", False),
        ("/v1/fleet/../control/register-node", "203.0.113.9", "192.0.2.1", False),
        ("/v1/control/register-node", "127.0.0.1", "127.0.0.1", True),
        ("/v1/control/register-node", "::1", "::1", True),
        ("/v1/control/register-node", "192.0.2.1", "192.0.2.1", True),  # from this machine, by its own address
        ("/v1/control/register-node", None, None, False),
        ("/v1/control/register-node", "not an address", "192.0.2.1", False),
    ],
)
def test_only_the_devices_part_is_open_to_other_machines(path, client, server, allowed):
    assert is_allowed(path, client, server) == allowed


def test_the_gate_answers_403_and_calls_nothing():
    sent, called = [], []

    async def app(scope, receive, send):
        called.append(scope["type"])

    async def send(message):
        sent.append(message)

    def ask(**scope):
        asyncio.run(Gate(app)({"client": ("203.0.113.9", 1), "server": ("192.0.2.1", 2)} | scope, None, send))

    ask(type="http", path="/v1/control/start-run")
    ask(type="websocket", path="/anything")
    assert (called, [message.get("status") for message in sent]) == ([], [403, None])
    ask(type="http", path="/v1/fleet/get-run")
    ask(type="lifespan")
    assert called == ["http", "lifespan"]


def test_own_address():
    assert own_address("0.0.0.0") == "127.0.0.1"
    assert own_address("192.0.2.1") == "192.0.2.1"
