"""Expand the words of a shell script: quotes, braces, variables, arithmetic and the output of commands, but no file names."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from fnmatch import translate as regex_of
from itertools import pairwise

from burnish.errors import UsageError
from burnish.translate.shell_arithmetic import evaluate_arithmetic
from burnish.translate.shell_variables import UndecidedError, Value, Variables

_PARAMETER = re.compile(r"[A-Za-z_]\w*|\d+|[@*#?$!-]")
_SIMPLE = re.compile(r"[A-Za-z_]\w*|\d|[@*#?$!-]")
_HOME = re.compile(r"(?:[A-Za-z_]\w*=)?~(?=/|$)")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a", "e": "\033"}
_SPECIAL = "*?["
_EXTENDED = re.compile(r"[@+?*!]\(")
_SPACES = " \t\n"


class Expander:
    """Expands words with the variables of a script. `run` returns what a text of commands prints."""

    def __init__(self, variables: Variables, run: Callable[[str], str]) -> None:
        self.variables = variables
        self._run = run

    def fields(self, word: str) -> list[str]:
        """Return the words that a word of a command becomes."""
        return [field for each in expand_braces(word) for field in self._fields(each)]

    def _fields(self, word: str) -> list[str]:
        output = _Fields(self.variables)
        self._scan(word, output)
        return output.done()

    def text(self, word: str) -> str:
        """Return a word as one text, as the value of a variable."""
        output = _Text()
        self._scan(word, output)
        return output.value

    def pattern(self, word: str) -> str:
        """Return a word as a pattern, in which `*`, `?` and `[` count where they are not quoted."""
        if _EXTENDED.search(word):
            raise self.refusal(word, "extended patterns are not read")
        output = _Pattern()
        self._scan(word, output)
        return output.value

    def refusal(self, word: str, reason: str) -> UsageError:
        """Return an error for a word that cannot be expanded."""
        return UsageError(
            f"{self.variables.script} has a word that cannot be read without running it",
            have=f"{word}: {reason}",
            do="give the arguments themselves",
        )

    def _scan(self, word: str, output: _Output) -> None:
        """Add a word's expansion to an output."""
        place = 0
        if home := _HOME.match(word):
            output.add(home[0][:-1] + self.value_of("HOME"), is_quoted=True)
            place = home.end()
        while place < len(word):
            letter = word[place]
            if letter == "\\":
                output.add(word[place + 1 : place + 2], is_quoted=True)
                place += 2
            elif letter == "'":
                end = word.index("'", place + 1)
                output.add(word[place + 1 : end], is_quoted=True)
                place = end + 1
            elif letter == '"':
                end = end_of_quotes(word, place)
                self._scan_quoted(word[place + 1 : end], output)
                place = end + 1
            elif word.startswith("$'", place):
                place = self._ansi(word, place + 2, output)
            elif letter in "$`":
                place = self._dollar(word, place, output, is_quoted=False)
            else:
                output.add_literal(letter)
                place += 1

    def _scan_quoted(self, text: str, output: _Output) -> None:
        output.add("", is_quoted="@" not in text or bool(re.sub(r"\$\{\w+\[@\].*\}|\$@", "", text)))
        place = 0
        while place < len(text):
            letter = text[place]
            if letter == "\\" and text[place + 1 : place + 2] in ("$", "`", '"', "\\", "\n"):
                output.add(text[place + 1].replace("\n", ""), is_quoted=True)
                place += 2
            elif letter in "$`":
                place = self._dollar(text, place, output, is_quoted=True)
            else:
                output.add(letter, is_quoted=True)
                place += 1

    def _ansi(self, word: str, place: int, output: _Output) -> int:
        while word[place] != "'":
            if word[place] == "\\":
                if word[place + 1] not in _ESCAPES:
                    raise self.refusal(word, "this escape is not read")
                output.add(_ESCAPES[word[place + 1]], is_quoted=True)
                place += 2
            else:
                output.add(word[place], is_quoted=True)
                place += 1
        output.add("", is_quoted=True)
        return place + 1

    def _dollar(self, text: str, place: int, output: _Output, *, is_quoted: bool) -> int:
        """Add what stands at `$` or a backquote; return the place after it."""
        if text[place] == "`":
            end = text.index("`", place + 1)
            output.add(self._run(re.sub(r"\\([\\$`])", r"\1", text[place + 1 : end])), is_quoted)
            return end + 1
        if (
            text.startswith("$((", place)
            and (end := _closing(text, place + 1))
            and text[end - 1] == ")"
        ):
            output.add(self._arithmetic(text[place + 3 : end - 1]), is_quoted)
            return end + 1
        if text.startswith("$(", place):
            end = _closing(text, place + 1)
            output.add(self._run(text[place + 2 : end]).rstrip("\n"), is_quoted)
            return end + 1
        if text.startswith("${", place):
            end = _closing(text, place + 1)
            self._parameter(text[place + 2 : end], output, is_quoted)
            return end + 1
        match = _SIMPLE.match(text, place + 1)
        if not match:
            output.add("$", is_quoted=True)
            return place + 1
        self._parameter(match[0], output, is_quoted)
        return match.end()

    def _arithmetic(self, text: str) -> str:
        """Return a value in digits, or a mark if only a run would tell it."""
        try:
            return str(evaluate_arithmetic(self.text(f'"{text}"'), self.variables))
        except UndecidedError as error:
            return self.variables.mark(str(error))

    def _parameter(self, inner: str, output: _Output, is_quoted: bool) -> None:
        """Add the expansion of `${inner}`."""
        if inner[0] == "#" and len(inner) > 1 and inner[1] not in "#%:-+=?":
            output.add(str(self._length(inner[1:])), is_quoted)
            return
        is_indirect = inner[0] == "!" and len(inner) > 1 and inner[1] not in ":-+=?#%"
        match = _PARAMETER.match(inner, int(is_indirect))
        if not match:
            raise self.refusal(f"${{{inner}}}", "this expansion is not read")
        name = match[0]
        rest = inner[match.end() :]
        subscript = ""
        if rest.startswith("["):
            end = _closing(rest, 0)
            subscript = rest[1:end]
            rest = rest[end + 1 :]
        if is_indirect:
            if subscript in ("@", "*"):
                value = self.variables.get(name)
                keys = list(value) if isinstance(value, dict) else range(len(self._items(name)))
                output.add_many([str(key) for key in keys], is_quoted and subscript == "@")
                return
            target = self.variables.known(self.value_of(name, subscript))
            name, _, subscript = target.partition("[")
            subscript = subscript.removesuffix("]")
        if name in ("@", "*") or subscript in ("@", "*"):
            self._all(name, name if name in "@*" else subscript, rest, output, is_quoted)
            return
        self._one(name, subscript, rest, output, is_quoted)

    def _one(self, name: str, subscript: str, rest: str, output: _Output, is_quoted: bool) -> None:
        value = self._found(name, subscript)
        operation = re.match(r":?[-=+?]", rest)
        if not operation:
            shown = self._unset(name) if value is None else value
            output.add(self._changed(shown, rest) if rest else shown, is_quoted)
            return
        sign = operation[0][-1]
        word = rest[operation.end() :]
        is_null = value is None or (":" in operation[0] and not self.variables.known(value))
        if sign == "+":
            if not is_null:
                self._word(word, output, is_quoted)
        elif not is_null:
            output.add(value or "", is_quoted)
        elif sign == "?":
            output.add(self._unset(name), is_quoted)
        elif sign == "=":
            self.assign(name, subscript, self._as_text(word, is_quoted))
            output.add(self.value_of(name, subscript), is_quoted)
        else:
            self._word(word, output, is_quoted)

    def _all(self, name: str, sign: str, rest: str, output: _Output, is_quoted: bool) -> None:
        """Add all items of an array, or all arguments of the script."""
        items = self._items(name)
        operation = re.match(r":?[-+]", rest)
        if operation:
            if bool(items) == (operation[0][-1] == "+"):
                self._word(rest[operation.end() :], output, is_quoted)
                return
        elif rest.startswith(":"):
            if name in ("@", "*"):
                items = [self.variables.script, *items]
            items = items[self._slice(rest[1:])]
        elif rest:
            items = [self._changed(item, rest) for item in items]
        if is_quoted and sign == "*":
            output.add(" ".join(items), is_quoted=True)
        else:
            output.add_many(items, is_quoted)

    def _word(self, word: str, output: _Output, is_quoted: bool) -> None:
        """Add the word of `${A:-word}`. In quotes, inner quotes only group."""
        if not is_quoted:
            self._scan(word, output)
            return
        self._scan_quoted(re.sub(r'(?<!\\)"', "", word), output)

    def _as_text(self, word: str, is_quoted: bool) -> str:
        output = _Text()
        self._word(word, output, is_quoted)
        return output.value

    def _length(self, inner: str) -> int:
        name, _, subscript = inner.removesuffix("]").partition("[")
        if subscript in ("@", "*") or name in ("@", "*"):
            return len(self._items(name))
        return len(self.variables.known(self.value_of(name, subscript)))

    def _slice(self, text: str) -> slice:
        numbers = [
            evaluate_arithmetic(self.text(f'"{each}"'), self.variables) for each in text.split(":")
        ]
        first = numbers[0]
        if len(numbers) == 1:
            return slice(first, None)
        return slice(first, numbers[1] if numbers[1] < 0 or first < 0 else first + numbers[1])

    def _changed(self, value: str, rest: str) -> str:
        """Return a value after an operation such as `%%pattern`, `/from/to`, `,,` or `:offset:length`."""
        value = self.variables.known(value)
        if rest[0] == ":":
            return value[self._slice(rest[1:])]
        if rest in (",,", "^^"):
            return value.lower() if rest == ",," else value.upper()
        if rest in (",", "^"):
            return (value[:1].lower() if rest == "," else value[:1].upper()) + value[1:]
        if rest[0] in "#%":
            is_longest = rest[:2] in ("##", "%%")
            pattern = re.compile(regex_of(self.pattern(rest[1 + is_longest :])))
            return _trimmed(value, pattern, from_start=rest[0] == "#", is_longest=is_longest)
        if rest[0] == "/":
            return self._replaced(value, rest)
        raise self.refusal(f"${{…{rest}}}", "this expansion is not read")

    def _replaced(self, value: str, rest: str) -> str:
        where = rest[1:2] if rest[1:2] in ("/", "#", "%") else ""
        parts = re.split(r"(?<!\\)/", rest[1 + len(where) :], maxsplit=1)
        regex = regex_of(self.pattern(parts[0])).removesuffix(r"\Z").removesuffix(r"\z")
        regex = {"#": rf"\A{regex}", "%": rf"{regex}\Z"}.get(where, regex)
        to = self.text(parts[1]) if len(parts) > 1 else ""
        return re.sub(regex, lambda _: to, value, count=0 if where == "/" else 1)

    def _items(self, name: str) -> list[str]:
        if name in ("@", "*"):
            return self.variables.positional
        value = self.variables.get(name)
        if isinstance(value, str):
            return [value]
        return list(value.values() if isinstance(value, dict) else value or [])

    def value_of(self, name: str, subscript: str = "") -> str:
        """Return the text of a variable, with a mark if nothing sets it."""
        found = self._found(name, subscript)
        return self._unset(name) if found is None else found

    def _unset(self, name: str) -> str:
        if name.isdigit():
            reason = f"argument {name} of the script is not given"
            return self.variables.mark(reason, is_unset=True, shown=f"${name}")
        reason = f"{name} is set neither in the script nor in the environment"
        return self.variables.mark(reason, is_unset=True, shown=f"${name}")

    def _found(self, name: str, subscript: str = "") -> str | None:
        variables = self.variables
        if name == "0":
            return variables.script
        if name.isdigit():
            place = int(name) - 1
            return variables.positional[place] if place < len(variables.positional) else None
        if name == "#":
            return str(len(variables.positional))
        if name in ("?", "$", "!", "-", "RANDOM", "SECONDS", "EPOCHSECONDS", "HOSTNAME", "LINENO"):
            return variables.mark(f"${name} is known only while the script runs")
        value = variables.get(name)
        if name == "BASH_SOURCE" and value is None:
            return variables.script
        if isinstance(value, dict):
            return value.get(self.text(subscript)) if subscript else None
        if isinstance(value, list) or subscript:
            items = value if isinstance(value, list) else [value] if value is not None else []
            place = evaluate_arithmetic(self.text(f'"{subscript}"'), variables)
            return items[place] if -len(items) <= place < len(items) else None
        return value

    def assign(self, name: str, subscript: str, value: Value, *, is_added: bool = False) -> None:
        """Set a variable, or an item of an array; `+=` adds to it."""
        old = self.variables.get(name)
        if subscript and isinstance(value, str):
            if isinstance(old, dict):
                key = self.text(subscript)
                self.variables.set(
                    name, {**old, key: (old.get(key, "") if is_added else "") + value}
                )
                return
            items = [old] if isinstance(old, str) else list(old or [])
            place = evaluate_arithmetic(self.text(f'"{subscript}"'), self.variables)
            if not -len(items) <= place <= len(items):
                raise self.refusal(f"{name}[{subscript}]", "arrays with gaps are not read")
            if place == len(items):
                items.append("")
            items[place] = (items[place] if is_added else "") + value
            self.variables.set(name, items)
        elif is_added and isinstance(old, list):
            added = value if isinstance(value, list) else []
            start = old if isinstance(value, list) else [(old or [""])[0] + str(value), *old[1:]]
            self.variables.set(name, [*start, *added])
        elif is_added and isinstance(old, dict) and isinstance(value, dict):
            self.variables.set(name, {**old, **value})
        elif is_added and isinstance(value, list):
            self.variables.set(name, [old, *value] if isinstance(old, str) else value)
        elif is_added and isinstance(value, str):
            self.variables.set(name, (old if isinstance(old, str) else "") + value)
        else:
            self.variables.set(name, value)


