"""What the pages are about: the runs that are shown, the clients that look, and what is sent to them as it happens."""

import asyncio
import hashlib
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from streamclr.base.errors import UserError
from streamclr.base.progress import say
from streamclr.labelling.session import Asking, Worker
from streamclr.runs.status import look
from streamclr.web.view import RunView, columns, find_runs, shown, thinned
from streamclr.web.wall import Wall

EVERY = 1.0  # seconds between two looks at the runs, for all clients together
LOOK_FOR_RUNS = 10  # looks after which new runs are looked for
MOST_CLIENTS = 64  # that follow at a time
BROKEN = (UserError, OSError, ValueError, KeyError, TypeError, RuntimeError)  # of one run, which hides no other
STILL_HERE = 15.0  # seconds after which a client that was told nothing is told that
BEHIND, MANY = 200, 10  # messages, and as many for each run, after which a client that does not read is left


class Site:
    """paths: run directories, or directories that hold some, now or later."""

    def __init__(self, paths: list[Path]):
        self.paths = paths
        self.views: dict[str, RunView] = {}
        self.walls: dict[str, Wall] = {}
        self._workers: dict[str, Worker] = {}
        self._clients: set[asyncio.Queue[str | None]] = set()
        self._broken: set[Path] = set()
        self._failed: set[str] = set()  # runs that could not be read once
        self._anew: set[str] = set()  # whose directory has another run in it than clients know
        self._statuses: dict[str, str] = {}  # the last that was told of each run
        for path in paths:
            if not find_runs([path]):
                raise UserError(f"{path} is no run directory, and there is none in it")
        self._find_runs()
        if not self.views:
            raise UserError(f"no run that can be shown in {', '.join(map(str, paths))}")

    def _find_runs(self) -> None:
        for path in find_runs(self.paths):
            number = run_id(path)
            known = self.views.get(number)
            if known is None or known.is_another():
                try:
                    view = RunView(path)
                    wall = Wall(view.path, view.about()["policy"])
                    view.update()
                    wall.update()
                except BROKEN as error:  # or not written yet: it is tried again
                    if path not in self._broken:
                        self._broken.add(path)
                        say(f"streamclr: left out: {shown(path.name)}: {shown(str(error))}")
                    continue
                self.views[number], self.walls[number] = view, wall
                if known is not None:  # it was deleted, and another run is in its place
                    self._anew.add(number)
                    if worker := self._workers.pop(number, None):
                        threading.Thread(target=worker.close, daemon=True).start()  # it may be busy for a while

    def worker(self, run: str) -> Worker:
        """The one who asks about a run; it begins when it is first looked for. Only called one at a time."""
        if run not in self._workers:
            self._workers[run] = Worker(Asking(self.views[run].directory))
        return self._workers[run]

    def opened(self, run: str) -> None:
        """Somebody opens the page on which it is asked about."""
        if worker := self._workers.get(run):
            worker.look_anew()

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()

    # ------------------------------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Look at all runs every second, while there is somebody to tell, and tell what is new."""
        n_looks = 0
        while True:
            if (self._clients or self._workers) and n_looks % LOOK_FOR_RUNS == 0:
                await asyncio.to_thread(self._find_runs)
            n_looks += 1
            if self._clients:
                for run in list(self.views):
                    for message in await asyncio.to_thread(self._news, run):
                        self._tell(message)
            await asyncio.sleep(EVERY)

    def _news(self, run: str) -> list[str]:
        view, wall = self.views[run], self.walls[run]
        try:
            return self._changes(run, view, wall)
        except BROKEN as error:  # its disk is gone, say: it stays as it was
            if run not in self._failed:
                self._failed.add(run)
                say(f"streamclr: {shown(view.name)} is shown as it was: {shown(str(error))}")
            return []

    def _changes(self, run: str, view: RunView, wall: Wall) -> list[str]:
        look(view.path)
        anew, points = view.update()
        messages = []
        if anew or run in self._anew:
            self._anew.discard(run)
            messages.append(self._history(run))
        elif points:
            messages.append(_message("steps", {"run": run, "reset": False, **columns(points)}))
        status = _message("status", {"run": run, **view.status()})
        if status != self._statuses.get(run):
            self._statuses[run] = status
            messages.append(status)
        if wall.update():
            messages.append(_message("wall", {"run": run, "version": wall.version}))
        return messages

    def _history(self, run: str) -> str:
        return _message("steps", {"run": run, "reset": True, **columns(thinned(self.views[run].journal.points))})

    def _tell(self, message: str) -> None:
        for client in list(self._clients):
            if client.qsize() >= BEHIND + MANY * len(self.views):
                self._clients.discard(client)
                client.put_nowait(None)
            else:
                client.put_nowait(message)

    @property
    def is_full(self) -> bool:
        return len(self._clients) >= MOST_CLIENTS

    def let_go(self) -> None:
        """Tell all clients that it is over."""
        for client in self._clients:
            client.put_nowait(None)

    async def listen(self) -> AsyncIterator[str]:
        """All that a client is told, from now on."""
        client: asyncio.Queue[str | None] = asyncio.Queue()
        begin = []
        for run, view in list(self.views.items()):
            begin += [self._history(run), _message("status", {"run": run, **view.status()})]
        self._clients.add(client)
        try:
            for first in begin:
                yield first
            while True:
                try:
                    message = await asyncio.wait_for(client.get(), STILL_HERE)
                except asyncio.TimeoutError:
                    message = ":\n\n"  # a comment: whether the client is still there shows only when it is written to
                if message is None:
                    return
                yield message
        finally:
            self._clients.discard(client)


def run_id(path: Path) -> str:
    """The same for the same directory after a restart."""
    return hashlib.blake2b(str(path.resolve()).encode(errors="surrogateescape"), digest_size=8).hexdigest()


def _message(event: str, content: dict[str, Any]) -> str:
    return f"event: {event}\ndata: {json.dumps(content, separators=(',', ':'))}\n\n"
