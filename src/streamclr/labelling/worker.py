"""The thread behind a labelling page: it prepares the questions and trains after every answer."""

import math
import sqlite3
import threading
import time

from streamclr.base.errors import UserError
from streamclr.labelling.session import LabelSession
from streamclr.records.directory import FINISHED

SESSION_SECONDS = 600.0  # after an answer no questions are replaced for so long, unless the run has ended
LOOK_EVERY_SECONDS = 10.0  # for a new state of a run that is not finished
FAILURES = (UserError, OSError, sqlite3.Error)  # after which the worker goes on


class Worker:
    """Prepares the questions and trains the head again after every answer, in a thread of its own."""

    def __init__(self, session: LabelSession):
        self.session = session
        self._wake = threading.Event()
        self._ends = self._opened = self._held_back = False
        self._thread = threading.Thread(target=self._work, name="labelling", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._wake.set()

    def look_anew(self) -> None:
        """Somebody opens the page: use what the run has learned meanwhile."""
        self._opened = True
        self.wake()

    def close(self) -> None:
        self._ends = True
        self.wake()
        self._thread.join(30)
        self.session.close()

    def _work(self) -> None:
        looked = -math.inf
        while not self._ends:
            try:
                if self._opened or self.session.runs_out or time.monotonic() - looked > LOOK_EVERY_SECONDS:
                    looked = time.monotonic()
                    self._prepare_if_due()
                if self.session.is_behind():
                    self.session.train()
            except FAILURES as error:  # a full disk may have room the next time
                self.session.message = f"the classifier is not saved ({error})"
            self._wake.wait(LOOK_EVERY_SECONDS)
            self._wake.clear()

    def _prepare_if_due(self) -> None:
        """Prepare while there are no questions, with a new encoder when the run has ended or somebody opens the page,
        and from the frames that have come when all is answered. Questions that another process has chosen are taken
        over."""
        session, opened = self.session, self._opened
        if opened:  # else a page that is opened right now would be missed
            self._opened = False
        try:
            newest = session.directory.newest_encoder()
            is_new = newest not in (None, session.model_of) or self._held_back
            runs_out = session.runs_out
            if not session.questions or runs_out or (is_new and (opened or newest == FINISHED)):
                in_use = bool(session.questions) and newest != FINISHED and session.labels.quiet() < SESSION_SECONDS
                session.prepare(choose_anew=runs_out or not in_use)
                self._held_back = in_use and not runs_out
            elif session.questions != session.labels.questions():
                session.prepare(choose_anew=False)
        except FAILURES as error:
            session.message = str(error)
