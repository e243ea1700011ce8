"""Evaluate a shell's arithmetic: whole numbers of 64 bits, C's operators, and variables by name."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from burnish.errors import UsageError
from burnish.translate.shell_variables import Variables

_TOKEN = re.compile(
    r"\s*(0[xX][0-9a-fA-F]+|\d+#\w+|\d+|[A-Za-z_]\w*|\*\*|<<=|>>=|\+\+|--|&&|\|\||<<|>>|[-+*/%<>=!&|^]=|[-+*/%<>=!~&|^?:(),])"
)
_ASSIGNING = {"=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "|=", "^="}
_DEEPEST = 50
_MOST_BITS = 63


def _divided(one: int, other: int) -> int:
    quotient = abs(one) // abs(other)
    return quotient if (one < 0) == (other < 0) else -quotient


_BINARY: list[dict[str, Callable[[int, int], int]]] = [
    {"||": lambda one, other: int(bool(one or other))},
    {"&&": lambda one, other: int(bool(one and other))},
    {"|": operator.or_},
    {"^": operator.xor},
    {"&": operator.and_},
    {"==": lambda one, other: int(one == other), "!=": lambda one, other: int(one != other)},
    {
        "<": lambda one, other: int(one < other),
        ">": lambda one, other: int(one > other),
        "<=": lambda one, other: int(one <= other),
        ">=": lambda one, other: int(one >= other),
    },
    {
        "<<": lambda one, other: one << (other & _MOST_BITS),
        ">>": lambda one, other: one >> (other & _MOST_BITS),
    },
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": _divided, "%": lambda one, other: one - other * _divided(one, other)},
]
"""Operators from the loosest to the tightest."""


def evaluate_arithmetic(text: str, variables: Variables, depth: int = 0) -> int:
    """Return the value of an expression without `$`. Raises `UndecidedError`, and `UsageError` for what is none."""
    try:
        if depth > _DEEPEST:
            raise ValueError("it names itself")
        return _Expression(variables.known(text), variables, depth).value()
    except (ValueError, ZeroDivisionError, IndexError) as error:
        raise UsageError(
            f"{variables.script} has arithmetic that cannot be evaluated",
            have=f"$(({text.strip()})): {error}",
            want="whole numbers and variables that hold them",
            do="correct it, or give the arguments themselves",
        ) from None


class _Expression:
    """An expression in tokens, from which values are taken from left to right."""

    def __init__(self, text: str, variables: Variables, depth: int) -> None:
        self._variables = variables
        self._depth = depth
        self._tokens: list[str] = []
        place = 0
        text = text.strip()
        while place < len(text):
            match = _TOKEN.match(text, place)
            if not match:
                raise ValueError(f"{text[place:]!r} is no expression")
            self._tokens.append(match[1])
            place = match.end()
        self._skipped = 0
        """How many operands around this one do not count, as in `0 && x`."""

    def value(self) -> int:
        """Return the value of the whole."""
        if not self._tokens:
            return 0
        result = self._comma()
        if self._tokens:
            raise ValueError(f"{self._tokens[0]!r} is one too many")
        return result

    def _peek(self, place: int = 0) -> str:
        return self._tokens[place] if place < len(self._tokens) else ""

    def _comma(self) -> int:
        result = self._assignment()
        while self._peek() == ",":
            self._tokens.pop(0)
            result = self._assignment()
        return result

    def _assignment(self) -> int:
        name = self._peek()
        sign = self._peek(1)
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or sign not in _ASSIGNING:
            return self._choice()
        del self._tokens[:2]
        value = self._assignment()
        if sign != "=":
            combine = next(row[sign[:-1]] for row in _BINARY if sign[:-1] in row)
            value = combine(self._of(name), value)
        return self._set(name, value)

    def _choice(self) -> int:
        condition = self._binary(0)
        if self._peek() != "?":
            return condition
        self._tokens.pop(0)
        first = self._unless(not condition, self._comma)
        if self._tokens.pop(0) != ":":
            raise ValueError("a ':' is missing")
        second = self._unless(bool(condition), self._choice)
        return first if condition else second

    def _unless(self, skipped: bool, operand: Callable[[], int]) -> int:
        self._skipped += skipped
        result = operand()
        self._skipped -= skipped
        return result

    def _binary(self, level: int) -> int:
        if level == len(_BINARY):
            return self._power()
        result = self._binary(level + 1)
        while (sign := self._peek()) in _BINARY[level]:
            self._tokens.pop(0)
            skipped = (sign == "&&" and not result) or (sign == "||" and bool(result))
            other = self._unless(skipped, lambda: self._binary(level + 1))
            if self._skipped and sign in "/%":
                other = other or 1
            result = _wrapped(_BINARY[level][sign](result, other))
        return result

    def _power(self) -> int:
        base = self._unary()
        if self._peek() != "**":
            return base
        self._tokens.pop(0)
        exponent = self._power()
        if exponent < 0:
            raise ValueError("an exponent is negative")
        return _wrapped(pow(base, exponent, 1 << (_MOST_BITS + 1)))

    def _unary(self) -> int:
        sign = self._peek()
        if sign in ("++", "--"):
            self._tokens.pop(0)
            name = self._tokens.pop(0)
            return self._set(name, self._of(name) + (1 if sign == "++" else -1))
        if sign in ("+", "-", "!", "~"):
            self._tokens.pop(0)
            value = self._unary()
            return {"+": value, "-": -value, "!": int(not value), "~": ~value}[sign]
        return self._operand()

    def _operand(self) -> int:
        token = self._tokens.pop(0)
        if token == "(":
            result = self._comma()
            if self._tokens.pop(0) != ")":
                raise ValueError("a ')' is missing")
            return result
        if re.match(r"[A-Za-z_]", token):
            value = self._of(token)
            if (sign := self._peek()) in ("++", "--"):
                self._tokens.pop(0)
                self._set(token, value + (1 if sign == "++" else -1))
            return value
        if "#" in token:
            base, _, digits = token.partition("#")
            return int(digits, int(base))
        if token[:1] == "0" and token.isdigit():
            return int(token, 8)
        return int(token, 0)

    def _of(self, name: str) -> int:
        value = self._variables.get(name)
        if isinstance(value, list):
            value = value[0] if value else ""
        if not isinstance(value, str):
            return 0
        return evaluate_arithmetic(value, self._variables, self._depth + 1)

    def _set(self, name: str, value: int) -> int:
        value = _wrapped(value)
        if not self._skipped:
            self._variables.set(name, str(value))
        return value


def _wrapped(value: int) -> int:
    """Return a number as 64 bits hold it."""
    half = 1 << _MOST_BITS
    return (value + half) % (2 * half) - half
