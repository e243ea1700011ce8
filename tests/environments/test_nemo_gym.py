"""Agents and resources servers of NeMo Gym run as they are: Gym's own command starts them, and they train over HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import yaml
from environments.played import pool_of
from environments.test_conversations import said
from environments.test_gateway import Answers
from support.models.tokenizers import CHARACTERS, char_tokenizer
from support.models.tool_templates import HERMES, calling_tokenizer
from support.ranks.ports import free_port
from support.runs.same_runs import assert_same
from support.runs.training_files import burnish, done, metrics, outcome, rollouts, write_rows

from burnish.config.environment import EnvironmentConfig
from burnish.config.schema import DataConfig
from burnish.data.prompt_forms import chat_of_request
from burnish.data.turn_bridge import TurnBridge
from burnish.environments import nemo_gym
from burnish.environments.calls import AgentReply
from burnish.environments.pool import EnvironmentPool
from burnish.errors import UsageError
from burnish.methods.parts.sessions import Sessions
from burnish.records import Prompt, Request
from burnish.rollout.base import Sampling

VENV = Path(__file__).parents[2] / ".venv-nemo-gym"
needs_gym = pytest.mark.skipif(
    not (VENV / "bin/gym").exists(), reason="make nightly-nemo-gym installs NeMo Gym"
)
SERVERS = [
    "resources_servers/example_multi_step",
    "resources_servers/string_match",
    "responses_api_agents/simple_agent",
    "responses_api_models/vllm_model",
    "environment_servers/legacy_agent",
]
REQUEST = "responses_create_params"
TOOLS = [
    {
        "type": "function",
        "name": name,
        "description": "Use it.",
        "parameters": {"type": "object", "properties": properties, "required": [*properties]},
        "strict": True,
    }
    for name, properties in (
        ("get_synonym_value", {"synonym": {"type": "string"}}),
        (
            "extract_synonym_values",
            {"synonym_values": {"type": "array", "items": {"type": "integer"}}},
        ),
    )
]
STEPS = {
    REQUEST: {"input": [{"role": "user", "content": "Values?"}], "tools": TOOLS},
    "agent_ref": {"type": "responses_api_agents", "name": "example_multi_step_simple_agent"},
    "id": 0,
    "expected_synonyms": ["abc"],
    "expected_synonym_values": [294],
    "minefield_label": "none",
    "minefield_label_value": 0,
}
"""A task for two calls: the value of abc is the sum of its letters' numbers."""
CHARACTER_IDS = char_tokenizer().convert_tokens_to_ids([*CHARACTERS])


def is_ready(process, url, log):
    assert process.poll() is None, log.read_text()[-2000:]
    try:
        with urllib.request.urlopen(f"{url}/readyz") as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def gym(tmp_path_factory):
    """The URL of a head server of NeMo Gym; its servers run in the environment of the Makefile."""
    folder = tmp_path_factory.mktemp("gym")
    for server in SERVERS:
        (folder / "venvs" / server).mkdir(parents=True)
        (folder / "venvs" / server / ".venv").symlink_to(VENV)
    head, model = free_port(), free_port()
    argv = [
        *(f"{VENV}/bin/gym", "env", "start", "--model-type", "vllm_model"),
        *("--resources-server", "example_multi_step", "--resources-server", "string_match"),
        *("--model", "policy", "--model-url", f"http://127.0.0.1:{model}/v1"),
        *("--model-api-key", "none", "++model_endpoint_readiness_timeout_seconds=0"),
        *("++skip_venv_if_present=true", f"++uv_venv_dir={folder}/venvs"),
        f"++head_server={{host: 127.0.0.1, port: {head}}}",
    ]
    environ = {**os.environ, "PYTHONPATH": ""}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(argv, cwd=folder, env=environ, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{head}"
    try:
        end = time.monotonic() + 600
        while not is_ready(process, url, folder / "log"):
            assert time.monotonic() < end, (folder / "log").read_text()[-2000:]
            time.sleep(1)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120)


