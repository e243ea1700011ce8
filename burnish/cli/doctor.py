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


def doctor(args: Namespace) -> None:
    """Print findings. Raises `BurnishError` if one of them keeps runs from working."""
    if args.processes is not None or args.ray is not None:
        counted = [] if args.count is None else [f"--count={args.count}"]
        argv = ["doctor", *args.places, *counted, *["--json"] * args.json]
        with closing(launcher_of(args.ray, argv)) as launcher:
            raise SystemExit(run_once(launcher, args.processes))
    if args.count is not None:
        from burnish.cli.doctor_count import count_calls

        count_calls(args.count, args.places, as_json=args.json)
        return
    findings = launch(
        lambda layout, device: _examined(args.places or ["."], layout, device),
        DistributedConfig(),
    )
    if not findings:
        return
    if args.json:
        shown = [
            {"hosts": hosts, "verdict": finding.verdict} | asdict(finding)
            for finding, hosts in findings.items()
        ]
        print_text(json.dumps(shown, indent=1))
    else:
        print_text("\n".join(_lines(findings)))
    if wrong := [finding.part for finding in findings if finding.verdict == "error"]:
        raise BurnishError(
            f"{count_text(len(wrong), 'thing')} would keep a run from working",
            have=", ".join(wrong),
            do="see the lines marked ERROR",
        )


def _examined(places: list[str], layout: Layout, device: torch.device) -> dict[Finding, list[str]]:
    """Return findings and their machines on rank 0, {} on other ranks. Collective."""
    own = list(look(places, layout, device))
    findings: dict[Finding, list[str]] = {}
    for host, of_host in gather_objects((socket.gethostname(), own), layout):
        for finding in of_host:
            findings.setdefault(finding, []).append(host)
    if layout.world > 1:
        from burnish.check.links import measure

        findings |= {finding: [] for finding in measure(layout, device)}
    return findings if layout.is_main else {}


def _lines(findings: dict[Finding, list[str]]) -> list[str]:
    machines = {host for hosts in findings.values() for host in hosts}
    rows: list[tuple[str, str, str]] = []
    for finding, hosts in findings.items():
        where = f"{', '.join(hosts)}: " if hosts and set(hosts) != machines else ""
        rows.append((_MARKS[finding.verdict], finding.part, where + finding.found))
        if finding.want:
            rows += [("", "", f"  want: {finding.want}"), ("", "", f"  do:   {finding.do}")]
    return list(table(rows))
