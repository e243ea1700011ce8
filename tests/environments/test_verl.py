"""Tools of verl, with its own classes. verl as a whole needs older packages than ours, so its root is not imported."""

from __future__ import annotations

import asyncio
import sys
from importlib.util import find_spec
from types import ModuleType

import pytest
from environments.played import play, pool_of

from burnish.environments.verl import VerlTools
from burnish.errors import MissingError, UsageError

FOUND = find_spec("verl")
needs_package = pytest.mark.skipif(FOUND is None, reason="make nightly-environments installs verl")
pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]  # of the package's own
TOOL = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class Gsm8kTool(BaseTool):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.kept = {}

    async def create(self, instance_id=None, **kwargs):
        instance_id, response = await super().create(instance_id)
        self.kept[instance_id] = {"truth": kwargs["create_kwargs"]["ground_truth"], "answer": ""}
        return instance_id, response

    async def execute(self, instance_id, parameters, **kwargs):
        kept = self.kept[instance_id]
        reward = 0.0 if parameters["answer"] != kept["answer"] else -0.05
        kept["answer"] = parameters["answer"]
        right = await self.calc_reward(instance_id)
        return ToolResponse(text=f"Current parsed answer: {kept['answer']}"), reward, {"right": right}

    async def calc_reward(self, instance_id, **kwargs):
        kept = self.kept[instance_id]
        return float(kept["answer"] == kept["truth"])

    async def release(self, instance_id, **kwargs):
        del self.kept[instance_id]
"""
FUNCTIONS = '''
import asyncio

from verl.tools.function_tool import function_tool


@function_tool
def weather(city: str) -> dict:
    """Get the weather.

    Args:
        city: The city.
    """
    return {"city": city, "sky": "blue"}


@function_tool("look")
async def looked(at: str) -> tuple:
    """Look at something.

    Args:
        at: At what.
    """
    await asyncio.sleep(0)
    return f"You see {at}.", 0.5, {"looks": 1}
'''
CONFIG = """
tools:
  - class_name: {module}.Gsm8kTool
    config: {{type: native}}
    tool_schema:
      type: function
      function:
        name: calc_gsm8k_reward
        description: Check an answer.
        parameters:
          type: object
          properties: {{answer: {{type: string, description: The answer.}}}}
          required: [answer]
"""


@pytest.fixture
def _without_root(monkeypatch):
    """Let verl's tools be imported without what its root imports: Ray and tensordict."""
    (folder,) = FOUND.submodule_search_locations
    for name in ("verl", "verl.utils"):
        module = ModuleType(name)
        module.__path__ = [folder if name == "verl" else f"{folder}/utils"]
        monkeypatch.setitem(sys.modules, name, module)
    trace = ModuleType("verl.utils.rollout_trace")
    trace.rollout_trace_op = lambda function: function
    monkeypatch.setitem(sys.modules, trace.__name__, trace)


@pytest.fixture
def files(tmp_path, monkeypatch, _without_root):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "burnish_test_gsm8k_tool.py").write_text(TOOL)
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "tools.yaml").write_text(CONFIG.format(module="burnish_test_gsm8k_tool"))
    return [str(tmp_path / "tools.yaml"), str(tmp_path / "functions.py")]


@needs_package
def test_tools_are_verls(files):
    row = {
        "extra_info": {
            "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "12"}}}
        }
    }
    script = [
        [("calc_gsm8k_reward", {"answer": "11"})],
        [("calc_gsm8k_reward", {"answer": "11"}), ("look", {"at": "it"})],
        [("calc_gsm8k_reward", {"answer": "12"}), ("weather", {"city": "Oslo"})],
        [("calc_gsm8k_reward", {}), ("fly", {})],
        "It is 12.",
    ]
    with pool_of(verl=files) as pool:
        names = [tool["function"]["name"] for tool in pool.described.tools]
        assert names == ["calc_gsm8k_reward", "look", "weather"]
    played = play(row, script, verl=files)
    assert played.texts[:5] == [
        "Current parsed answer: 11",
        "Current parsed answer: 11",
        "You see it.",
        "Current parsed answer: 12",
        '{"city": "Oslo", "sky": "blue"}',
    ]
    assert "answer" in played.texts[5]
    assert "fly" in played.texts[6]
    assert played.turns[1].rewards == {"calc_gsm8k_reward": -0.05, "look": 0.5}
    assert played.turns[1].metrics == {"right": 0.0, "looks": 1.0}
    assert played.turns[2].metrics == {"right": 1.0}
    assert played.rewards == {"calc_gsm8k_reward/final": 1.0}
    import burnish_test_gsm8k_tool as module

    assert module.Gsm8kTool  # the file as it was written


@needs_package
def test_calls_at_the_same_time_share_an_instance(files):
    tools = VerlTools(files[0])
    tools.begin(
        {"tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1"}}}}, 0
    )

    async def twice():
        asked = [tools.use("calc_gsm8k_reward", {"answer": text}) for text in "12"]
        return await asyncio.gather(*asked)

    assert len(asyncio.run(twice())) == 2
    (kept,) = tools._tools["calc_gsm8k_reward"].kept.values()
    assert kept == {"truth": "1", "answer": "2"}
    asyncio.run(tools.close())
    assert tools._tools["calc_gsm8k_reward"].kept == {}


@needs_package
@pytest.mark.parametrize("text", ["tools: [{class_name: nothing.Here}]", "x = 1", None])
def test_files_without_tools_are_refused(files, tmp_path, text):
    file = tmp_path / ("other.py" if text == "x = 1" else "other.yaml")
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError):
        list(VerlTools.schemas(str(file)))


@pytest.mark.skipif(FOUND is not None, reason="it is installed")
def test_without_the_package_it_is_named(tmp_path):
    (tmp_path / "tools.yaml").write_text("tools: []")
    with pytest.raises(MissingError, match="verl"):
        list(VerlTools.schemas(str(tmp_path / "tools.yaml")))
