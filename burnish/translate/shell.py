"""Read a shell script as the shell would, without running it: which programs it starts, with which words.

Nothing is executed. Variables, arrays, arithmetic, branches, loops and functions are evaluated. What only a run would tell, such as
the output of a program, is unknown. Both branches of an unknown condition are read, and variables that differ are unknown, too.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from burnish.errors import UsageError
from burnish.translate.shell_arithmetic import evaluate_arithmetic
from burnish.translate.shell_conditions import holds
from burnish.translate.shell_expansion import Expander, end_of_brackets
from burnish.translate.shell_variables import UndecidedError, Value, Variables

_EXPANSION = re.compile(r"(?<!\\)\$(\{|\(\(|[A-Za-z_]\w*|[\d@*#?!$-])")
_HIDDEN = re.compile(r"\$\{_hidden_(\d+)_\}")
_PARTS_OF_CONDITIONS = (
    "test_command",
    "binary_expression",
    "unary_expression",
    "parenthesized_expression",
    "negated_command",
)
_NO_CONDITION = 2
"""The status of a condition that is none."""
_MOST_STEPS = 100_000
_DEEPEST = 40
_STATEMENTS = {
    "c_style_for_statement",
    "case_statement",
    "command",
    "compound_statement",
    "declaration_command",
    "do_group",
    "for_statement",
    "function_definition",
    "if_statement",
    "list",
    "negated_command",
    "pipeline",
    "redirected_statement",
    "subshell",
    "test_command",
    "unset_command",
    "variable_assignment",
    "variable_assignments",
    "while_statement",
}
_WRAPPERS = {"builtin", "command", "exec", "nohup", "time"}
"""Commands that only start the command that they are given."""
_SILENT = {
    ":",
    "mkdir",
    "sleep",
    "true",
    "trap",
    "ulimit",
    "shopt",
    "wait",
    "rm",
    "chmod",
    "umask",
}
"""Commands that are taken to succeed, and print nothing."""


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """A program that the script starts."""

    words: tuple[str, ...]
    """A character of the private use area in a word stands for something unknown; see `Script.variables`."""
    line: int
    doubt: str = ""
    """Why only a run would tell whether it is started."""


class _LeftError(Exception):
    """`break`, `continue`, `return` or `exit`."""

    def __init__(self, word: str, status: int | None, levels: int = 1) -> None:
        self.word = word
        self.status = status
        self.levels = levels


@dataclass(slots=True)
class _Common:
    """What all subshells of a script share."""

    functions: dict[str, Node] = field(default_factory=dict)
    hidden: list[str] = field(default_factory=list)
    """Expansions that the parser does not see."""
    steps: int = 0
    ended: int = 0
    """Line of the `exit` that ended the script, or 0."""


@dataclass(slots=True)
class Script:
    """A shell script, or a subshell or branch of it."""

    variables: Variables
    commands: list[ShellCommand] = field(default_factory=list)
    """In the order of their starts."""
    output: str = ""
    options: set[str] = field(default_factory=set)
    common: _Common = field(default_factory=_Common)
    line: int = 1
    depth: int = 0
    reason: str = ""
    """Why the last status is unknown."""
    is_condition: bool = False
    input: str | None = None
    """What `<<` or `<<<` gives the command to read."""

    @property
    def ended_at(self) -> int:
        """Line of the `exit` that ended the script; 0 if its end was reached."""
        return self.common.ended

    def read(self, text: str) -> None:
        """Evaluate a whole script. Raises `UsageError`."""
        try:
            self._run_text(text)
        except _LeftError as left:
            self.common.ended = self.line if left.word == "exit" else 0
        except UndecidedError as error:
            raise self._refusal(str(error)) from None
        except (IndexError, ValueError, RecursionError):
            raise self._refusal("it does not follow the shell's grammar") from None

    def _refusal(self, reason: str, node: Node | None = None) -> UsageError:
        line = self.line if node is None else node.start_point[0] + 1
        return UsageError(
            f"{self.variables.script}:{line} cannot be read without running it",
            have=reason,
            want="a line whose result follows from the script and the environment",
            do="set its variables in the environment, or give the arguments of the program themselves",
        )

    def _run_text(self, text: str) -> int | None:
        parser = Parser(Language(tree_sitter_bash.language()))
        tree = parser.parse(self._without_expansions(text).encode())
        if tree.root_node.has_error:
            raise self._refusal(
                "it does not follow the shell's grammar", _first_error(tree.root_node)
            )
        return self._all(tree.root_node.children)

    def _without_expansions(self, text: str) -> str:
        """Return a text with a plain name for each expansion, because the parser does not know all kinds."""
        text = re.sub(r"`#[^`\n]*`", "", text)  # a remark between two lines of a command
        text = re.sub(r"(?<=[^\s\\])\\\n(?=\S)", "", text)  # a word in two lines
        text = re.sub(r"\\\s*\Z", "", text)
        parts: list[str] = []
        place = 0
        for match in _EXPANSION.finditer(text):
            if match.start() < place:
                continue
            end = match.end() - 1
            if match[1] in ("{", "(("):
                end = end_of_brackets(text, match.start() + 1)
            inner = text[match.start() : end + 1]
            if inner and "\n" not in inner and (match[1] != "((" or inner.endswith("))")):
                parts += [text[place : match.start()], f"${{_hidden_{len(self.common.hidden)}_}}"]
                self.common.hidden.append(inner)
                place = end + 1
        return "".join([*parts, text[place:], "\n"])

    def _substitute(self, text: str) -> str:
        """Return what commands print."""
        inner = self._fork()
        inner.depth += 1
        if inner.depth > _DEEPEST:
            raise self._refusal("commands are nested too deeply")
        with contextlib.suppress(_LeftError):
            inner._run_text(text)
        return inner.output

    def _fork(self) -> Script:
        return replace(
            self, variables=self.variables.copy(), output="", commands=[], options={*self.options}
        )

    @property
    def _words(self) -> Expander:
        return Expander(self.variables, self._substitute)

    def _all(self, nodes: Sequence[Node]) -> int | None:
        status: int | None = 0
        for node in nodes:
            if node.type in _STATEMENTS:
                status = self._one(node)
                can_fail = node.type in ("command", "test_command", "subshell", "pipeline")
                if status and can_fail and "e" in self.options and not self.is_condition:
                    raise _LeftError("exit", status)
            elif node.type == "((":
                return self._is_nonzero(self._inside(node.parent))
        return status

    def _one(self, node: Node) -> int | None:
        """Evaluate a statement; return its status, or None if only a run would tell."""
        if self.depth == 0:
            self.line = node.start_point[0] + 1
        self.common.steps += 1
        if self.common.steps > _MOST_STEPS:
            raise self._refusal("its loops do not end")
        run: Callable[[Node], int | None] = getattr(self, f"_{node.type}")
        return run(node)

    def _text(self, node: Node) -> str:
        """Return what stands in the script at a node."""
        text = (node.text or b"").decode().replace("\\\n", "")
        return _HIDDEN.sub(lambda match: self.common.hidden[int(match[1])], text)

    def _leaves(self, node: Node) -> Iterator[str]:
        """Yield the operators and words of a condition."""
        for child in node.children:
            if child.type in _PARTS_OF_CONDITIONS:
                yield from self._leaves(child)
            else:
                yield self._text(child)

    def _inside(self, node: Node | None) -> str:
        """Return what stands between `((` and `))`."""
        text = "" if node is None else self._text(node)
        return text[text.index("((") + 2 : text.rindex("))")]

    def _arithmetic(self, text: str) -> int:
        """Return the value of what stands between `((` and `))`."""
        return evaluate_arithmetic(self._words.text(f'"{text}"'), self.variables)

    def _variable_assignment(self, node: Node) -> int | None:
        target = node.child_by_field_name("name")
        value = node.child_by_field_name("value")
        assert target is not None
        name, _, subscript = self._text(target).removesuffix("]").partition("[")
        is_added = any(child.type == "+=" for child in node.children)
        self._words.assign(name, subscript, self._value(name, value), is_added=is_added)
        return 0

    def _value(self, name: str, node: Node | None) -> Value:
        if node is None:
            return ""
        if node.type != "array":
            return self._words.text(self._text(node))
        words = [self._text(child) for child in node.named_children if child.type != "comment"]
        keyed = [re.fullmatch(r"\[(.*?)\]=(.*)", word, re.S) for word in words]
        if isinstance(self.variables.get(name), dict):
            return {self._words.text(each[1]): self._words.text(each[2]) for each in keyed if each}
        if any(keyed):
            raise self._refusal("arrays with gaps are not read", node)
        return [item for word in words for item in self._words.fields(word)]

    def _variable_assignments(self, node: Node) -> int | None:
        return self._all(node.named_children)

    def _declaration_command(self, node: Node) -> int | None:
        flags = "".join(self._text(child) for child in node.named_children if child.type == "word")
        for child in node.named_children:
            if child.type == "variable_assignment":
                name = self._text(child.named_children[0])
                if "A" in flags and name not in self.variables.values:
                    self.variables.set(name, {})
                self._variable_assignment(child)
            elif child.type == "variable_name" and flags:
                new: Value | None = {} if "A" in flags else [] if "a" in flags else None
                if new is not None:
                    self.variables.set(self._text(child), new)
        return 0

    def _unset_command(self, node: Node) -> int | None:
        for child in node.named_children:
            for name in self._words.fields(self._text(child)):
                self.variables.unset(name)
        return 0

    def _function_definition(self, node: Node) -> int | None:
        name = node.child_by_field_name("name")
        body = node.child_by_field_name("body")
        assert name is not None
        assert body is not None
        self.common.functions[self._text(name)] = body
        return 0

    def _compound_statement(self, node: Node) -> int | None:
        return self._all(node.children)

    _do_group = _compound_statement

    def _subshell(self, node: Node) -> int | None:
        inner = self._fork()
        try:
            status = inner._all(node.children)
        except _LeftError as left:
            status = left.status
        self.commands += inner.commands
        self.output += inner.output
        self.reason = inner.reason
        return status

    def _pipeline(self, node: Node) -> int | None:
        status: int | None = 0
        for part in [child for child in node.children if child.type in _STATEMENTS]:
            inner = self._fork()
            try:
                status = inner._one(part)
            except _LeftError as left:
                status = left.status
            self.commands += inner.commands
            last = inner
        self.output += last.output
        self.reason = last.reason
        return status

    def _negated_command(self, node: Node) -> int | None:
        status = self._condition(node.named_children)
        return None if status is None else int(not status)

    def _list(self, node: Node) -> int | None:
        first, second = (child for child in node.children if child.type in _STATEMENTS)
        is_and = any(child.type == "&&" for child in node.children)
        status = self._condition([first])
        if status is not None:
            return self._one(second) if (status == 0) == is_and else status
        return self._either(
            lambda branch: branch._one(second) if is_and else 0,
            lambda branch: 1 if is_and else branch._one(second),
            is_doubtful=False,
        )

    def _condition(self, nodes: Sequence[Node]) -> int | None:
        before = self.is_condition
        self.is_condition = True
        status = self._all(nodes)
        self.is_condition = before
        return status

    def _either(
        self,
        one: Callable[[Script], int | None],
        other: Callable[[Script], int | None],
        *,
        is_doubtful: bool,
    ) -> int | None:
        """Read two branches, of which only a run would tell which is taken. A branch that ends the script is not."""
        reason = self.reason
        branches: list[Script] = []
        left: list[_LeftError] = []
        for read in (one, other):
            branch = self._fork()
            try:
                read(branch)
                branches.append(branch)
            except _LeftError as error:
                left.append(error)
        if not branches:
            raise left[0]
        # What an unknown program decides by its success is taken to succeed.
        read_branches = branches[:1] if not is_doubtful else branches
        doubt = reason if len(branches) == 2 and is_doubtful else ""
        for branch in read_branches:
            self.commands += [replace(each, doubt=each.doubt or doubt) for each in branch.commands]
        if branches[0].output == branches[-1].output:
            self.output += branches[0].output
        else:
            self.output += self.variables.mark(reason)
        self.variables.merge(branches[0].variables, branches[-1].variables, reason)
        self.reason = reason
        return None

    def _if_statement(self, node: Node) -> int | None:
        return self._branches(_clauses(node))

    def _branches(self, clauses: list[tuple[list[Node], list[Node]]]) -> int | None:
        """Evaluate conditions and their bodies, until one holds."""
        if not clauses:
            return 0
        (condition, body), *others = clauses
        status = self._condition(condition) if condition else 0
        if status is None:
            return self._either(
                lambda branch: branch._all(body),
                lambda branch: branch._branches(others),
                is_doubtful=True,
            )
        return self._all(body) if status == 0 else self._branches(others)

    def _case_statement(self, node: Node) -> int | None:
        subject = node.child_by_field_name("value")
        assert subject is not None
        text = self.variables.known(self._words.text(self._text(subject)))
        falls = False
        status: int | None = 0
        for item in node.named_children:
            if item.type != "case_item":
                continue
            patterns = [
                child
                for place, child in enumerate(item.children)
                if item.field_name_for_child(place) == "value"
            ]
            if falls or any(self._matches(text, self._text(each)) for each in patterns):
                status = self._all([child for child in item.children if child not in patterns])
                ending = self._text(item.children[-1])
                if ending not in (";&", ";;&"):
                    return status
                falls = ending == ";&"
        return status

    def _matches(self, text: str, word: str) -> bool:
        return holds([text, "==", word], self._words, is_pattern=True)

    def _for_statement(self, node: Node) -> int | None:
        variable = node.child_by_field_name("variable")
        body = node.child_by_field_name("body")
        assert variable is not None
        assert body is not None
        words = [
            self._text(child)
            for place, child in enumerate(node.children)
            if node.field_name_for_child(place) == "value"
        ]
        has_list = any(child.type == "in" for child in node.children)
        items = (
            [item for word in words for item in self._words.fields(word)]
            if has_list
            else self.variables.positional
        )

        def turns() -> Iterator[bool]:
            for item in items:
                self.variables.set(self._text(variable), item)
                yield True

        return self._loop(turns(), body)

    def _c_style_for_statement(self, node: Node) -> int | None:
        body = node.child_by_field_name("body")
        assert body is not None
        parts = self._inside(node).split(";")

        value = self._arithmetic

        def turns() -> Iterator[bool]:
            value(parts[0])
            while not parts[1].strip() or value(parts[1]):
                yield True
                value(parts[2])

        return self._loop(turns(), body)

    def _while_statement(self, node: Node) -> int | None:
        body = node.child_by_field_name("body")
        assert body is not None
        condition = [
            child
            for place, child in enumerate(node.children)
            if node.field_name_for_child(place) == "condition"
        ]
        is_until = node.children[0].type == "until"

        def turns() -> Iterator[bool]:
            while True:
                status = self._condition(condition)
                if status is None:
                    yield False
                    return
                if (status == 0) == is_until:
                    return
                yield True

        return self._loop(turns(), body)

    def _loop(self, turns: Iterator[bool], body: Node) -> int | None:
        status: int | None = 0
        for is_known in turns:
            if not is_known:
                return self._either(
                    lambda branch: 0, lambda branch: branch._one(body), is_doubtful=True
                )
            try:
                status = self._one(body)
            except _LeftError as left:
                if left.word not in ("break", "continue"):
                    raise
                if left.levels > 1:
                    raise _LeftError(left.word, left.status, left.levels - 1) from None
                if left.word == "break":
                    break
        return status

    def _redirected_statement(self, node: Node) -> int | None:
        body = node.child_by_field_name("body")
        before = self.output
        redirects = [child for child in node.children if child.type.endswith("_redirect")]
        self.input = self._given(redirects)
        status = self._one(body) if body is not None and body.type in _STATEMENTS else 0
        self.input = None
        if any(_is_elsewhere(each) for each in redirects):
            self.output = before
        for each in redirects:
            if each.type == "heredoc_redirect":
                self._all([child for child in each.named_children if child.type in _STATEMENTS])
        return status

    def _given(self, redirects: Sequence[Node]) -> str | None:
        """Return the text that a redirection gives a command, or None."""
        for redirect in redirects:
            parts = {child.type: self._text(child) for child in redirect.children}
            if redirect.type == "herestring_redirect":
                return self._words.text(self._text(redirect).removeprefix("<<<").strip())
            if redirect.type == "heredoc_redirect":
                body = parts.get("heredoc_body", "")
                if "<<-" in parts:
                    body = re.sub(r"^\t+", "", body, flags=re.M)
                if re.search(r"[\\'\"]", parts["heredoc_start"]):
                    return body
                return self._words.text('"' + re.sub(r'\\?"', _escaped, body) + '"')
        return None

    def _test_command(self, node: Node) -> int | None:
        words = list(self._leaves(node))[1:-1]
        if node.children[0].type == "((":
            return self._is_nonzero(self._inside(node))
        is_pattern = node.children[0].type == "[["
        if not is_pattern:
            words = [field for word in words for field in self._words.fields(word)]
        return self._asked(
            lambda: holds(words, self._words, is_pattern=is_pattern), self._text(node)
        )

    def _asked(self, question: Callable[[], bool], text: str) -> int | None:
        """Return the status of a condition, or None if only a run would tell."""
        try:
            return int(not question())
        except UndecidedError as error:
            self.reason = f"{' '.join(text.split())} on line {self.line}: {error}"
            return None
        except ValueError:  # too many words, or no number: the shell complains and goes on
            return _NO_CONDITION

    def _is_nonzero(self, text: str) -> int | None:
        """Return the status of `((text))`."""
        return self._asked(lambda: bool(self._arithmetic(text)), text)

    def _command(self, node: Node) -> int | None:
        words: list[str] = []
        for child in node.named_children:
            if child.type == "variable_assignment" or child.type.endswith("_redirect"):
                continue
            words += self._words.fields(self._text(child))
        if not words:
            return self._all(
                [child for child in node.named_children if child.type == "variable_assignment"]
            )
        given = self._given([each for each in node.children if each.type.endswith("_redirect")])
        self.input = self.input if given is None else given
        if node.parent is not None and any(
            _is_elsewhere(child)
            for child in node.named_children
            if child.type.endswith("_redirect")
        ):
            before = self.output
            status = self._start(words, node)
            self.output = before
            return status
        return self._start(words, node)

    def _start(self, words: list[str], node: Node) -> int | None:
        while words and words[0] in _WRAPPERS:
            words = words[1:]
        if not words:
            return 0
        name = words[0]
        arguments = words[1:]
        if name in self.common.functions:
            return self._call(self.common.functions[name], arguments)
        run: Callable[[list[str]], int | None] | None = (
            getattr(self, f"_do_{name}", None) if name.isalpha() else None
        )
        if name in (".", "source"):
            return self._do_source(arguments)
        if name in ("test", "["):
            question = arguments[:-1] if name == "[" else arguments
            return self._asked(
                lambda: holds(question, self._words, is_pattern=False), " ".join(words)
            )
        if run is not None:
            return run(arguments)
        if name in _SILENT:
            return 0
        if name == "false":
            return 1
        return self._start_program(words, node)

    def _start_program(self, words: list[str], node: Node) -> int | None:
        inner = _script_inside(words)
        if inner is not None:
            nested = self._fork()
            nested.depth += 1
            if nested.depth > _DEEPEST:
                raise self._refusal("commands are nested too deeply")
            with contextlib.suppress(_LeftError):
                nested._run_text(inner)
            self.commands += nested.commands
            self.output += nested.output
            return 0
        if (module := _imported(words)) is not None:
            return int(find_spec(module) is None)
        self.commands.append(
            ShellCommand(tuple(words), node.start_point[0] + 1 if self.depth == 0 else self.line)
        )
        self.reason = f"{' '.join(words)[:60]} on line {self.line} would have to run"
        self.output += self.variables.mark(self.reason)
        return None

    def _call(self, body: Node, arguments: list[str]) -> int | None:
        before = self.variables.positional
        self.variables.positional = arguments
        self.depth += 1
        if self.depth > _DEEPEST:
            raise self._refusal("functions call each other too deeply")
        try:
            return self._one(body)
        except _LeftError as left:
            if left.word != "return":
                raise
            return left.status
        finally:
            self.depth -= 1
            self.variables.positional = before

    def _do_set(self, arguments: list[str]) -> int | None:
        while arguments:
            flag, *arguments = arguments
            if flag in ("--", "-"):
                self.variables.positional = arguments
                break
            if flag[:1] in ("-", "+"):
                names = set(flag[1:])
                if "o" in names and arguments:
                    names |= {"errexit": {"e"}}.get(arguments[0], set())
                    arguments = arguments[1:]
                self.options = self.options | names if flag[0] == "-" else self.options - names
            else:
                self.variables.positional = [flag, *arguments]
                break
        return 0

    def _do_shift(self, arguments: list[str]) -> int | None:
        count = int(arguments[0]) if arguments else 1
        if count > len(self.variables.positional):
            return 1
        self.variables.positional = self.variables.positional[count:]
        return 0

    def _do_echo(self, arguments: list[str]) -> int | None:
        ending = "\n"
        while arguments and arguments[0] in ("-n", "-e", "-E", "-ne", "-en"):
            ending = "" if "n" in arguments[0] else ending
            arguments = arguments[1:]
        self.output += " ".join(arguments) + ending
        return 0

    def _do_printf(self, arguments: list[str]) -> int | None:
        if arguments[:1] in (["%s"], ["%s\\n"]) and len(arguments) == 2:
            self.output += arguments[1] + ("\n" if "n" in arguments[0] else "")
        elif arguments[:1] == ["-v"]:
            raise self._refusal("printf -v is not read")
        else:
            self.output += self.variables.mark(f"printf on line {self.line} is not read")
        return 0

    def _do_date(self, arguments: list[str]) -> int | None:
        if len(arguments) == 1 and arguments[0].startswith("+"):
            self.output += time.strftime(arguments[0][1:]) + "\n"
        else:
            self.output += self.variables.mark(f"date on line {self.line} is not read") + "\n"
        return 0

    def _do_pwd(self, arguments: list[str]) -> int | None:
        self.output += self._directory() + "\n"
        return 0

    def _do_cd(self, arguments: list[str]) -> int | None:
        path = "".join(arguments[-1:]) or self._words.value_of("HOME")
        if not self.variables.marks_in(path):
            path = os.path.normpath(os.path.join(self._directory(), path))
        self.variables.set("PWD", path)
        return 0

    def _directory(self) -> str:
        value = self.variables.values.get("PWD")
        return value if isinstance(value, str) else os.getcwd()

    def _do_basename(self, arguments: list[str]) -> int | None:
        arguments = [each for each in arguments if each != "--"]
        name = os.path.basename(self.variables.known(arguments[0]).rstrip("/"))
        if len(arguments) > 1 and name != arguments[1]:
            name = name.removesuffix(arguments[1])
        self.output += name + "\n"
        return 0

    def _do_dirname(self, arguments: list[str]) -> int | None:
        path = self.variables.known(next(each for each in arguments if each != "--"))
        self.output += (
            os.path.dirname(path.rstrip("/")) or (path[:1] if path[:1] == "/" else ".")
        ) + "\n"
        return 0

    def _do_readlink(self, arguments: list[str]) -> int | None:
        self.output += os.path.realpath(self.variables.known(arguments[-1])) + "\n"
        return 0

    _do_realpath = _do_readlink

    def _do_exit(self, arguments: list[str]) -> int | None:
        raise _LeftError("exit", self._status_of(arguments))

    def _do_return(self, arguments: list[str]) -> int | None:
        raise _LeftError("return", self._status_of(arguments))

    def _do_break(self, arguments: list[str]) -> int | None:
        raise _LeftError("break", 0, int(arguments[0]) if arguments else 1)

    def _do_continue(self, arguments: list[str]) -> int | None:
        raise _LeftError("continue", 0, int(arguments[0]) if arguments else 1)

    def _status_of(self, arguments: list[str]) -> int | None:
        return int(arguments[0]) if arguments and arguments[0].isdigit() else None

    def _do_eval(self, arguments: list[str]) -> int | None:
        text = " ".join(arguments)
        for mark in self.variables.marks_in(text):
            if not mark.is_unset:
                self.reason = mark.reason
                return None
        self.depth += 1
        if self.depth > _DEEPEST:
            raise self._refusal("commands are nested too deeply")
        status = self._run_text(self.variables.known(text))
        self.depth -= 1
        return status

    def _do_source(self, arguments: list[str]) -> int | None:
        """Evaluate another file. Without it, what it would set is unknown by being unset."""
        path = self.variables.known(arguments[0])
        if not os.path.isfile(path):
            self.reason = f"{path} on line {self.line} is not here"
            return None
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(200_000)
        self.depth += 1
        if self.depth > _DEEPEST:
            raise self._refusal("files name each other too deeply")
        try:
            return self._run_text(text)
        except _LeftError as left:
            if left.word != "return":
                raise
            return left.status
        finally:
            self.depth -= 1

    def _do_let(self, arguments: list[str]) -> int | None:
        values = [evaluate_arithmetic(each, self.variables) for each in arguments]
        return int(not values[-1])

    def _do_read(self, arguments: list[str]) -> int | None:
        """Set variables to words of what is given; only a run would tell what a file or a person gives."""
        names = [name for name in arguments if name.isidentifier()]
        if self.input is None:
            for name in names:
                self.variables.set(
                    name, self.variables.mark(f"read on line {self.line} would have to run")
                )
            return 0
        is_whole = "" in arguments  # `-d ""` reads to the end, and there it finds no delimiter
        lines = self.input.strip() if is_whole else self.input.partition("\n")[0].strip()
        words = lines.split(None, len(names) - 1) if len(names) > 1 else [lines]
        for place, name in enumerate(names):
            self.variables.set(name, words[place] if place < len(words) else "")
        return int(is_whole)

    def _do_env(self, arguments: list[str]) -> int | None:
        while arguments and (arguments[0].startswith("-") or "=" in arguments[0]):
            arguments = arguments[1:]
        if arguments:
            self.commands.append(ShellCommand(tuple(arguments), self.line))
        self.reason = f"env on line {self.line} would have to run"
        self.output += self.variables.mark(self.reason)
        return None


def read_script(
    name: str, text: str, positional: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> Script:
    """Return an evaluated script. Raises `UsageError` with the line for what cannot be evaluated."""
    script = Script(Variables(name, environ, positional=[*positional]))
    script.read(text)
    return script


def _clauses(node: Node) -> list[tuple[list[Node], list[Node]]]:
    """Return the conditions and bodies of an `if`; that of `else` has no condition."""
    condition: list[Node] = []
    body: list[Node] = []
    later: list[tuple[list[Node], list[Node]]] = []
    place = condition
    for child in node.children:
        if child.type == "then":
            place = body
        elif child.type == "elif_clause":
            later += _clauses(child)
        elif child.type == "else_clause":
            later.append(([], child.children))
        else:
            place.append(child)
    return [(condition, body), *later]


def _first_error(node: Node) -> Node:
    return next((_first_error(child) for child in node.children if child.has_error), node)


def _is_elsewhere(redirect: Node) -> bool:
    """Return whether a redirection takes what a command prints."""
    return bool(re.match(rb"1?>(?!&1)|&>", redirect.text or b""))


def _escaped(match: re.Match[str]) -> str:
    """Return a quote of a here-document as it is written between quotes."""
    return match[0].replace("\\", "\\\\").replace('"', '\\"')


def _imported(words: Sequence[str]) -> str | None:
    """Return the module of `python -c 'import MODULE'`, which asks whether it is installed."""
    if len(words) == 3 and re.search(r"(^|/)python3?$", words[0]) and words[1] == "-c":
        match = re.fullmatch(r"\s*import (\w+)\s*", words[2])
        return match[1] if match else None
    return None


def _script_inside(words: Sequence[str]) -> str | None:
    """Return the text of `bash -c TEXT`, also behind a launcher."""
    for place in range(len(words) - 2):
        if re.search(r"(^|/)(ba)?sh$", words[place]) and re.fullmatch(r"-\w*c", words[place + 1]):
            return words[place + 2]
    return None
