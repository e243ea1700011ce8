"""`burnish view`: serve a page for looking at runs and rollouts."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys
import threading
import webbrowser
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path

from burnish.cli.output import print_text
from burnish.errors import MissingError, UsageError, install, neighbours
from burnish.files.urls import is_url


def view(given: Namespace) -> None:
    """Serve the runs below a directory until Ctrl-C."""
    try:
        import uvicorn

        from burnish.view.answers import Answers
        from burnish.view.server import make_app, make_token
    except ModuleNotFoundError as error:
        raise MissingError(
            "burnish view needs a server that is not installed",
            have=f"no module {error.name}",
            do=install("view"),
        ) from error
    with ExitStack() as stack:
        listener = stack.enter_context(_listen(given.host, given.port))
        host, port = listener.getsockname()[:2]
        is_local = ipaddress.ip_address(host).is_loopback
        token = None if is_local else make_token()
        if is_url(given.root):
            from burnish.view.remote_runs import RunCopies

            copies = stack.enter_context(RunCopies(given.root))
            answers = Answers(copies.root, given.root)
        else:
            root = Path(given.root)
            if not root.is_dir():
                raise MissingError(
                    f"there is no directory {root}",
                    have=neighbours(root),
                    do="give that of your runs",
                )
            answers = Answers(root)
        stack.callback(answers.close)
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
        shown = f"[{shown}]" if ":" in shown else shown
        url = f"http://{shown}:{port}/{f'?token={token}' if token else ''}"
        print_text(url)
        if (
            given.open
            and sys.stdout.isatty()
            and (
                os.environ.get("DISPLAY")
                or os.environ.get("WAYLAND_DISPLAY")
                or sys.platform == "darwin"
            )
        ):
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
        config = uvicorn.Config(
            make_app(answers, token),
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=1,
        )
        try:
            uvicorn.Server(config).run([listener])
        except KeyboardInterrupt:
            return


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises `UsageError`."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} is in use",
                have="another program, perhaps another burnish view",
                do="give --port another number, or 0 for one that is free",
            ) from error
        raise UsageError(
            f"{host}:{port} cannot be listened at",
            have=error,
            want="an address of this machine, and a port from 1024 to 65535",
            do="correct --host or --port",
        ) from error
