"""Serve the page and its data over HTTP: GET and HEAD only."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from burnish.errors import BurnishError, MissingError
from burnish.view.answers import Answer, Answers, Query

PAGE = Path(__file__).parent / "page"
# Methods of `Answers` that have a path below /api/.
_OF_RUNS = (
    "runs",
    "metrics",
    "attention",
    "timeline",
    "checkpoints",
    "log",
    "config",
    "environment",
)
_OF_ROLLOUTS = ("rollouts", "rollout", "facets", "prompt")
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


def make_app(answers: Answers, token: str | None = None) -> Starlette:
    """Return the application. With a token it answers clients that send it, else clients that address this machine as local."""

    def answer(request: Request) -> Response:
        try:
            # Keeps empty values, because a run's id may be empty.
            query = Query.of(parse_qs(request.url.query, keep_blank_values=True))
            return _json(getattr(answers, request.url.path.removeprefix("/api/"))(query))
        except BurnishError as error:
            return _error(404 if isinstance(error, MissingError) else 400, error)
        except OSError as error:
            problem = f"{error.filename} cannot be read"
            do = "check that it exists and can be read"
            return _error(404, BurnishError(problem, have=error.strerror, do=do))
        except Exception as error:  # noqa: BLE001 - one answer fails, and the server goes on
            _log.error("%s cannot be answered", request.url.path, exc_info=error)
            problem = f"this cannot be answered: {type(error).__name__}"
            return _error(500, BurnishError(problem, do="see what burnish view printed"))

    def live(request: Request) -> Response:
        return StreamingResponse(_events(answers), 200, _FRESH, "text/event-stream")

    def page(request: Request) -> Response:
        path = PAGE / request.path_params.get("name", "index.html")
        if path.parent != PAGE or not path.is_file():
            raise HTTPException(404, f"the page has no {path.name}")
        return FileResponse(path, 200, _FRESH)

    def failed(request: Request, error: HTTPException) -> Response:
        return _error(error.status_code, BurnishError(error.detail))

    async def guarded(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        response = _refusal(request, token) or await call_next(request)
        response.headers.update(_HEADERS)
        return response

    return Starlette(
        routes=[
            Route("/", page),
            Route("/static/{name}", page),
            Route("/api/live", live),
            *(Route(f"/api/{name}", answer) for name in _OF_RUNS + _OF_ROLLOUTS),
        ],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=guarded)],
        exception_handlers={HTTPException: failed},
    )


def _error(status: int, error: BurnishError) -> Response:
    return _json({"error": error.parts()}, status)


def _json(answer: Answer, status: int = 200) -> Response:
    try:
        text = json.dumps(answer, ensure_ascii=False, allow_nan=False, default=str)
    except ValueError:  # another program's file may have a bare NaN
        named = json.loads(json.dumps(answer, default=str), parse_constant=str)
        text = json.dumps(named, ensure_ascii=False)
    # A lone surrogate, which UTF-8 cannot encode, becomes its escape.
    body = text.encode("utf-8", "backslashreplace")
    return Response(body, status, _FRESH, "application/json")


async def _events(answers: Answers) -> AsyncIterator[str]:
    known = await run_in_threadpool(answers.sizes)
    yield ":\n\n"
    while True:
        await asyncio.sleep(_LIVE_SECONDS)
        now = await run_in_threadpool(answers.sizes)
        for run in [run for run, size in now.items() if known.get(run) != size]:
            yield f"data: {json.dumps({'run': run})}\n\n"
        known = now


def _refusal(request: Request, token: str | None) -> Response | None:
    if token is None:
        # Another site's name may resolve to this machine. The browser still sends that name, so it is refused.
        is_own = _OWN_NAME.fullmatch(request.headers.get("host", ""))
        do = "call it localhost, or start burnish view with --host"
        return None if is_own else _error(403, BurnishError("only local addresses work", do=do))
    cookie = f"burnish-view-{request.url.port or 80}"  # all ports share cookies
    asked = request.query_params.get("token", "")
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
    saved = request.cookies.get(cookie, "")
    knows = [hmac.compare_digest(key.encode(), token.encode()) for key in (asked, bearer, saved)]
    if knows[0]:
        response = RedirectResponse(request.url.path, 303)
        response.set_cookie(cookie, token, httponly=True, samesite="strict")
        return response
    do = "open the address that burnish view printed"
    return None if any(knows) else _error(401, BurnishError("the token is missing or wrong", do=do))
