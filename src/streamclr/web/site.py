"""The runs that the pages show, and the live updates that connected browsers get."""

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from streamclr.base.errors import UserError
from streamclr.base.progress import say
from streamclr.labelling.session import LabelSession
from streamclr.labelling.store import Missing
from streamclr.labelling.worker import Worker
from streamclr.runs.status import look
from streamclr.web.view import RunView, columns, find_runs, shown, thinned

READ_EVERY = 1.0  # seconds between two reads of the runs, for all clients together
FIND_RUNS_EVERY = 2  # reads between two searches for new runs, and for deleted ones
MAX_CLIENTS = 64  # of /api/live at a time
READ_ERRORS = (UserError, OSError, ValueError, KeyError, TypeError, RuntimeError)  # one bad run must not hide others
KEEP_ALIVE_SECONDS = 15.0  # without a message, until a client gets an empty one
MAX_WAITING, MAX_WAITING_PER_RUN = 200, 10  # unread messages, after which a client is dropped


class Site:
    """paths: run directories, or directories of run directories, to which more may be added later."""

    def __init__(self, paths: list[Path]):
        self.paths = paths
        self.views: dict[str, RunView] = {}
        self._workers: dict[str, Worker] = {}
        self._lock = threading.Lock()  # for the start of a worker
        self._finding = threading.Lock()
        self._clients: set[asyncio.Queue[str | None]] = set()
        self._said: set[tuple[Path, str]] = set()  # read errors that were reported, by run and consequence
        self._anew: set[str] = set()  # runs of which no client has the history
        self._statuses: dict[str, str] = {}  # the last status sent for each run
        self._nows: dict[str, str] = {}  # the last of what is seen now that was sent for each run
        self._listed = ""  # the last list of runs sent
        for path in paths:
            if not path.is_dir():
                raise UserError(f"{path} is no run directory, and no directory of runs")
        self.find_runs()
        if not self.views and self._said:
            raise UserError(f"no readable run in {', '.join(map(str, paths))}")
        if not self.views:
            say(f"streamclr: no run in {', '.join(map(str, paths))} yet: it appears on the page when it starts")

    def find_runs(self) -> None:
        """Add the runs that have begun, and drop those whose directory was deleted."""
        with self._finding:
            for run, view in list(self.views.items()):
                if view.is_gone():
                    del self.views[run]
                    self._statuses.pop(run, None)
                    self._nows.pop(run, None)
                    self._close_worker(run)
                    view.standing.close()
            for path in find_runs(self.paths):
                self._find(path)

    def _find(self, path: Path) -> None:
        run = run_id(path)
        known = self.views.get(run)
        if known is not None and not known.is_another():
            return
        try:
            view = RunView(path)
            view.update()
            view.wall.update()
        except READ_ERRORS as error:  # or not written yet; tried again later
            self._say_once(path, "left out", error)
            return
        self.views[run] = view
        self._anew.add(run)
        self._close_worker(run)  # it was deleted and another run took its place

    def _close_worker(self, run: str) -> None:
        if worker := self._workers.pop(run, None):
            threading.Thread(target=worker.close, daemon=True).start()  # closing may take a while

    def about(self) -> list[dict[str, Any]]:
        """The runs, by name and state."""
        return [{"id": run, **view.about()} for run, view in list(self.views.items())]

    def worker(self, run: str) -> Worker:
        """The labelling worker of a run, started on first use."""
        with self._lock:
            if run not in self._workers:
                if run not in self.views:
                    raise Missing("no such run: it was deleted")
                self._workers[run] = Worker(LabelSession(self.views[run].directory))
            return self._workers[run]

    def opened(self, run: str) -> None:
        """Called when somebody opens the labelling page of a run."""
        if worker := self._workers.get(run):
            worker.look_anew()

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()

    async def follow(self) -> None:
        """Read all runs every second while there are clients, and send them what is new."""
        n_reads = 0
        while True:
            if (self._clients or self._workers) and n_reads % FIND_RUNS_EVERY == 0:
                await asyncio.to_thread(self.find_runs)
            n_reads += 1
            if self._clients:
                news = [message for run in list(self.views) for message in await asyncio.to_thread(self._news, run)]
                for message in (*self._list(), *news):  # a client has to know a run before it gets its steps
                    self._tell(message)
            await asyncio.sleep(READ_EVERY)

    def _list(self) -> list[str]:
        """The list of runs, if it has changed."""
        listed = _message("runs", {"runs": self.about()})
        if listed == self._listed:
            return []
        self._listed = listed
        return [listed]

    def _say_once(self, path: Path, consequence: str, error: Exception) -> None:
        if (path, consequence) not in self._said:
            self._said.add((path, consequence))
            say(f"streamclr: cannot read {shown(path.name)}, {consequence}: {shown(str(error))}")

    def _news(self, run: str) -> list[str]:
        view = self.views.get(run)
        if view is None:
            return []
        try:
            return self._changes(run, view)
        except READ_ERRORS as error:  # the disk is gone, for example: show the last state
            self._say_once(view.path, "its last state is shown", error)
            return []

    def _changes(self, run: str, view: RunView) -> list[str]:
        look(view.path)
        anew, points = view.update()
        messages = []
        if anew or run in self._anew:
            self._anew.discard(run)
            messages.append(self._history(run, view))
        elif points:
            messages.append(_message("steps", {"run": run, "reset": False, **columns(points)}))
        status = self._status(run, view)
        if status != self._statuses.get(run):
            self._statuses[run] = status
            messages.append(status)
        now = _message("now", {"run": run, **view.now()})
        if now != self._nows.get(run):
            self._nows[run] = now
            messages.append(now)
        if view.wall.update():
            messages.append(_message("wall", {"run": run, "version": view.wall.version}))
        return messages

    def _status(self, run: str, view: RunView) -> str:
        return _message("status", {"run": run, **view.status()})

    def _history(self, run: str, view: RunView) -> str:
        return _message("steps", {"run": run, "reset": True, **columns(thinned(view.journal.points))})

    def _tell(self, message: str) -> None:
        for client in list(self._clients):
            if client.qsize() >= MAX_WAITING + MAX_WAITING_PER_RUN * len(self.views):
                self._clients.discard(client)
                client.put_nowait(None)
            else:
                client.put_nowait(message)

    @property
    def is_full(self) -> bool:
        return len(self._clients) >= MAX_CLIENTS

    def let_go(self) -> None:
        """End the connections of all clients."""
        for client in self._clients:
            client.put_nowait(None)

    async def listen(self) -> AsyncIterator[str]:
        """The messages for one client, beginning with the list and the history of all runs."""
        client: asyncio.Queue[str | None] = asyncio.Queue()
        client.put_nowait(_message("runs", {"runs": self.about(), "time": time.time()}))
        for run, view in list(self.views.items()):
            client.put_nowait(self._history(run, view))
            client.put_nowait(self._status(run, view))
            client.put_nowait(_message("now", {"run": run, **await asyncio.to_thread(view.now)}))
        self._clients.add(client)
        try:
            while True:
                try:
                    message = await asyncio.wait_for(client.get(), KEEP_ALIVE_SECONDS)
                except asyncio.TimeoutError:
                    message = ":\n\n"  # an SSE comment: a write is the only way to notice that the client is gone
                if message is None:
                    return
                yield message
        finally:
            self._clients.discard(client)


def run_id(path: Path) -> str:
    """An id that is the same for the same directory after a restart."""
    return hashlib.blake2b(str(path.resolve()).encode(errors="surrogateescape"), digest_size=8).hexdigest()


def _message(event: str, content: dict[str, Any]) -> str:
    return f"event: {event}\ndata: {json.dumps(content, separators=(',', ':'))}\n\n"
