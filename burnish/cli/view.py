"""`burnish view`: serve a page that shows runs and rollouts."""

from __future__ import annotations

import ipaddress
import os
import secrets
import sys
import threading
import webbrowser
from argparse import Namespace
from contextlib import ExitStack, suppress
from pathlib import Path

from burnish.cli.output import print_text
from burnish.distributed.listening import listen, url_of
from burnish.errors import MissingError, install, neighbours
from burnish.files.urls import is_url


def view(args: Namespace) -> None:
    """Serve the runs below a directory until Ctrl-C."""
    try:
        import uvicorn

        from burnish.view.answers import Answers
        from burnish.view.server import make_app
    except ModuleNotFoundError as error:
        problem = f"burnish view needs {error.name}, which is not installed"
        raise MissingError(problem, do=install("view")) from error
    with ExitStack() as stack, suppress(KeyboardInterrupt):
        listener = stack.enter_context(listen(args.host, args.port))
        is_private = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
        token = None if is_private else secrets.token_urlsafe(24)
        root = Path(args.root)
        url = None
        if is_url(args.root):
            from burnish.view.remote_runs import RunCopies

            url = args.root
            root = stack.enter_context(RunCopies(url)).root
        elif not root.is_dir():
            do = "give the directory of your runs"
            raise MissingError(f"there is no directory {root}", have=neighbours(root), do=do)
        answers = Answers(root, url)
        stack.callback(answers.close)
        address = f"{url_of(listener)}/{f'?token={token}' if token else ''}"
        print_text(address)
        screens = ("DISPLAY", "WAYLAND_DISPLAY")
        has_screen = sys.platform == "darwin" or any(os.environ.get(each) for each in screens)
        if args.open and has_screen and sys.stdout.isatty():
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
