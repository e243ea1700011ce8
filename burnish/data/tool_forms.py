"""The forms in which families of models write tool calls, and how each is read."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

Called = tuple[str, dict[str, Any]]
"""Name and arguments of a call."""


class ToolForm(NamedTuple):
    """How a family of models writes calls."""

    name: str
    begin: str
    """A regular expression of where calls begin. What stands before is content."""
    read: Callable[[str], Iterator[Called]]
    """Yields the calls of a text from there on. Raises `ValueError` for one that cannot be read."""


def _objects(text: str) -> Iterator[Any]:
    """Yield the JSON values that follow each other in a text, up to something else."""
    decoder = json.JSONDecoder()
    place = 0
    while place < len(text):
        while place < len(text) and text[place] in " \t\r\n;,":
            place += 1
        if place >= len(text) or text[place] not in "[{":
            return
        value, place = decoder.raw_decode(text, place)
        yield value


def from_json(value: Any) -> Called:
    """Return a call that is a JSON object. Raises `LookupError`, `TypeError` or `ValueError` for another one."""
    arguments = value.get("arguments", value.get("parameters", {}))
    name = value["tool_name"] if "tool_name" in value else value["name"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    return name, arguments


def _hermes(text: str) -> Iterator[Called]:
    decoder = json.JSONDecoder()
    place = 0
    while (start := text.find("<tool_call>", place)) >= 0:
        start = _skip_space(text, start + len("<tool_call>"))
        if text.find("</tool_call>", start) < 0:
            raise ValueError("</tool_call> is missing")
        # A text within the JSON may hold the tag that ends it.
        value, place = decoder.raw_decode(text, start)
        place = _skip_space(text, place)
        if not text.startswith("</tool_call>", place):
            raise ValueError("</tool_call> is missing")
        yield from_json(value)


def _skip_space(text: str, place: int) -> int:
    found = re.compile(r"\s*").match(text, place)
    return found.end() if found else place


def _between(text: str, opens: str, closes: str) -> Iterator[str]:
    """Yield what stands between marks. Raises `ValueError` if the last does not close."""
    place = 0
    while (start := text.find(opens, place)) >= 0:
        start += len(opens)
        end = text.find(closes, start)
        if end < 0:
            raise ValueError(f"{closes} is missing")
        yield text[start:end]
        place = end + len(closes)


class Unquoted(str):
    """An argument that is JSON, or a text without quotes."""

    __slots__ = ()


def meant(text: str, types: Collection[str] = ()) -> Any:
    """Read an argument without quotes: JSON, unless it must be a text or is none."""
    text = str(text)
    if types == {"string"}:
        return text
    if "boolean" in types and text in ("True", "False"):  # Qwen3-Coder's template writes Python's
        return text == "True"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    names = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
    is_text = "string" in types and value is not None and names.get(type(value)) not in types
    return text if is_text else value


def _qwen_xml(text: str) -> Iterator[Called]:
    for body in _between(text, "<function=", "</function>"):
        name, closes, rest = body.partition(">")
        if not closes:
            raise ValueError("> is missing after a name")
        arguments = {}
        for pair in _between(rest, "<parameter=", "</parameter>"):
            key, _, value = pair.partition(">")
            arguments[key.strip()] = Unquoted(value.removeprefix("\n").removesuffix("\n"))
        yield name.strip(), arguments


def _glm(text: str) -> Iterator[Called]:
    for body in _between(text, "<tool_call>", "</tool_call>"):
        name = body.partition("<arg_key>")[0].strip()
        if not name or "<" in name:
            raise ValueError("a name is expected after <tool_call>")
        keys = [*_between(body, "<arg_key>", "</arg_key>")]
        values = [*_between(body, "<arg_value>", "</arg_value>")]
        if len(keys) != len(values):
            raise ValueError("each <arg_key> needs an <arg_value>")
        pairs = zip(keys, values, strict=True)
        yield name, {key.strip(): Unquoted(value) for key, value in pairs}


def _mistral(text: str) -> Iterator[Called]:
    """`[TOOL_CALLS][{...}]`, or since version 11 `[TOOL_CALLS]name[ARGS]{...}`."""
    for body in text.split("[TOOL_CALLS]")[1:]:
        name = re.match(r"\s*([\w.-]+?)\s*(?:\[CALL_ID\][^\[{]*)?\[ARGS\]", body)
        if name is not None:
            yield name[1], next(_objects(body[name.end() :]))
            continue
        name = re.match(r"\s*([\w.-]+)\s*(?=\{)", body)
        if name is not None:
            yield name[1], next(_objects(body[name.end() :]))
            continue
        yield from _json_calls(body)


def _json_calls(text: str) -> Iterator[Called]:
    """JSON objects or lists of them. Llama divides several by `;`."""
    for value in _objects(text):
        for each in value if isinstance(value, list) else [value]:
            yield from_json(each)


def _llama(text: str) -> Iterator[Called]:
    yield from _json_calls(text.removeprefix("<|python_tag|>"))


def _marked_json(text: str) -> Iterator[Called]:
    """JSON between two marks, as by `_JSON_MARKS`."""
    for opens, closes in _JSON_MARKS:
        for body in text.split(opens)[1:]:
            inside, end, _ = body.partition(closes)
            if not end:
                raise ValueError(f"{closes} is missing")
            for value in json.loads(inside) if inside.lstrip()[:1] == "[" else _objects(inside):
                name = next(iter(value))  # Apertus writes {NAME: arguments}
                named = {"name": name, "arguments": value[name]} if len(value) == 1 else value
                yield from_json(named)


def _deepseek(text: str) -> Iterator[Called]:
    """`<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, a line, and JSON; since V3.1 `NAME<｜tool▁sep｜>{...}`."""
    for call in _between(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"):
        first, _, rest = call.partition("<｜tool▁sep｜>")
        if first.strip() == "function":
            name, _, body = rest.partition("\n")
            body = re.sub(r"^\s*```(?:json)?|```\s*$", "", body.strip()).strip()
            yield name.strip(), json.loads(body)
        else:
            yield first.strip(), json.loads(rest)


def _kimi(text: str) -> Iterator[Called]:
    for call in _between(text, "<|tool_call_begin|>", "<|tool_call_end|>"):
        identity, _, body = call.partition("<|tool_call_argument_begin|>")
        name = identity.strip().removeprefix("functions.")
        yield re.sub(r":\d+$", "", name), json.loads(body)


def _harmony(text: str) -> Iterator[Called]:
    closing = re.compile(r"<\|call\|>|<\|end\|>")
    end = 0
    for opened in re.finditer(re.escape("<|message|>"), text):
        if opened.start() < end:
            continue
        _, mark, head = text[end : opened.start()].rpartition("to=functions.")
        closed = closing.search(text, opened.end())
        end = closed.start() if closed else len(text)
        name = re.match(r"[\w.-]+", head)
        if mark and name and "{" not in head:
            yield name[0], json.loads(text[opened.end() : end])


def _elements(text: str) -> Iterator[Called]:
    """`<invoke name="NAME">` with elements named `parameter` (MiniMax), in a namespace (DeepSeek's DSML), or `<function>` and `<param>`."""
    opened = re.search(r"<([^\s<>]*)(invoke|function) name=", text)
    if opened is None:
        return
    space, element = opened.groups()
    part = "parameter" if element == "invoke" else "param"
    for body in _between(text, f'<{space}{element} name="', f"</{space}{element}>"):
        name, _, rest = body.partition('">')
        arguments = dict[str, Any]()
        for field in _between(rest, f'<{space}{part} name="', f"</{space}{part}>"):
            head, _, value = field.partition(">")
            key, _, more = head.partition('"')
            text = value.removeprefix("<![CDATA[").removesuffix("]]>")
            arguments[key] = text if 'string="true"' in more else Unquoted(text)
        yield name, arguments


def _functions(text: str) -> Iterator[Called]:
    """`<function=NAME>{...}</function>` (Functionary, and Llama when told so)."""
    for body in _between(text, "<function=", "</function>"):
        name, _, arguments = body.partition(">")
        yield from_json({"name": name.strip(), "arguments": json.loads(arguments)})


def _python(text: str) -> Iterator[Called]:
    """`<|tool_call_start|>[NAME(key='value')]<|tool_call_end|>` (LFM2)."""
    for body in _between(text, "<|tool_call_start|>", "<|tool_call_end|>"):
        try:
            listed = ast.parse(body.strip(), mode="eval").body
        except SyntaxError:  # the template writes texts with line breaks as they are
            listed = ast.parse(body.strip().replace("\n", "\\n"), mode="eval").body
        for call in listed.elts if isinstance(listed, ast.List) else [listed]:
            if not isinstance(call, ast.Call) or call.args:
                raise ValueError("NAME(key=value) is expected")
            yield (
                ast.unparse(call.func),
                {str(each.arg): _literal(each.value) for each in call.keywords},
            )


def _literal(node: ast.expr) -> Any:
    """Read a value of Python, or of JSON where its words differ."""
    return ast.literal_eval(_Words().visit(node))


class _Words(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node


_QUOTE = '<|"|>'


def _gemma(text: str) -> Iterator[Called]:
    """`<|tool_call>call:NAME{key:<|"|>value<|"|>}<tool_call|>`."""
    for body in _between(text, "<|tool_call>", "<tool_call|>"):
        name, brace, rest = body.strip().removeprefix("call:").partition("{")
        arguments, place = _unquoted_object(brace + rest, 0)
        if (brace + rest)[place:].strip():
            raise ValueError("more than one object follows a name")
        yield name, arguments


def _unquoted_object(text: str, place: int) -> tuple[dict[str, Any], int]:
    """Read an object whose keys have no quotes."""
    fields: dict[str, Any] = {}
    if text[place : place + 1] != "{":
        raise ValueError("{ is expected")
    place += 1
    while text[place : place + 1] != "}":
        key, colon, _ = text[place:].partition(":")
        if not colon:
            raise ValueError("a key is expected")
        fields[key.replace(_QUOTE, "").strip()], place = _unquoted(text, place + len(key) + 1)
        place += text[place : place + 1] == ","
    return fields, place + 1


def _unquoted(text: str, place: int) -> tuple[Any, int]:
    """Read a value from there on, and return where it ends."""
    if text.startswith(_QUOTE, place):
        end = text.index(_QUOTE, place + len(_QUOTE))
        return text[place + len(_QUOTE) : end], end + len(_QUOTE)
    if text[place : place + 1] == "{":
        return _unquoted_object(text, place)
    if text[place : place + 1] == "[":
        values = []
        place += 1
        while text[place : place + 1] != "]":
            value, place = _unquoted(text, place)
            values.append(value)
            place += text[place : place + 1] == ","
        return values, place + 1
    word = re.compile(r"[^,{}\[\]]+").match(text, place)
    if word is None:
        raise ValueError("a value is expected")
    return meant(
        {"None": "null", "True": "true", "False": "false"}.get(word[0], word[0])
    ), word.end()


_JSON_MARKS = (
    ("<|START_ACTION|>", "<|END_ACTION|>"),
    ("<|tools_prefix|>", "<|tools_suffix|>"),
    ("<TOOLCALL>", "</TOOLCALL>"),
    ("<tool_calls>", "</tool_calls>"),
)
"""Command R and A; Apertus; Nemotron; MiniMax M1, Jamba and Apriel."""

FORMS = (
    ToolForm("Kimi", re.escape("<|tool_calls_section_begin|>"), _kimi),
    ToolForm("DeepSeek", "<｜tool▁calls▁begin｜>", _deepseek),
    ToolForm("Mistral", re.escape("[TOOL_CALLS]"), _mistral),
    ToolForm(
        "harmony",
        r"(?:<\|start\|>assistant)?(?:<\|channel\|>commentary)? ?to=functions\.",
        _harmony,
    ),
    ToolForm(
        "elements",
        r"(?:<[^\s<>]*(?:function_calls|tool_calls?)>\s*)?<[^\s<>]*(?:invoke|function) name=",
        _elements,
    ),
    ToolForm("Gemma", re.escape("<|tool_call>"), _gemma),
    ToolForm("Python", re.escape("<|tool_call_start|>"), _python),
    ToolForm("Functionary", r"<function=[^>\n]+>\s*\{", _functions),
    ToolForm("marked JSON", "|".join(re.escape(opens) for opens, _ in _JSON_MARKS), _marked_json),
    ToolForm("Qwen XML", r"(?:<[\w:]*tool_call>\s*)?<function=", _qwen_xml),
    ToolForm("GLM", r"<tool_call>\s*[^\s<{]", _glm),
    ToolForm("Hermes", "<tool_call>", _hermes),
    ToolForm(
        "Llama", r"(?:<\|python_tag\|>)|^\s*\{\s*\"name\"|(?<=\n)\{\s*\"name\"|\{\"name\"", _llama
    ),
)
"""From the most particular form to the most general."""