class _Output(ABC):
    """Collects an expansion."""

    @abstractmethod
    def add(self, text: str, is_quoted: bool) -> None:
        """Add text from quotes or from a variable."""

    def add_literal(self, text: str) -> None:
        """Add text that stands in the word without quotes."""
        self.add(text, is_quoted=True)

    def add_many(self, items: list[str], is_quoted: bool) -> None:
        """Add an array."""
        self.add(" ".join(items), is_quoted)


class _Text(_Output):
    def __init__(self) -> None:
        self.value = ""

    def add(self, text: str, is_quoted: bool) -> None:
        self.value += text


class _Pattern(_Text):
    def add(self, text: str, is_quoted: bool) -> None:
        escaped = "".join(f"[{each}]" if each in _SPECIAL else each for each in text)
        self.value += escaped if is_quoted else text

    def add_literal(self, text: str) -> None:
        self.value += text


class _Fields(_Output):
    """Splits what is not quoted at spaces."""

    def __init__(self, variables: Variables) -> None:
        self._variables = variables
        self._fields: list[str] = []
        self._current: str | None = None
        self._is_given = False
        """Whether the current field has more than variables that nothing sets."""

    def add(self, text: str, is_quoted: bool) -> None:
        parts = [text] if is_quoted else re.findall(rf"[{_SPACES}]+|[^{_SPACES}]+", text)
        for part in parts:
            if not is_quoted and part[0] in _SPACES:
                self._end()
                continue
            marks = self._variables.marks_in(part)
            is_unset = len(marks) == len(part) and all(mark.is_unset for mark in marks)
            self._is_given |= is_quoted or not is_unset
            self._current = (self._current or "") + part

    def add_many(self, items: list[str], is_quoted: bool) -> None:
        for place, item in enumerate(items):
            if place:
                self._end()
            self.add(item, is_quoted)

    def _end(self) -> None:
        if self._current is not None and self._is_given:
            self._fields.append(self._current)
        self._current = None
        self._is_given = False

    def done(self) -> list[str]:
        self._end()
        return self._fields


