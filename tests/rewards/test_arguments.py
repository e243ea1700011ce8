from __future__ import annotations

from burnish.rewards.arguments import arguments
from burnish.rewards.load import Signature

TRL = Signature("trl", None, frozenset())
VERL = Signature("verl", None, frozenset())


def test_trl_gets_lists_and_the_columns(make_rollout) -> None:
    rollouts = [
        make_rollout("3", columns={"answer": "3", "level": 1}),
        make_rollout("4", columns={"answer": "4", "prompt": "left out"}),
    ]
    assert arguments(TRL, {}, rollouts) == {
        "prompts": ["2+2=", "2+2="],
        "completions": ["3", "4"],
        "completion_ids": [[0, 1, 2], [0, 1, 2]],
        "answer": ["3", "4"],
        "level": [1, None],
    }


def test_trl_gets_messages_where_the_prompt_was_messages(make_rollout) -> None:
    messages = [{"role": "user", "content": "2+2="}]
    given = arguments(TRL, {}, [make_rollout("4", messages=messages)])
    assert given["prompts"] == [messages]
    assert given["completions"] == [[{"role": "assistant", "content": "4"}]]


def test_verl_gets_one_rollout(make_rollout) -> None:
    extra = {"split": "train"}
    rollout = make_rollout("5", "4", columns={"extra_info": extra})
    assert arguments(VERL, {}, [rollout]) == {
        "data_source": "sums",
        "solution_str": "5",
        "ground_truth": "4",
        "extra_info": extra,
    }
    plain = make_rollout("5", "4", columns={"answer": "4"})
    assert arguments(VERL, {}, [plain])["extra_info"] == {"answer": "4"}


def test_a_function_gets_what_it_names_and_kwargs_win(make_rollout) -> None:
    names = frozenset({"completions", "answer", "scale", "absent"})
    given = arguments(
        Signature("trl", names, frozenset()), {"scale": 2, "answer": "x"}, [make_rollout()]
    )
    assert given == {"completions": ["4"], "answer": "x", "scale": 2}
