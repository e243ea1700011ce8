"""The committed table of planned against measured peaks, and one run measured again."""

import json
import subprocess
import sys
from pathlib import Path

from burnish.planning.accuracy import measured_table

ROOT = Path(__file__).parents[2]
TOLERANCE = 0.10
LIVE = "sft qwen3 bf16, checkpointing selective, 4096 tokens, 1 process"


def planned_now(*cases):
    """What the planner says today of cases of the benchmark, by case and phase."""
    program = (
        "import json, sys; from bench.planning import CASES; from burnish.planning.accuracy import planned\n"
        "cases = [CASES[name] for name in sys.argv[1:]]\n"
        "print(json.dumps({c.name: planned(c.settings(), c.command, c.processes) for c in cases}))"
    )
    command = [sys.executable, "-c", program, *cases]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_table_is_that_of_this_planner_and_within_its_tolerance():
    table = measured_table()
    cases = sorted({row.case for row in table})
    assert len(cases) >= 12
    now = planned_now(*cases)
    for row in table:
        assert row.planned == int(now[row.case][row.phase]), (
            f"{row.case}: run bench.planning --write"
        )
        assert abs(row.error) <= TOLERANCE, row


def test_the_table_covers_what_it_should():
    text = "\n".join(row.case for row in measured_table())
    families = ("llama", "qwen3", "gemma3_text", "olmo2", "qwen3_moe")
    settings = (
        "fp32",
        "bf16",
        "none",
        "full",
        "selective",
        "2 processes",
        "micro-batches",
        "vocab",
    )
    assert [each for each in (*families, *settings) if each not in text] == []
    assert {row.phase for row in measured_table()} == {"rollout", "log-probs", "update", "publish"}


def test_a_run_measured_again(tmp_path):
    file = tmp_path / "peaks"
    command = [sys.executable, "-m", "bench.planning", "--rank-of", str(file), "--cases", LIVE]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    name, measured = json.loads(file.read_text())
    planned = planned_now(LIVE)[LIVE]
    assert name == LIVE
    assert abs(planned["update"] / measured["update"] - 1) < TOLERANCE
