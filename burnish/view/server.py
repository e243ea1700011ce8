"""Serve the page and what it asks for, over HTTP: GET and HEAD only."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from burnish.errors import BurnishError, MissingError
from burnish.tracking.trackers import json_number
from burnish.view.answers import Answer, Answers, Query

PAGE = Path(__file__).parent / "page"
"""The page's files."""
_LIVE_SECONDS = 1.0
_OWN_NAME = re.compile(r"(?:localhost|127\.0\.0\.1|\[::1\])(?::\d+)?")
_FRESH = {"Cache-Control": "no-cache"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}

_log = logging.getLogger("burnish")


def make_app(answers: Answers, token: str | None = None) -> ASGIApp:
    """Return the application. With a token it answers those who know it, else those who call this machine by its own name."""
    asked: dict[str, Callable[[Query], Answer]] = {
        "runs": answers.runs,
        "metrics": answers.metrics,
        "rollouts": answers.rollouts,
        "rollouts/facets": answers.facets,
        "rollout": answers.rollout,
        "timeline": answers.timeline,
        "checkpoints": answers.checkpoints,
        "log": answers.log,
        "config": answers.config,
        "environment": answers.environment,
    }

    def answer(request: Request) -> Response:
        # Keeps empty values: a run's id may be one.
        query = Query.of(parse_qs(request.url.query, keep_blank_values=True))
        return _json(asked[request.url.path.removeprefix("/api/")](query))

    def live(request: Request) -> Response:
        return StreamingResponse(_events(answers), 200, _FRESH, "text/event-stream")

    def page(request: Request) -> Response:
        path = PAGE / request.path_params.get("name", "index.html")
        if path.parent != PAGE or not path.is_file():
            raise HTTPException(404, f"the page has no {path.name}")
        return FileResponse(path, 200, _FRESH)

    app = Starlette(
        routes=[
            Route("/", page),
            Route("/static/{name}", page),
            Route("/api/live", live),
            *(Route(f"/api/{path}", answer) for path in asked),
        ],
        exception_handlers=dict.fromkeys(
            (HTTPException, BurnishError, OSError, Exception), _failed
        ),
    )
    return _guarded(app, token)


def _failed(request: Request, error: Exception) -> Response:
    """Return what is told of an error; it is one answer that fails, and the server goes on."""
    if isinstance(error, HTTPException):
        return _error(error.status_code, BurnishError(error.detail))
    if isinstance(error, BurnishError):
        return _error(404 if isinstance(error, MissingError) else 400, error)
    if isinstance(error, OSError):
        return _error(404, BurnishError(f"{error.filename} cannot be read", have=error.strerror))
    _log.error("%s cannot be answered", request.url.path, exc_info=error)
    name = type(error).__name__
    do = "see what burnish view printed"
    return _error(500, BurnishError(f"this cannot be answered: {name}", do=do))


def _error(status: int, error: BurnishError) -> Response:
    return _json({"error": error.parts()}, status)


def _json(answer: Answer, status: int = 200) -> Response:
    try:
        text = json.dumps(answer, ensure_ascii=False, allow_nan=False, default=str)
    except ValueError:  # somebody else's file has a bare NaN
        text = json.dumps(_finite(answer), ensure_ascii=False, allow_nan=False, default=str)
    # Half of a character, which UTF-8 cannot have, becomes its escape.
    body = text.encode("utf-8", "backslashreplace")
    return Response(body, status, _FRESH, "application/json")


def _finite(value: Any) -> Any:
    match value:
        case float():
            return json_number(value)
        case dict():
            return {key: _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
    return value


async def _events(answers: Answers) -> AsyncIterator[str]:
    """Yield an event for each run whose metrics grow."""
    known = await run_in_threadpool(answers.sizes)
    yield ":\n\n"
    while True:
        await asyncio.sleep(_LIVE_SECONDS)
        now = await run_in_threadpool(answers.sizes)
        for run in [run for run, size in now.items() if known.get(run) != size]:
            yield f"data: {json.dumps({'run': run})}\n\n"
        known = now


def _guarded(app: ASGIApp, token: str | None) -> ASGIApp:
    """Return the application with headers that forbid a browser what the page does not need, for those who may ask."""

    async def asked(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        refusal = _refusal(Request(scope), token)
        await (refusal or app)(scope, receive, send_guarded)

    return asked


def _refusal(request: Request, token: str | None) -> Response | None:
    """Return what others get than those who know the token, or without one, call this machine by its own name."""
    if request.method not in ("GET", "HEAD"):
        return _error(405, BurnishError("only GET and HEAD are answered"))
    if token is None:
        # A page elsewhere may let its own name point here. It cannot choose the name that a browser sends.
        is_own = _OWN_NAME.fullmatch(request.headers.get("host", ""))
        do = "call it localhost, or start burnish view with --host"
        return None if is_own else _error(403, BurnishError("no name of this machine", do=do))
    cookie = f"burnish-view-{request.url.port or 80}"  # all ports share cookies
    asked = request.query_params.get("token", "")
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
    kept = request.cookies.get(cookie, "")
    knows = [hmac.compare_digest(each.encode(), token.encode()) for each in (asked, bearer, kept)]
    if knows[0]:
        found = RedirectResponse(request.url.path, 303)
        found.set_cookie(cookie, token, httponly=True, samesite="strict")
        return found
    do = "open the address that burnish view printed"
    return None if any(knows) else _error(401, BurnishError("the token is missing or wrong", do=do))
