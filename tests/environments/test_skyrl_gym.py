"""Environments of the package skyrl-gym, against the package itself."""

from __future__ import annotations

import json
import sqlite3
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec

import pytest
from environments.played import play

from burnish.environments.skyrl_gym import SkyRLGym
from burnish.errors import MissingError, UsageError

INSTALLED = find_spec("skyrl_gym") is not None
needs_package = pytest.mark.skipif(
    not INSTALLED, reason="make nightly-environments installs skyrl-gym"
)
pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]  # of the package's own
ASKED = [{"role": "user", "content": "Solve it."}]


@pytest.fixture
def url():
    """A retriever, as Search-R1's answers."""

    class Retriever(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found = [{"document": {"contents": f"About {asked['query']}"}}]
            body = json.dumps({"result": [found]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Retriever)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/retrieve"
    server.shutdown()
    server.server_close()


@pytest.fixture
def database(tmp_path):
    path = tmp_path / "spider" / "database" / "pets" / "pets.sqlite"
    path.parent.mkdir(parents=True)
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE pet (name TEXT)")
        connection.executemany("INSERT INTO pet VALUES (?)", [("Rex",), ("Tom",)])
    connection.close()
    return str(tmp_path)


def theirs(name, row, script, max_turns, **config):
    """Play as SkyRL's generator does."""
    import skyrl_gym
    from omegaconf import OmegaConf

    environment = skyrl_gym.make(
        name, env_config=OmegaConf.create(config), extras={**row, "max_turns": max_turns}
    )
    messages, _ = environment.init(row["prompt"])
    outputs = []
    for said in script:
        outputs.append(environment.step(said))
        if outputs[-1]["done"]:
            break
    environment.close()
    return messages, outputs, environment.get_metrics()


def assert_same(name, row, script, **config):
    row = {"prompt": ASKED, **row}
    messages, outputs, metrics = theirs(name, row, script, 4, **config)
    ours = play(row, script, skyrl_gym=name, kwargs={"max_turns": 4, **config})
    assert messages == ASKED
    assert not ours.opening.messages
    assert len(ours.turns) == len(outputs)
    for turn, output in zip(ours.turns, outputs, strict=True):
        assert list(turn.messages) == output["observations"]
        assert turn.rewards["reward"] == output["reward"]
        assert turn.done == output["done"]
    if ours.turns[-1].done:
        assert ours.turns[-1].metrics == metrics
    return ours


@needs_package
@pytest.mark.parametrize(
    ("name", "script"),
    [
        ("gsm8k", ["It is #### 12"]),
        ("gsm8k_multi_turn", ["Let me see. #### 11", "no idea", "#### 12", "more"]),
        ("gsm8k_multi_turn", ["a", "b", "c", "d", "e"]),
    ],
)
def test_gsm8k(name, script):
    row = {"reward_spec": {"ground_truth": "12"}, "extra_info": {}}
    ours = assert_same(name, row, script)
    assert ours.turns[-1].done


@needs_package
def test_text2sql(database):
    row = {
        "db_id": "pets",
        "data": "spider",
        "reward_spec": {"ground_truth": "SELECT name FROM pet"},
    }
    script = [
        "<think>Look.</think><sql>SELECT count(*) FROM pet</sql>",
        "<think>Wrong.</think><sql>SELECT nothing</sql>",
        "<think>So.</think><solution>SELECT name FROM pet</solution>",
    ]
    ours = assert_same("text2sql", row, script, db_path=database)
    assert "2" in ours.texts[0]
    assert ours.turns[-1].rewards["reward"] == 1.0


@needs_package
def test_search(url):
    row = {"reward_spec": {"ground_truth": {"target": ["Paris"]}}}
    script = ["<search>capital of France</search>", "<answer>Paris</answer>"]
    config = {"search_url": url, "topk": 1, "timeout": 30, "log_requests": False}
    ours = assert_same("search", row, script, **config)
    assert "About capital of France" in ours.texts[0]
    assert ours.turns[-1].rewards["reward"] == 1.0
    # The package's own values stand for what is not given.
    assert (
        play({"prompt": ASKED, **row}, script, skyrl_gym="search", kwargs={"search_url": url})
        .turns[-1]
        .done
    )


@needs_package
def test_a_class_of_ones_own(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    ours = play({"prompt": ASKED, "word": "abc"}, ["ab", "abc"], skyrl_gym=f"{file}:Own")
    assert ours.opening.replaces_prompt
    assert ours.opening.messages[0] == {"role": "system", "content": "Say abc."}
    assert [turn.rewards["reward"] for turn in ours.turns] == [0.0, 1.0]


OWN = """
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class Own(BaseTextEnv):
    def __init__(self, env_config=None, extras={}):
        super().__init__()
        self.word = extras["word"]

    def init(self, prompt):
        return [{"role": "system", "content": f"Say {self.word}."}, *prompt], {}

    def step(self, action):
        right = action == self.word
        asked = [{"role": "user", "content": "Again."}]
        return BaseTextEnvStepOutput(observations=asked, reward=float(right), done=right, metadata={})
"""


@needs_package
def test_what_the_package_does_not_have_is_refused():
    with pytest.raises(UsageError):
        SkyRLGym.schemas("gsm8k_multi")


@pytest.mark.skipif(INSTALLED, reason="it is installed")
def test_without_the_package_it_is_named():
    with pytest.raises(MissingError, match="skyrl-gym"):
        SkyRLGym.schemas("gsm8k")