def held(gym, row, script, **settings):
    """A conversation of an agent with a model that says lines; returns the rollout and the tokenizer."""
    tokenizer = calling_tokenizer()
    stops = [tokenizer.eos_token_id]

    def bridge_of(tools):
        return TurnBridge(tokenizer, DataConfig(), tools, stops)

    chat = chat_of_request(row)
    messages = chat[REQUEST]
    bridge = bridge_of(chat["tools"])
    ids = np.array(bridge.first(messages, "the row"), np.int64)
    prompt = Prompt(5, ids, tokenizer.decode(ids), messages, None, "", row)
    config = EnvironmentConfig(agent=gym, workers=1, timeout_seconds=120.0, **settings)
    with EnvironmentPool(config) as pool:
        sessions = Sessions(
            config,
            pool,
            bridge_of([]),
            bridge_of=bridge_of,
            stop_token_ids=stops,
            vocabulary=len(tokenizer),
        )
        request = Request(9, ids, 1, prompt=prompt)
        sampling = Sampling(1000, seed=1, step=2)
        ((rollout,),) = sessions.play(
            [prompt], [request], sampling, Answers(tokenizer, [script]), lambda: None
        )
    return rollout, tokenizer


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@needs_gym
@pytest.mark.nightly
def test_an_agent_calls_tools_of_its_resources_server_which_rewards_it(gym):
    script = [
        call("get_synonym_value", synonym="abc"),
        call("extract_synonym_values", synonym_values=[294]),
        "Done.",
    ]
    rollout, tokenizer = held(gym, STEPS, script)
    assert rollout.end == "done"
    assert rollout.reward == 1.0
    assert rollout.metrics["branches"] == 0
    assert rollout.metrics["accuracy"] == rollout.metrics["set_overlap"] == 1.0
    assert said(rollout, tokenizer) == [f"{line}<|im_end|>" for line in script]
    text = tokenizer.decode(rollout.completion.token_ids)
    assert '{"synonym_value":294}' in text.partition(script[1])[0]
    wrong, _ = held(gym, STEPS, [call("extract_synonym_values", synonym_values=[1]), "Done."])
    assert wrong.reward == 0.0


@needs_gym
@pytest.mark.nightly
def test_a_limit_ends_a_conversation_and_not_its_reward(gym):
    script = [call("extract_synonym_values", synonym_values=[294])] * 2
    rollout, _ = held(gym, STEPS, script, max_turns=1)
    assert rollout.end == "turns"
    assert rollout.reward == 1.0


@needs_gym
@pytest.mark.nightly
def test_gym_s_rows_are_trained_on(gym, work):
    rows = [
        {
            REQUEST: {"input": [{"role": "user", "content": f"Say {letter}."}]},
            "agent_ref": {"type": "responses_api_agents", "name": "string_match_simple_agent"},
            "expected_answer": letter,
            "extraction_mode": "full_response",
            # Columns of verifiers, which no one else reads.
            "prompt": "Say z.",
            "system": "Say y.",
            "tools": ["no tool"],
        }
        for letter in "abcde"
    ]
    write_rows(work / "gym.jsonl", [*rows, STEPS])
    (work / "tools.jinja").write_text(HERMES)
    argv = [
        *("rl", "rl.yaml", "reward.functions=[]", "data.train=[gym.jsonl]", "steps=3"),
        *("model.fresh.max_position_embeddings=1024", "batch.tokens_per_device=1024"),
        *(
            "rollout.n=16",
            "batch.prompts=6",
            "rollout.max_response_length=40",
            "model.chat_template=tools.jinja",
        ),
        *("evaluation.every=0", "data.validation=[]", f"rollout.stop_token_ids={CHARACTER_IDS}"),
        *(f"rollout.environment.agent={gym}", "rollout.environment.timeout_seconds=120"),
        "rollout.environment.workers=2",
    ]
    run = done(work, *argv, "name=gym")
    told = [row for step in (1, 2, 3) for row in rollouts(run, step)]
    assert len(told) == 3 * 6 * 16
    right = 0
    for row in told:
        # What Gym's model server asks first is the row's prompt.
        assert [message["role"] for message in row["conversation"]] == ["assistant"]
        assert row["end"] == "done"
        text = row["conversation"][0]["content"]
        if "Say " in row["prompt"]:
            wanted = row["prompt"].partition("Say ")[2][0]
            assert row["reward"] == float(text.strip().rstrip(".!?").lower() == wanted), text
            right += row["reward"]
        else:
            assert '"name": "get_synonym_value"' in row["prompt"]
            assert row["reward"] == 0.0
    assert 0 < right < len(told)
    last = metrics(run)[-1]
    assert last["rollout/mismatch_kl"] < 1e-5
    assert last["environment/branches"] == 0
    assert outcome(done(work, *argv, "name=again")) == outcome(run)
    assert_same(done(work, *argv, "name=two", world=2), run)


