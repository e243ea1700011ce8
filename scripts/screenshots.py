"""Make the pictures of `burnish view` for the README and the guides, from a directory of runs.

    python -m scripts.screenshots RUNS [--run NAME] [--compare NAME ...] [--out docs/images] [--only list run ...] [--dark] [--width 1400]

`--run` is the run to show, as the page's list names it: by default the newest one with rollouts. `--compare` names the runs beside it, by
default all of its kind, at most three. Pictures are list, run, rollouts, prompt, conversation, compare, timeline, checkpoints, log and report. Each becomes
`view-NAME.webp`, and with `--dark` also `view-NAME-dark.webp`, below 150 kB. `--only` makes some of them.

It needs a command `chromium` and the extra `view`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode
from urllib.request import urlopen

from burnish.tracking.report import write_report
from scripts.chromium import Tab, chromium

ROOT = Path(__file__).parents[1]
READY = "!document.querySelector('[aria-busy]') && document.querySelector('#view > div')"
HEIGHTS = {"list": 520, "timeline": 760, "log": 700, "checkpoints": 520, "conversation": 1080}
"""Heights of pictures in pixels of the page, if not 900."""
MOST_BYTES = 150_000
SCALE = 1.5
"""Pixels of a picture for a pixel of the page, so that texts are sharp on fine screens."""


@contextmanager
def served(root: Path) -> Iterator[str]:
    """Start `burnish view`, and yield its address."""
    command = [sys.executable, "-m", "burnish", "view", str(root), "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.send_signal(signal.SIGINT)


def ask(address: str, path: str, **parameters: Any) -> Any:
    """Return an answer of the viewer."""
    with urlopen(f"{address}api/{path}?{urlencode(parameters, doseq=True)}") as reply:
        return json.load(reply)


def places(address: str, run: str | None, others: list[str]) -> Mapping[str, str]:
    """Return each picture's place in the page."""
    runs = ask(address, "runs")["runs"]
    kinds = {each["run"]: each["kind"] for each in runs}
    rollouts = {each: ask(address, "rollouts", run=each, limit=500)["rows"] for each in kinds if run in (None, each)}  # fmt: skip
    shown = run or next((each for each, rows in rollouts.items() if rows), runs[0]["run"])
    beside = others or [each for each in kinds if each != shown and kinds[each] == kinds[shown]][:3]
    prompts = Counter(row["prompt_index"] for row in rollouts[shown])
    at = f"#/run/{quote(shown, safe='')}"
    chosen = {
        "list": "#/runs",
        "run": f"{at}/charts",
        "timeline": f"{at}/timeline",
        "checkpoints": f"{at}/checkpoints",
        "log": f"{at}/log",
        "report": f"{at}/charts",
    }
    if beside:
        chosen["compare"] = f"{at}/charts?{urlencode({'with': beside}, doseq=True)}"
    if prompts:
        chosen["rollouts"] = f"{at}/rollouts?colour=logprobs"
        chosen["prompt"] = f"{at}/prompt/{prompts.most_common(1)[0][0]}"
    talks = [row for row in rollouts[shown] if row["turns"]]
    if talks:
        most = max(talks, key=lambda row: row["turns"])
        group = [row for row in talks if row["prompt_index"] == most["prompt_index"] and row["step"] == most["step"] and row != most]  # fmt: skip
        best = max(group, key=lambda row: row["reward"], default=most)
        chosen["conversation"] = f"{at}/rollout/{quote(most['id'], safe='')}?{urlencode({'beside': best['id']})}"  # fmt: skip
    return chosen


def picture(tab: Tab, url: str, ready: str = READY) -> bytes:
    """Return a picture of a page: as good as fits into `MOST_BYTES`."""
    tab.open("about:blank")
    tab.open(url)
    tab.wait(ready)
    # Charts draw when they come into view, and the list's curves come last.
    tab.run("new Promise((done) => setTimeout(done, 800))")
    for quality in range(90, 20, -10):
        data = tab.screenshot(quality)
        if len(data) < MOST_BYTES:
            break
    return data


def make_pictures(options: Namespace) -> None:
    """Write the pictures, and print each one's path and size."""
    options.out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as profile,
        served(options.runs) as address,
        chromium(Path(profile)) as pipe,
    ):
        chosen = places(address, options.run, options.compare)
        tab = Tab(pipe)
        for name, place in chosen.items():
            if options.only and name not in options.only:
                continue
            tab.resize(options.width, HEIGHTS.get(name, 900), scale=SCALE)
            url = address + place
            if name == "report":
                run = options.runs / unquote(place.split("/")[2])
                url = write_report(run.absolute()).as_uri()
            for dark in (False, True)[: 1 + options.dark]:
                tab.dark(dark)
                path = options.out / f"view-{name}{'-dark' * dark}.webp"
                path.write_bytes(picture(tab, url))
                print(f"{path}  {path.stat().st_size / 1e3:.0f} kB")


def main() -> None:
    """Read the command line, and make the pictures."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--run")
    parser.add_argument("--compare", nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=1400)
    make_pictures(parser.parse_args())


if __name__ == "__main__":
    main()
