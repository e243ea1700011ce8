"""Serve the page and what it asks for, over HTTP: GET and HEAD only."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
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
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}

_log = logging.getLogger("burnish")


def make_token() -> str:
    """Return a token that nobody can guess."""
    return secrets.token_urlsafe(24)


def make_app(answers: Answers, token: str | None = None) -> Starlette:
    """Return the application. With a token it answers those who know it, else those who ask this machine by its own name."""
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

    def live(request: Request) -> Response:
        headers = {"Cache-Control": "no-store"}
        return StreamingResponse(_events(answers), media_type="text/event-stream", headers=headers)

    def page(request: Request) -> Response:
        path = PAGE / request.path_params.get("name", "index.html")
        if path.parent != PAGE or not path.is_file():
            raise HTTPException(404, f"the page has no {path.name}")
        return FileResponse(path, headers={"Cache-Control": "no-cache"})

    return Starlette(
        routes=[
            Route("/", page, methods=["GET"]),
            Route("/api/live", live, methods=["GET"]),
            *(
                Route(f"/api/{path}", _endpoint(call), methods=["GET"])
                for path, call in asked.items()
            ),
            Route("/static/{name}", page, methods=["GET"]),
        ],
        middleware=[Middleware(_Guard, token=token)],
        exception_handlers={HTTPException: _refused},
    )


def _endpoint(call: Callable[[Query], Answer]) -> Callable[[Request], Response]:
    def endpoint(request: Request) -> Response:
        # Keeps empty values, of which a run's id may be one.
        query = Query(parse_qs(request.url.query, keep_blank_values=True, max_num_fields=200))
        try:
            return _json(call(query))
        except BurnishError as error:
            return _json({"error": error.parts()}, 404 if isinstance(error, MissingError) else 400)
        except Exception as error:  # noqa: BLE001 - one answer fails, and the server goes on
            _log.exception("%s could not be answered", request.url.path)
            kind = type(error).__name__
            parts = BurnishError(
                f"this could not be answered: {kind}", do="see the log of burnish view"
            ).parts()
            return _json({"error": parts}, 500)

    return endpoint


def _refused(request: Request, error: HTTPException) -> Response:
    return _json({"error": BurnishError(error.detail).parts()}, error.status_code)


def _json(answer: Answer, status: int = 200) -> Response:
    try:
        text = json.dumps(answer, ensure_ascii=False, allow_nan=False)
    except ValueError:  # somebody else's file has a bare NaN
        text = json.dumps(_finite(answer), ensure_ascii=False, allow_nan=False)
    # Half of a character, which UTF-8 cannot have, becomes its escape.
    body = text.encode("utf-8", "backslashreplace")
    headers = {"Cache-Control": "no-store"}
    return Response(body, status, headers, media_type="application/json")


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
    known = await run_in_threadpool(answers.steps)
    yield ": connected\n\n"
    while True:
        await asyncio.sleep(_LIVE_SECONDS)
        now = await run_in_threadpool(answers.steps)
        for run in [run for run, state in now.items() if known.get(run) != state]:
            step = await run_in_threadpool(answers.last_step, run)
            yield f"data: {json.dumps({'run': run, 'step': step})}\n\n"
        known = now
        yield ":\n\n"  # tells a server that its client has gone


class _Guard:
    """Refuses who does not know the token, or without one, who comes by another name than this machine's own."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        app = self._refusal(Request(scope)) or self._app
        await app(scope, receive, send_guarded)

    def _refusal(self, request: Request) -> ASGIApp | None:
        """Return the answer to a request that goes no further."""
        if request.method not in ("GET", "HEAD"):
            return _error(405, "only GET and HEAD are answered")
        if self._token is None:
            # A page elsewhere may have its own name point here; then the name is not this machine's.
            if request.url.hostname in ("localhost", "127.0.0.1", "::1"):
                return None
            return _error(403, "this name is not this machine's own")
        if self._is_token(request.query_params.get("token")):
            response = RedirectResponse(request.url.remove_query_params("token").path or "/", 303)
            response.set_cookie(
                self._cookie(request), self._token, httponly=True, samesite="strict"
            )
            return response
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(given) or self._is_token(request.cookies.get(self._cookie(request))):
            return None
        return _error(
            401, "the token is missing or wrong: use the address that burnish view printed"
        )

    def _is_token(self, given: str | None) -> bool:
        return hmac.compare_digest((given or "").encode(), (self._token or "").encode())

    def _cookie(self, request: Request) -> str:
        return f"burnish-view-{request.url.port or 80}"  # all ports of a machine share cookies


def _error(status: int, problem: str) -> Response:
    return _json({"error": BurnishError(problem).parts()}, status)
