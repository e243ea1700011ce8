"""Evaluate the conditions of a shell script: `[ … ]`, `test` and `[[ … ]]`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import translate as regex_of

from burnish.translate.shell_arithmetic import evaluate_arithmetic
from burnish.translate.shell_expansion import Expander
from burnish.translate.shell_variables import UndecidedError

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda one, other: one == other,
    "-ne": lambda one, other: one != other,
    "-lt": lambda one, other: one < other,
    "-le": lambda one, other: one <= other,
    "-gt": lambda one, other: one > other,
    "-ge": lambda one, other: one >= other,
}
_TEXTS = ("=", "==", "!=", "<", ">", "=~")
_OF_FILES = re.compile(r"-[abcdefghkprstuwxGLNOS]")


def holds(words: Sequence[str], expander: Expander, *, is_pattern: bool) -> bool:
    """Return whether a condition holds. With `is_pattern` words are raw, as in `[[`; else they are expanded already.

    Raises `UndecidedError` if only a run would tell.
    """
    condition = _Condition(words, expander, is_pattern)
    result = condition.either()
    if condition.words:
        raise ValueError(f"{condition.words[0]!r} is one too many")
    return result


class _Condition:
    def __init__(self, words: Sequence[str], expander: Expander, is_pattern: bool) -> None:
        self.words = [*words]
        self._expander = expander
        self._is_pattern = is_pattern
        self._skipped = False
        self._or = ("||",) if is_pattern else ("-o",)
        self._and = ("&&",) if is_pattern else ("-a",)

    def either(self) -> bool:
        result = self._both()
        while self.words and self.words[0] in self._or:
            self.words.pop(0)
            result = self._unless(result, self._both) or result
        return result

    def _both(self) -> bool:
        result = self._not()
        while self.words and self.words[0] in self._and:
            self.words.pop(0)
            result = self._unless(not result, self._not) and result
        return result

    def _unless(self, skipped: bool, operand: Callable[[], bool]) -> bool:
        before = self._skipped
        self._skipped = before or skipped
        result = operand()
        self._skipped = before
        return result

    def _not(self) -> bool:
        if self.words[:1] == ["!"] and len(self.words) > 1:
            self.words.pop(0)
            return not self._not()
        if self.words[:1] == ["("] and len(self.words) > 2:
            self.words.pop(0)
            result = self.either()
            self.words.pop(0)
            return result
        return self._primary()

    def _primary(self) -> bool:
        words = self.words
        if len(words) > 2 and (words[1] in _NUMBERS or words[1] in _TEXTS):
            left, sign, right = words[:3]
            del words[:3]
            return self._skipped or self._compares(left, sign, right)
        if (
            len(words) > 1
            and re.fullmatch(r"-[a-zA-Z]", words[0])
            and words[1] not in (*self._or, *self._and)
        ):
            sign, word = words[:2]
            del words[:2]
            return self._skipped or self._tests(sign, word)
        word = words.pop(0) if words else ""
        return self._skipped or bool(self._known(word))

    def _known(self, word: str) -> str:
        text = self._expander.text(word) if self._is_pattern else word
        return self._expander.variables.known(text)

    def _tests(self, sign: str, word: str) -> bool:
        if sign in ("-n", "-z"):
            return bool(self._known(word)) == (sign == "-n")
        if sign == "-v":
            return self._expander.variables.get(word) is not None
        if _OF_FILES.fullmatch(sign):
            raise UndecidedError(f"it asks for the file {word}")
        raise UndecidedError(f"{sign} is not read")

    def _compares(self, left: str, sign: str, right: str) -> bool:
        one = self._known(left)
        if sign in _NUMBERS:
            return _NUMBERS[sign](self._number(one), self._number(self._known(right)))
        if sign in ("<", ">"):
            other = self._known(right)
            return one < other if sign == "<" else one > other
        if sign == "=~":
            return bool(re.search(self._known(right), one))
        if not self._is_pattern:
            return (one == self._known(right)) == (sign != "!=")
        pattern = self._expander.variables.known(self._expander.pattern(right))
        return bool(re.fullmatch(regex_of(pattern), one)) == (sign != "!=")

    def _number(self, text: str) -> int:
        if self._is_pattern:
            return evaluate_arithmetic(text, self._expander.variables)
        return int(text)
