"""Servers of OpenEnv, which run for real."""

from __future__ import annotations

import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from environments.played import play, play_all, pool_of, wait_for
from support.ranks.ports import free_port

from burnish.environments.openenv import OpenEnv
from burnish.errors import UsageError

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        find_spec("openenv") is None, reason="make nightly-environments installs openenv-core"
    ),
]
SERVER = Path(__file__).with_name("openenv_server.py")


def served(name):
    port = free_port()
    process = subprocess.Popen([sys.executable, str(SERVER), name, str(port)])
    try:
        wait_for(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def guess():
    yield from served("guess")


@pytest.fixture(scope="module")
def echo():
    yield from served("echo")


def numbers(low=0):
    return [random.Random(seed).randrange(low, 10) for seed in range(3)]


def test_texts_are_actions(guess):
    kwargs = {"action": "guess", "observation": "hint", "prompt": "A game.", "size": 3}
    rows = list(OpenEnv.rows(size=3, prompt="A game."))
    scripts = [["-1", str(number)] for number in numbers()]
    with pool_of(openenv=guess, kwargs=kwargs) as pool:
        assert pool.described.tools == []
        games = play_all(pool, rows, scripts)
    for game in games:
        (asked,) = game.opening.messages
        assert asked["content"] == "A game.\n\nGuess a number from 0 to 9."
        assert game.texts == ["higher", "right"]
        assert [turn.rewards["reward"] for turn in game.turns] == [-0.1, 1.0]
        assert [turn.done for turn in game.turns] == [False, True]


def test_actions_are_calls(guess):
    row = {"prompt": [{"role": "user", "content": "Play."}], "episode_seed": 1, "low": 5}
    number = numbers(5)[1]
    with pool_of(openenv=guess, kwargs={"reset": ["low"]}) as pool:
        (tool,) = pool.described.tools
        assert tool["function"]["name"] == "step"
        assert list(tool["function"]["parameters"]["properties"]) == ["guess"]
        script = [
            [("step", {"guess": "-1"})],
            [("step", {"x": 1})],
            [("step", {"guess": str(number)})],
        ]
        (game,) = play_all(pool, [row], [script])
    assert '"hint": "Guess a number from 5 to 9."' in game.opening.messages[0]["content"]
    assert game.texts[0] == '{"hint": "higher", "tries": 1}'
    assert game.texts[1].startswith("Error")
    assert game.turns[2].done
    assert game.turns[2].rewards == {"reward": 1.0}


def test_tools_of_a_server_are_the_models(echo):
    row = {"prompt": [{"role": "user", "content": "Echo."}]}
    with pool_of(openenv=echo) as pool:
        (tool,) = pool.described.tools
        assert tool["function"]["name"] == "echo_message"
    script = [[("echo_message", {"message": "hello"})], [("fly", {})], "Done."]
    game = play(row, script, openenv=echo)
    assert game.texts[0] == "hello"
    assert game.texts[1].startswith("Error")
    assert game.turns[2].done


@pytest.mark.parametrize("kwargs", [{"action": "gess"}, {}])
def test_what_cannot_be_used_is_refused(guess, kwargs):
    with pytest.raises(UsageError):
        list(OpenEnv.schemas(guess if kwargs else f"http://127.0.0.1:{free_port()}", **kwargs))
