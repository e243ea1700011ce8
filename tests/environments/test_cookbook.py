"""Message environments of tinker-cookbook, with its own classes."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from environments.played import Pool, play

needs_package = pytest.mark.skipif(
    find_spec("tinker_cookbook") is None, reason="make nightly-environments installs it"
)
pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]  # of the package's own
ASKED = [{"role": "user", "content": "ignored"}]
FILE = """
import random
from dataclasses import dataclass

from tinker_cookbook.rl.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from tinker_cookbook.rl.types import Env, EnvGroupBuilder


class Guess(MessageEnv):
    def __init__(self, target, most=3):
        self.target = target
        self.most = most
        self.history = []
        self.lucky = random.random()

    async def initial_observation(self):
        parts = [{"type": "text", "text": "Guess "}, {"type": "text", "text": "a number."}]
        self.history = [{"role": "system", "content": "A game."}, {"role": "user", "content": parts}]
        return list(self.history)

    async def step(self, message):
        self.history.append(message)
        right = message["content"] == str(self.target)
        done = right or len(self.history) > 2 * self.most
        if not done:
            self.history.append({"role": "user", "content": f"not {message['content']}"})
        return MessageStepResult(
            reward=float(right), episode_done=done, next_messages=list(self.history), metrics={"guesses": 1}
        )


class Renderer:
    def get_stop_sequences(self):
        return []


@dataclass
class Group(EnvGroupBuilder):
    target: int

    async def make_envs(self):
        return [EnvFromMessageEnv(Renderer(), Guess(self.target)) for _ in range(2)]


class Pairs(Group):
    async def compute_group_rewards(self, trajectory_group, env_group):
        return [(1.0, {}) for _ in trajectory_group]


class Tokens(Env):
    async def initial_observation(self):
        return None, []

    async def step(self, action, *, extra=None):
        return None
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "envs.py").write_text(FILE)
    return str(tmp_path / "envs.py")


@needs_package
@pytest.mark.parametrize("name", ["Guess", "Group"])
def test_message_environments_are_played(file, name):
    row = {"prompt": ASKED, "target": 7, "other": 1}
    played = play(row, ["5", "6", "7", "8"], cookbook=f"{file}:{name}")
    assert played.opening.replaces_prompt
    assert [each["content"] for each in played.opening.messages] == ["A game.", "Guess a number."]
    assert played.texts == ["not 5", "not 6"]
    assert [turn.rewards["reward"] for turn in played.turns] == [0.0, 0.0, 1.0]
    assert [turn.done for turn in played.turns] == [False, False, True]
    assert played.turns[0].metrics == {"guesses": 1.0}


@needs_package
@pytest.mark.parametrize("name", ["Pairs", "Tokens"])
def test_what_is_not_carried_fails_with_a_reason(file, name):
    with Pool(cookbook=f"{file}:{name}") as pool:
        answer = pool.begin({(0, 0): ({"prompt": ASKED, "target": 1}, 0)})[0, 0]
    assert answer.observation is None
    assert name in answer.error