@needs_gym
@pytest.mark.nightly
def test_what_gym_does_not_have_is_refused_before_a_run(gym, work):
    with pytest.raises(UsageError):
        EnvironmentPool(EnvironmentConfig(agent=gym, kwargs={"name": "nobody"}))
    code, output = burnish(
        work,
        *("rl", "rl.yaml", "reward.functions=[]", f"rollout.environment.agent={gym}"),
        *("data.string_prompts=user", "--dry-run"),
    )
    assert code == 2, output  # its rows have no requests
    assert REQUEST in output
    assert "Traceback" not in output


class StandIn(BaseHTTPRequestHandler):
    """A head server and an agent, which asks the model once and answers what its row says."""

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        self.reply(200, self.server.config)

    def do_POST(self):
        row = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        request = row[REQUEST]
        body = {"messages": request["input"], "metadata": request["metadata"], "model": "policy"}
        if row["drops_metadata"]:
            del body["metadata"]
        asked = urllib.request.Request(
            f"{self.server.model}/chat/completions", json.dumps(body).encode()
        )
        try:
            with urllib.request.urlopen(asked) as answer:
                said = json.load(answer)["choices"][0]["message"]["content"]
        except urllib.error.HTTPError as error:
            self.reply(500, error.read().decode())
        else:
            assert said == "Good day"
            assert row["prompt"] == "a column of its own"
            self.reply(200, row["answer"])

    def reply(self, status, value):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture(scope="module")
def stand_in():
    """The URL of a stand-in for NeMo Gym."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    server.model = f"http://127.0.0.1:{free_port()}/v1"
    host, port = server.server_address
    server.config = yaml.safe_dump(
        {
            "policy_base_url": server.model,
            "policy": {"responses_api_models": {"vllm_model": {"base_url": "${policy_base_url}"}}},
            "agent": {
                "responses_api_agents": {
                    "simple_agent": {"host": host, "port": port, "model_server": {"name": "policy"}}
                }
            },
        }
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://{host}:{port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("answer", "drops", "wanted"),
    [
        ({"reward": 0.5, "accuracy": True, "text": "x"}, False, {"reward": 0.5}),
        ({"reward": 0.5, "mask_sample": True, "failure_reason": "no judge"}, False, "no judge"),
        ({"failure": {"failure_reason": "late"}}, False, "failure"),
        ({"reward": 0.5}, True, "metadata"),
    ],
    ids=["reward", "masked", "no reward", "metadata lost"],
)
def test_a_row_is_run_and_asks_through_the_relay(stand_in, answer, drops, wanted):
    row = {
        "prompt": "a column of its own",
        REQUEST: {"input": [{"role": "user", "content": "Hello"}], "metadata": {"own": "kept"}},
        "answer": answer,
        "drops_metadata": drops,
    }
    key = (0, 0)
    with pool_of(agent=stand_in) as pool:
        first = pool.begin({key: (row, 3)})[key]
        if not drops:
            (ask,) = first.observation.asks
            assert ask.messages == row[REQUEST]["input"]
            reply = AgentReply(None, (1,), (2,), (-1.0,), "Good day", "", (), "stop")
            first = pool.step({key: (reply,)})[key]
    if isinstance(wanted, str):
        assert first.observation is None
        assert wanted in first.error
    else:
        assert first.observation.done
        assert first.observation.rewards == wanted
        assert first.observation.metrics == {"accuracy": 1.0}


def test_an_address_that_something_else_has_is_refused(stand_in):
    host, _, port = stand_in.removeprefix("http://").partition(":")
    with pytest.raises(UsageError):
        nemo_gym._require_relay(host, int(port))
    with pytest.raises(UsageError):
        pool_of(agent=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(UsageError):
        pool_of(agent=stand_in, kwargs={"name": "nobody"})