def _trimmed(value: str, pattern: re.Pattern[str], *, from_start: bool, is_longest: bool) -> str:
    places = range(len(value) + 1)
    for place in places if from_start != is_longest else reversed(places):
        part = value[:place] if from_start else value[place:]
        if pattern.fullmatch(part):
            return value[place:] if from_start else value[:place]
    return value


def end_of_quotes(text: str, place: int) -> int:
    """Return the place of the double quote that ends the one at `place`."""
    place += 1
    while text[place] != '"':
        if text[place] == "\\":
            place += 1
        elif text.startswith(("$(", "${"), place):
            place = _closing(text, place + 1)
        elif text[place] == "`":
            place = text.index("`", place + 1)
        place += 1
    return place


def end_of_brackets(text: str, place: int) -> int:
    """Return the place of the bracket that closes the one at `place`; 0 if there is none."""
    try:
        return _closing(text, place)
    except (IndexError, ValueError):
        return 0


def _closing(text: str, place: int) -> int:
    closing = {"(": ")", "{": "}", "[": "]"}[text[place]]
    opening = text[place]
    depth = 0
    while True:
        letter = text[place]
        if letter == "\\":
            place += 1
        elif letter == "'" and not (opening == "{" and text[:place].count('"') % 2):
            place = text.index("'", place + 1)
        elif letter == '"':
            place = end_of_quotes(text, place)
        elif text.startswith(("$(", "${"), place) and depth:
            place = _closing(text, place + 1)
        elif letter == opening and (opening == "(" or not depth):
            depth += 1
        elif letter == closing:
            depth -= 1
            if not depth:
                return place
        place += 1


