"""Submit a run to a Ray cluster as a job, which needs no terminal."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Sequence

from ray.job_submission import JobStatus, JobSubmissionClient

from burnish.errors import UsageError


def submit(address: str | None, argv: Sequence[str]) -> int:
    """Submit `burnish argv` in this directory, print its output until it ends, and return its exit code.

    `address` is the dashboard's; None: RAY_API_SERVER_ADDRESS, or this machine's. Raises `UsageError` if no dashboard answers.
    """
    command = shlex.join(["python", "-m", "burnish", *argv])
    try:
        client = JobSubmissionClient(address)
        job = client.submit_job(entrypoint=f"cd {shlex.quote(os.getcwd())} && exec {command}")
    except (ConnectionError, RuntimeError) as error:
        raise UsageError(
            "there is no Ray dashboard that takes jobs",
            have=f"--address {address}: {str(error).partition(chr(10))[0]}",
            want="the address of a dashboard, such as http://head:8265",
            do="start the head with: ray start --head",
        ) from error
    print(f"submitted as {job}; ctrl-C leaves it running, and this ends it: ray job stop {job}")
    asyncio.run(_follow(client, job))
    info = client.get_job_info(job)
    if info.status == JobStatus.SUCCEEDED:
        return 0
    print(f"{job}: {info.status} {info.message or ''}")
    return info.driver_exit_code or 1


async def _follow(client: JobSubmissionClient, job: str) -> None:
    async for lines in client.tail_job_logs(job):
        print(lines, end="", flush=True)
