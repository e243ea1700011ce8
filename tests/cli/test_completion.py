from __future__ import annotations

import subprocess

import pytest

from burnish.cli.main import main


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", "bash"]) == 0
    return capsys.readouterr().out


def test_bash_completes_commands_options_and_settings(script: str) -> None:
    typed = [
        (["r"], "rm rl rejection-sampling run runs"),
        (["config", "sh"], "show"),
        (["rl", "rollout.n"], "rollout.n="),
        (["rl", "x.yaml", "--dry"], "--dry-run"),
        (["sft", "a=1", "optim.l"], "optim.lr="),
        (["init", "s"], "sft"),
        (["ckpt", "verify", "--fa"], "--fast"),
    ]
    calls = [
        f'COMP_WORDS=(burnish {" ".join(words)}); COMP_CWORD={len(words)}; _burnish; echo "${{COMPREPLY[*]}}"'
        for words, _ in typed
    ]
    program = "\n".join([script, "compopt() { :; }", *calls])
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [completed for _, completed in typed]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "rollout.n=" in capsys.readouterr().out
    assert main(["completion", "tcsh"]) == 2
