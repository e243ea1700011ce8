"""A supervised run dies at any moment, loses and gets back its devices, and comes to what an undisturbed one comes to."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.ranks.forked_launcher import ForkedLauncher
from support.runs.training_files import At, done, outcome

from burnish.config.schema import DistributedConfig
from burnish.errors import BurnishError, UsageError
from burnish.launch import supervisor
from burnish.launch.local import LocalLauncher
from burnish.launch.supervisor import Supervisor

ARGV = ["rl", "rl.yaml", "checkpoint.save_every=1", "evaluation.every=0"]
UPDATE, ROLLOUT, SETUP = (
    "burnish.methods.parts.online_training:policy_stats",
    "burnish.methods.parts.online_training:RolloutQueue.take",
    "burnish.methods.parts.online_training:make_collector",
)
SAVE = "burnish.runs.step_saver:StepSaver._committed"
PLACES = (
    SETUP,
    "burnish.methods.parts.online_training:RolloutQueue.publish",
    ROLLOUT,
    "burnish.methods.parts.rollouts:Collector.collect",
    UPDATE,
    SAVE,
)


@pytest.fixture(scope="module")
def calm(work: Path) -> Callable[[Sequence[str]], dict[str, Any]]:
    """What an undisturbed run of two processes comes to."""

    @cache
    def made(argv: Sequence[str]) -> dict[str, Any]:
        return outcome(done(work, *argv, f"name=calm{len(argv)}{len(argv[-1])}", world=2))

    return made


def supervised(launcher: ForkedLauncher, world: int = 2, **settings: float) -> int:
    given = {"replace_seconds": 0, **settings}
    return Supervisor(launcher, DistributedConfig.model_validate(given), world).run()


def imitate(directory: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a rank run a program in place of Burnish."""
    package = directory / "burnish"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(text)
    monkeypatch.chdir(directory)  # where `python -m burnish` looks first


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [("sys.exit(7)", 7, []), ("os.kill(os.getpid(), 9)", 137, ["rank 1 was killed by SIGKILL"])],
)
def test_a_command_that_is_started_once_does_not_outlive_a_rank(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    end: str,
    code: int,
    said: list[str],
) -> None:
    """Rank 1 dies before the ranks have met, and rank 0 would wait for it for minutes."""
    text = "import os, sys, time\nprint('lost', flush=True) if os.environ['RANK'] == '1' else time.sleep(600)\n"
    imitate(tmp_path, f"{text}{end}\n", monkeypatch)
    monkeypatch.setattr(supervisor, "_GRACE_SECONDS", 0.1)
    assert supervisor.run_once(LocalLauncher([]), 2) == code
    assert caplog.messages == ["rank 1: lost", *said]


BOTH = """
import os, sys, time
if os.environ["RANK"] == "1":
    os.symlink(f"/proc/{os.getpid()}", "first")
    print("refused")
    sys.exit(int(sys.argv[2]))
while not os.path.lexists("first") or os.path.exists("first"):
    time.sleep(0.01)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("codes", "said"), [("22", False), ("11", True), ("23", True)])
def test_what_rank_0_refuses_too_is_said_by_it_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    codes: str,
    said: bool,
) -> None:
    """Rank 1 ends first. Any other error may be the cause of rank 0's."""
    imitate(tmp_path, BOTH, monkeypatch)
    assert supervisor.run_once(LocalLauncher(list(codes)), 2) == int(codes[1])
    assert caplog.messages == ["rank 1: refused"] * said


@pytest.mark.nightly
def test_a_rank_that_dies_is_started_again_from_the_newest_step(work: Path) -> None:
    wanted = outcome(done(work, *ARGV, "name=calm", world=2))
    kills = {
        0: (1, At(UPDATE, 2, signal.SIGKILL)),
        1: (0, At(ROLLOUT, 2, signal.SIGKILL)),
        2: (1, At(SAVE, 2, signal.SIGKILL)),
    }
    launcher = ForkedLauncher(work, [*ARGV, "name=killed"], kills)
    assert supervised(launcher) == 0, launcher.output
    assert len(launcher.started) == 4
    assert outcome(work / "runs/killed") == wanted


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(12))
def test_five_kills_in_any_phase(
    work: Path, seed: int, calm: Callable[[Sequence[str]], Any]
) -> None:
    chance = random.Random(seed)
    background = seed % 3 == 0
    places = [*PLACES, f"burnish.checkpoint.manager:Checkpoints.{'begin_' * background}save"]

    def kill(attempt: int) -> tuple[int, At]:
        """Every second attempt makes a step at least: three deaths alike would end the run."""
        odd = attempt % 2
        place = chance.choice(places[odd:])
        # A save in the background is committed a step later, and the setup publishes once.
        nth = 1 + odd * (chance.choice((1, 2)) + background) + ("publish" in place)
        return chance.randrange(2), At(place, nth, signal.SIGKILL)

    kills = {attempt: kill(attempt) for attempt in range(5)}
    argv = [*ARGV, "steps=14"]
    if background:
        argv += ["checkpoint.background=true"]
    if seed % 3 == 1:
        argv += ["rollout.ahead=1", "algorithm.mismatch_cap=2"]
    launcher = ForkedLauncher(work, [*argv, f"name=seed{seed}"], kills)
    assert supervised(launcher) == 0, launcher.output
    assert len(launcher.started) == 6, launcher.output
    run = work / "runs" / f"seed{seed}"
    assert outcome(run) == calm(tuple(argv))


