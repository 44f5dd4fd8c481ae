"""The pages and their HTTP interface, described in docs/dashboard.md."""

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from importlib.resources import files
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from streamclr.base.errors import UserError
from streamclr.labelling.store import MAX_NAME_LENGTH, NONE_OF_THESE, Conflict, Missing
from streamclr.labelling.worker import Worker
from streamclr.runs.status import look
from streamclr.web.site import MAX_CLIENTS, Site
from streamclr.web.view import RunView, shown

KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
CACHE_FOR_A_DAY = {"cache-control": "private, max-age=86400, immutable"}  # the content at such a URL never changes

Run = Annotated[str, InPath(pattern="^[0-9a-f]{16}$", description="id of a run, from /api/runs")]
Key = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
Token = Annotated[str, Field(pattern="^[0-9A-Za-z-]{8,64}$", description="chosen by the client; repeats are ignored")]
Page = Annotated[str, Query(pattern="^[0-9A-Za-z]{0,16}$", description="a page: the requests of one begin with it")]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]


class Sent(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class AnswerSent(Sent):
    request: Token
    kind: Literal["label", "none", "skip", "unsure"]  # none: a label, the class "none of these"
    tasks: Annotated[list[Key], Field(min_length=1, max_length=64)]
    class_: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(None, alias="class")


class UndoSent(Sent):
    request: Token
    of: Token | None = None


class ClassSent(Sent):
    request: Token
    name: Name


class NameSent(Sent):
    name: Name


def make_app(site: Site) -> FastAPI:
    """The application without any checks; `Safe` wraps it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        following = asyncio.create_task(site.follow())
        yield
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
        await asyncio.to_thread(site.close)

    app = FastAPI(
        title="StreamCLR",
        version=version("streamclr"),
        openapi_url="/api/openapi.json",
        docs_url=None,  # these pages load scripts from other sites
        redoc_url=None,
        redirect_slashes=False,  # the redirect could contain the token
        lifespan=lifespan,
        responses={404: {"description": "no such run or picture"}},
    )
    static = {file.name: file.read_bytes() for file in (files("streamclr.web") / "static").iterdir()}

    def view(run: str) -> RunView:
        found = site.views.get(run)
        if found is None:
            raise HTTPException(404, "no such run")
        return found

    @app.get("/static/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in static:
            raise HTTPException(404, "no such file")
        return Response(static[name], media_type=KINDS[name.rpartition(".")[2]])

    @app.get("/", include_in_schema=False)
    async def dashboard() -> Response:
        return await file("dashboard.html")

    @app.get("/label/{run}", include_in_schema=False)
    async def label_page(run: str) -> Response:
        view(run)
        site.opened(run)
        return await file("label.html")

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        return Response(status_code=204)

    @app.get("/api/runs")
    async def runs() -> dict[str, Any]:
        """The runs that are shown."""
        await asyncio.to_thread(site.find_runs)
        return {"runs": site.about()}

    @app.get("/api/live", include_in_schema=False)  # it never ends
    async def live() -> StreamingResponse:
        if site.is_full:
            raise HTTPException(503, f"too many open dashboards: at most {MAX_CLIENTS}")
        return StreamingResponse(site.listen(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    @app.get("/api/runs/{run}/wall")
    async def wall(run: Run) -> dict[str, Any]:
        """The buffer as last written: pictures, scores, ages, map, and the images that left."""
        content = view(run).wall.content
        sheet = f"/api/runs/{run}/sheets/{content['version']}" if content["version"] else None
        return content | {"picture": sheet}

    @app.get("/api/runs/{run}/sheets/{version}", response_class=Response)
    async def sheet(run: Run, version: Key) -> Response:
        """All pictures of the buffer in one PNG."""
        picture = view(run).wall.sheets.get(version)
        if picture is None:
            raise HTTPException(404, "picture outdated; read /wall again")
        return Response(picture, media_type="image/png", headers=CACHE_FOR_A_DAY)

    @app.get("/api/runs/{run}/now")
    async def now(run: Run) -> Response:
        """What the cameras saw last, its class, what changed lately, the classifier in use and the labels."""
        one = view(run)
        look(one.path)
        content = await asyncio.to_thread(one.now)
        return Response(json.dumps(content), media_type="application/json")  # ASCII: a class may have any folder's name

    @app.get("/api/runs/{run}/frames/{version}", response_class=Response)
    async def frame(run: Run, version: Key) -> Response:
        """The newest frame of a source, as `now` names it."""
        picture = view(run).newest.pictures.get(version)
        if picture is None:
            raise HTTPException(404, "picture outdated; read /now again")
        return Response(picture, media_type="image/png", headers=CACHE_FOR_A_DAY)

    def worker(run: str) -> Worker:
        view(run)
        return site.worker(run)

    @app.get("/api/runs/{run}/labels")
    def labels(run: Run, page: Page = "") -> dict[str, Any]:
        """The next questions, the classes, the progress and the accuracy of the classifier.

        Several pages get different questions, and undo their own answers, if each gives a name of its own.
        """
        content = worker(run).session.state(page)
        content["message"] = shown(content["message"])
        for task in content["next"]:
            for picture in (task, *task["alike"]):
                picture["picture"] = f"/api/runs/{run}/pictures/{picture['id']}"
        return content

    @app.get("/api/runs/{run}/answers")
    def answers(run: Run) -> dict[str, Any]:
        """The answers that were given, those that the classifier doubts first."""
        found = worker(run).session.review()
        return {"answers": [one | {"picture": f"/api/runs/{run}/pictures/{one['id']}"} for one in found]}

    @app.get("/api/runs/{run}/pictures/{key}", response_class=Response)
    def picture(run: Run, key: Key) -> Response:
        """The picture of a question: what a person can recognise, or else the pixels that the encoder sees."""
        labels = worker(run).session.labels
        if found := labels.thumbnail(key):
            return Response(found, media_type="image/jpeg", headers=CACHE_FOR_A_DAY)
        if found := labels.picture(key):
            return Response(found, media_type="image/png", headers=CACHE_FOR_A_DAY)
        raise HTTPException(404, "no such picture")

    @app.post("/api/runs/{run}/labels")
    def answer(run: Run, sent: AnswerSent, page: Page = "") -> dict[str, Any]:
        """Answer for one or several pictures, or correct an answer. It is on disk when this returns."""
        one = worker(run)
        kind, class_ = sent.kind, sent.class_
        if kind == "none" and class_ is None:
            kind, class_ = "label", one.session.labels.class_named(NONE_OF_THESE)
        one.session.labels.answer(sent.request, kind, sent.tasks, class_)
        one.wake()
        return labels(run, page)

    @app.post("/api/runs/{run}/labels/undo")
    def undo(run: Run, sent: UndoSent, page: Page = "") -> dict[str, Any]:
        """Undo the answer of the request `of`, or the last answer, of this page if it has a name."""
        one = worker(run)
        one.session.labels.undo(sent.request, sent.of, page)
        one.wake()
        return labels(run, page)

    @app.post("/api/runs/{run}/classes")
    def add_class(run: Run, sent: ClassSent, page: Page = "") -> dict[str, Any]:
        worker(run).session.labels.add_class(sent.name, sent.request)
        return labels(run, page)

    @app.put("/api/runs/{run}/classes/{number}")
    def rename_class(
        run: Run, number: Annotated[int, InPath(ge=1, lt=2**31)], sent: NameSent, page: Page = ""
    ) -> dict[str, Any]:
        worker(run).session.labels.rename_class(number, sent.name)
        return labels(run, page)

    @app.exception_handler(UserError)
    async def refuse(_: Request, error: UserError) -> JSONResponse:
        status = 409 if isinstance(error, Conflict) else 404 if isinstance(error, Missing) else 422
        return JSONResponse({"detail": " ".join(shown(str(error)).split())}, status)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        """One line without the input, which may not be valid text."""
        first = error.errors()[0]
        detail = f"{'.'.join(str(part)[:100] for part in first['loc'])}: {first['msg']}"
        return JSONResponse({"detail": " ".join(detail.encode("ascii", "replace").decode().split())}, 422)

    @app.exception_handler(sqlite3.OperationalError)
    @app.exception_handler(sqlite3.ProgrammingError)  # the store was closed because the run was deleted
    async def no_disk(_: Request, error: sqlite3.Error) -> JSONResponse:
        return JSONResponse({"detail": f"not saved ({error})"}, 507)

    return app
