"""Flower's SuperNode as a process that runs only the app of a fleet."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def main() -> None:
    from streamclr.fleet.flower import need_flower

    need_flower()
    from flwr.supernode import start_client_internal as internal
    from flwr.supernode.cli.flower_supernode import flower_supernode

    from streamclr.fleet.flower.bundle import checked_bundle

    connect = internal.http_request_response

    @contextmanager
    def checked(*args: Any, **options: Any) -> Iterator[tuple[Any, ...]]:
        with connect(*args, **options) as (node, receive, send, get_run, get_fab, *rest):
            yield node, receive, send, get_run, lambda *which: checked_bundle(get_fab(*which)), *rest

    internal.http_request_response = checked
    flower_supernode()


if __name__ == "__main__":
    main()
