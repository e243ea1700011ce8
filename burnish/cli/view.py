"""`burnish view`: serve a page for looking at runs and rollouts."""

from __future__ import annotations

import errno
import ipaddress
import os
import secrets
import socket
import sys
import threading
import webbrowser
from argparse import Namespace
from contextlib import ExitStack, suppress
from pathlib import Path

from burnish.cli.output import print_text
from burnish.errors import MissingError, UsageError, install, neighbours
from burnish.files.urls import is_url


def view(given: Namespace) -> None:
    """Serve the runs below a directory until Ctrl-C."""
    try:
        import uvicorn

        from burnish.view.answers import Answers
        from burnish.view.server import make_app
    except ModuleNotFoundError as error:
        problem = f"burnish view needs {error.name}, which is not installed"
        raise MissingError(problem, do=install("view")) from error
    with ExitStack() as stack, suppress(KeyboardInterrupt):
        listener = stack.enter_context(_listening(given.host, given.port))
        host, port = listener.getsockname()[:2]
        token = None if ipaddress.ip_address(host).is_loopback else secrets.token_urlsafe(24)
        root, url = Path(given.root), None
        if is_url(given.root):
            from burnish.view.remote_runs import RunCopies

            url = given.root
            root = stack.enter_context(RunCopies(url)).root
        elif not root.is_dir():
            do = "give the directory of your runs"
            raise MissingError(f"there is no directory {root}", have=neighbours(root), do=do)
        answers = Answers(root, url)
        stack.callback(answers.close)
        name = socket.gethostname() if host in ("0.0.0.0", "::") else host
        name = f"[{name}]" if ":" in name else name
        address = f"http://{name}:{port}/{f'?token={token}' if token else ''}"
        print_text(address)
        screens = ("DISPLAY", "WAYLAND_DISPLAY")
        has_screen = sys.platform == "darwin" or any(os.environ.get(each) for each in screens)
        if given.open and has_screen and sys.stdout.isatty():
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        config = uvicorn.Config(
            make_app(answers, token),
            log_level="critical",
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=0,
        )
        uvicorn.Server(config).run([listener])


def _listening(host: str, port: int) -> socket.socket:
    try:
        if not 0 <= port < 1 << 16:
            raise OSError(errno.EINVAL, f"there is no port {port}")
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        raise UsageError(
            f"port {port} is in use" if is_taken else f"{host}:{port} cannot be listened at",
            have="another program, perhaps another burnish view" if is_taken else error,
            want="an address of this machine, and a free port from 1024 to 65535",
            do="give --port another number, or 0 for any that is free",
        ) from error
