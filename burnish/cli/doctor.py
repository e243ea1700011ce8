"""`burnish doctor`: report what a machine, or each machine of all ranks, has and lacks for training."""

from __future__ import annotations

import json
import socket
from argparse import Namespace
from contextlib import closing
from dataclasses import asdict

import torch

from burnish.check.machine import Finding, look
from burnish.cli.launch import launcher_of
from burnish.cli.output import print_text
from burnish.config.schema import DistributedConfig
from burnish.distributed.collectives import gather_objects
from burnish.distributed.layout import Layout
from burnish.distributed.processes import launch
from burnish.errors import BurnishError, count_text, table
from burnish.launch.supervisor import run_once

_MARKS = {"ok": "ok", "warning": "warning", "error": "ERROR"}


def doctor(given: Namespace) -> None:
    """Print findings. Raises `BurnishError` if one of them keeps runs from working."""
    if given.processes is not None or given.ray is not None:
        argv = ["doctor", *given.places, *["--json"] * given.json]
        with closing(launcher_of(given.ray, argv)) as launcher:
            raise SystemExit(run_once(launcher, given.processes))
    found = launch(
        lambda layout, device: _examined(given.places or ["."], layout, device),
        DistributedConfig(),
    )
    if not found:
        return
    if given.json:
        shown = [
            {"hosts": hosts, "verdict": each.verdict} | asdict(each)
            for each, hosts in found.items()
        ]
        print_text(json.dumps(shown, indent=1))
    else:
        print_text("\n".join(_lines(found)))
    if wrong := [each.part for each in found if each.verdict == "error"]:
        raise BurnishError(
            f"{count_text(len(wrong), 'thing')} would keep a run from working",
            have=", ".join(wrong),
            do="see the lines marked ERROR",
        )


def _examined(places: list[str], layout: Layout, device: torch.device) -> dict[Finding, list[str]]:
    """Return findings and their machines on rank 0, {} on other ranks. Collective."""
    mine = list(look(places, layout, device))
    found: dict[Finding, list[str]] = {}
    for host, theirs in gather_objects((socket.gethostname(), mine), layout):
        for each in theirs:
            found.setdefault(each, []).append(host)
    if layout.world > 1:
        from burnish.check.links import measure

        found |= {each: [] for each in measure(layout, device)}
    return found if layout.is_main else {}


def _lines(found: dict[Finding, list[str]]) -> list[str]:
    machines = {host for hosts in found.values() for host in hosts}
    rows: list[tuple[str, str, str]] = []
    for each, hosts in found.items():
        where = f"{', '.join(hosts)}: " if hosts and set(hosts) != machines else ""
        rows.append((_MARKS[each.verdict], each.part, where + each.found))
        if each.want:
            rows += [("", "", f"  want: {each.want}"), ("", "", f"  do:   {each.do}")]
    return list(table(rows))