def expand_braces(word: str) -> list[str]:
    """Return the words of `a{b,c}d` and `a{1..3}`; what is quoted or in `${}` stays."""
    place = 0
    while place < len(word):
        letter = word[place]
        if (end_of_part := _end_of_protected(word, place)) is not None:
            place = end_of_part
        elif letter == "{" and (parts := _brace_parts(word, place)):
            choices, end = parts
            tails = expand_braces(word[end + 1 :])
            return [
                word[:place] + inner + tail
                for choice in choices
                for inner in expand_braces(choice)
                for tail in tails
            ]
        place += 1
    return [word]


def _end_of_protected(word: str, place: int) -> int | None:
    """Return the last place of what is quoted, escaped or in `${}` or `$()` here; None if nothing is."""
    if word[place] == "\\":
        return place + 1
    if word[place] == "'":
        return word.index("'", place + 1)
    if word[place] == '"':
        return end_of_quotes(word, place)
    if word.startswith(("$(", "${"), place):
        return _closing(word, place + 1)
    return None


def _brace_parts(word: str, start: int) -> tuple[list[str], int] | None:
    """Return the choices of the brace at `start`, and the place of its end."""
    commas = [start]
    depth = 0
    place = start
    while place < len(word):
        letter = word[place]
        if (end_of_part := _end_of_protected(word, place)) is not None:
            place = end_of_part
        elif letter == "{":
            depth += 1
        elif letter == "," and depth == 1:
            commas.append(place)
        elif letter == "}":
            depth -= 1
            if not depth:
                break
        place += 1
    else:
        return None
    numbers = re.fullmatch(r"(-?\d+)\.\.(-?\d+)", word[start + 1 : place])
    if numbers and len(commas) == 1:
        first = int(numbers[1])
        last = int(numbers[2])
        step = 1 if first <= last else -1
        return [str(each) for each in range(first, last + step, step)][:10_000], place
    if len(commas) == 1:
        return None
    return [word[one + 1 : other] for one, other in pairwise([*commas, place])], place
