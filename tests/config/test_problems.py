from __future__ import annotations

from burnish.config.problems import Problem, refusal
from burnish.errors import MissingError, UsageError

FIRST = Problem("a is wrong", have="1", want="2", do="set a=2")
SECOND = Problem("b is wrong", have="3", want="4", do="set b=4")


def test_one_problem_is_an_error_of_its_own() -> None:
    error = refusal([FIRST], "x.yaml")
    assert isinstance(error, UsageError)
    assert str(error) == str(UsageError("a is wrong", have="1", want="2", do="set a=2"))


def test_several_are_numbered_under_a_headline() -> None:
    error = refusal([FIRST, SECOND], "x.yaml", MissingError)
    assert isinstance(error, MissingError)
    lines = str(error).splitlines()
    assert lines[0] == "2 problems in x.yaml"
    assert lines[1] == "1. a is wrong"
    assert lines[5] == "2. b is wrong"
    assert [line.split(maxsplit=1) for line in lines[6:]] == [
        ["have:", "3"],
        ["want:", "4"],
        ["do:", "set b=4"],
    ]