@pytest.mark.nightly
@pytest.mark.parametrize("how", [[], ["checkpoint.background=true"], ["rollout.ahead=1"]])
def test_lost_devices_are_done_without_and_taken_back_at_the_next_save(
    work: Path, how: list[str]
) -> None:
    every = 3
    elastic = ["distributed.min_processes=1", "engine.tensor_parallel=2"]
    argv = [*ARGV, *how, *elastic, f"checkpoint.save_every={every}", "steps=60"]
    argv += ["algorithm.mismatch_cap=2"] * ("rollout.ahead=1" in how)
    name = f"elastic{len(argv)}{len(how)}"
    run = work / "runs" / name

    def alone() -> str:
        """What the attempt on one process has said."""
        return launcher.started[1].ranks[0].output if len(launcher.started) > 1 else ""

    def places() -> int:
        """Two; one after the first attempt, until the run has made a step alone that it does not save."""
        return 1 if launcher.started and not re.search(r"^step +\d+/", alone(), re.M) else 2

    kills = {0: (1, At(UPDATE, 8, signal.SIGKILL))}
    launcher = ForkedLauncher(work, [*argv, f"name={name}"], kills, places)
    assert supervised(launcher, min_processes=1) == 0, launcher.output
    assert [len(each.ranks) for each in launcher.started] == [2, 1, 2]
    begins, grown = (
        int(re.findall(r"INFO steps (\d+) to", each.ranks[0].output)[0]) - 1
        for each in launcher.started[1:]
    )
    assert begins % every == grown % every == 0
    assert begins < grown < 60
    # No step was made that the larger layout made again.
    assert int(re.findall(r"^step +(\d+)/", alone(), re.M)[-1]) == grown

    stopped = ForkedLauncher(work, [*argv, f"name=sequence-{name}"])
    for world, last in ((2, begins), (1, grown - begins), (2, None)):
        at = last and At(UPDATE, last, signal.SIGUSR1)
        attempt = len(stopped.started)
        stopped.kills = {attempt: (0, at)} if at else {}
        started = stopped.start(world, attempt, 0, lambda: False)
        codes = [each.wait() for each in started.ranks]
        assert set(codes) == ({128 + signal.SIGUSR1} if last else {0}), stopped.output
    assert outcome(run) == outcome(work / "runs" / f"sequence-{name}")


@pytest.mark.nightly
def test_a_rank_that_dies_before_the_next_save_costs_a_restart(work: Path) -> None:
    """Room came back, and no save comes before the rank dies: the run goes on there all the same."""
    argv = [*ARGV, "distributed.min_processes=1", "checkpoint.save_every=4", "steps=6"]
    kills = {0: (1, At(UPDATE, 1, signal.SIGKILL)), 1: (0, At(UPDATE, 3, signal.SIGKILL))}

    def places() -> int:
        said = launcher.started[1].ranks[0].output if len(launcher.started) > 1 else ""
        return 1 if launcher.started and "\nstep " not in said else 2

    launcher = ForkedLauncher(work, [*argv, "name=late"], kills, places)
    assert supervised(launcher, min_processes=1, max_restarts=2) == 0, launcher.output
    assert [len(each.ranks) for each in launcher.started] == [2, 1, 2]


def test_a_step_that_fails_alike_is_not_tried_for_ever(work: Path) -> None:
    argv = [
        "sft",
        "sft.yaml",
        "name=alike",
        "engine.max_skipped_steps=1",
        "optim.lr=1e30",
        "evaluation.every=0",
    ]
    launcher = ForkedLauncher(work, argv)
    assert supervised(launcher, world=1) == UsageError.exit_code, launcher.output
    assert len(launcher.started) == 4
    assert "3 times with the same error" in launcher.output


def test_what_is_refused_is_not_started_again(work: Path) -> None:
    launcher = ForkedLauncher(work, [*ARGV, "name=refused", "rollout.n=0"])
    assert supervised(launcher) == UsageError.exit_code
    assert len(launcher.started) == 1


@pytest.mark.nightly
def test_a_run_that_keeps_dying_ends(work: Path) -> None:
    kills = {attempt: (1, At(SETUP, 1, signal.SIGKILL)) for attempt in range(9)}
    launcher = ForkedLauncher(work, [*ARGV, "name=dying"], kills)
    with pytest.raises(BurnishError, match="max_restarts"):
        supervised(launcher, max_restarts=1)
    assert len(launcher.started) == 2
    launcher = ForkedLauncher(work, [*ARGV, "name=dying"], kills, places=lambda: 1)
    with pytest.raises(BurnishError, match="min_processes"):
        supervised(launcher)
