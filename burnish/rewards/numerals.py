r"""Read the last number of a text exactly, in plain or LaTeX notation.

Digits with no single reading are no number: 3-5, 1.234,5, 10:30, 2\sqrt{3}, 5x, "3 or 4". Percent signs, currencies and units are left
out. The time is linear in the text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction

_LONGEST = 200
"""Most characters of a number."""
_WINDOW = 2_000
"""How many characters before the last digit are read first."""
_LARGEST_EXPONENT = 1_000
_VULGAR = "\u00bc\u00bd\u00be" + "".join(map(chr, range(0x2150, 0x215F)))
"""Fractions in one character."""
_SUPERSCRIPTS = re.compile(r"[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b]+")

_NOTATIONS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"[\u2212\u2012\ufe63\uff0d]", "-"),
        (r"(?<=\d)[\u2010\u2011\u2013\u2014](?=\s?\d)|(?<![\w)}])\u2013(?=\d)", "-"),
        (r"(?<=\d)(?:[\u2006\u2008\u2009\u202f\u00a0~]|\\[,;:! ])(?=\d)", r"\\,"),
        (r"[\u2006\u2008\u2009\u202f\u00a0~]|\\[;:! ]|\\,(?!\d)|(?<!\d)\\,", " "),
        (r"\\(?:left|right|displaystyle|big|Big|bigg|Bigg)(?![A-Za-z])", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (
            r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mathit|mathsf|mbox|bm)\s?\{([^{}]*)\}",
            r" \1",
        ),
        (r"\^\s?\{?\s?(?:\\circ|\u00b0)\s?\}?|\u00b0|\\%|\u066a|\uff05", "%"),
        (r"(?<=\d)(?:\^\s?\{?\s?)?(?:st|nd|rd|th)\}?(?![^\W\d_])", ""),
        (r"\{,\}", ","),
        (r"\\[()\[\]$]|\\\\", "$"),
        (r"</?[A-Za-z_][\w-]{0,40}>", "\n"),
        (r"(?<![\w)}\]])-\s?[$\u20ac\u00a3\u00a5\u20b9]\s?(?=[\d.])", "-"),
        (r"(?<![\w)}])[*_`]+|[*_`]{2,}(?!\w)|`", " "),
        (
            r"\\(?:times|cdot)(?![A-Za-z])|\u00d7|\u22c5|\u00b7|(?<=\d)\s?[xX](?=\s?10\s?\^)",
            r"\\times",
        ),
    )
]
"""Notations that become one before numbers are looked for."""
_TOKEN = re.compile(
    r"""(?P<number>(?:[0-9](?:[0-9,.]*[0-9])?|(?<![0-9])\.[0-9]+)(?:[eE][-+]?[0-9]+(?![\w.]))?)
    |(?P<change>[\u4e07\u4ebf\u5343\u767e\u5341\u5206\u70b9\u8d1f])
    |(?P<relation>[-=]>|=|\u2248|\\(?:approx|equiv|to|Rightarrow|implies|rightarrow|sim|therefore)(?![A-Za-z]))
    |(?P<inequality>!=|[<>\u2264\u2265\u2260]|\\(?:leq?|geq?|lt|gt|neq?|in)(?![A-Za-z]))
    |(?P<end>[\n$\u20ac\u00a3\u00a5\u20b9"\u201c\u201d\#&?]|\.(?=\s)|\.\Z|[;:](?=\s)|\|(?=\s)|(?<=\s)\|
        |\\q?quad(?![A-Za-z])|[\u3000-\u30ff\u3400-\u9fff\uac00-\ud7af\uff01-\uff0f\uff1a-\uff20])
    |(?P<word>[^\W\d_](?:\w|'\w)*(?:[\^_](?:\{[-+\w]*\}|-?\w+))*)
    |(?P<math>\\[A-Za-z]+|\S)
    |(?P<space>\s)""",
    re.VERBOSE,
)
"""Kinds of text. Chinese characters that change a number, such as ten thousand, are words, and other ones end a formula."""
_KINDS = {"change": "word"}
"""Groups of `_TOKEN` whose kind has another name."""
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?:\\,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_WITH_EXPONENT = rf"(?:{_DECIMAL})(?:[eE][-+]?\d+)?"
_TO_THE = r"\s*\^\s*(?:\{\s*(?P<b>[-+]?\d+)\s*\}|(?P<c>-?\d))"
_ARGUMENT = rf"\s*(?:\{{\s*([-+]?(?:{_WITH_EXPONENT}))\s*\}}|(\d))"
_FORMS = [
    re.compile(r"(?P<sign>[-+]?)\s*" + form, re.ASCII)
    for form in (
        rf"(?P<plain>{_WITH_EXPONENT})",
        rf"(?P<base>\d+){_TO_THE}",
        rf"(?P<scaled>{_DECIMAL})\s*(?:\\times|\*)\s*10{_TO_THE}",
        rf"(?P<over>{_DECIMAL})\s*/\s*(?P<under>{_DECIMAL})",
        r"(?P<whole>\d+)\s+(?P<over>\d+)\s*/\s*(?P<under>\d+)",
        rf"(?P<whole>\d*)\s*\\frac{_ARGUMENT}{_ARGUMENT}",
    )
]
"""All ways to write a number."""
_UNITS = re.compile(
    "mm|cm|m|km|in|ft|yd|mi|mg|g|kg|lbs?|oz|m[lL]|[lL]|s|sec|ms|min|h|hrs?|k?J|k?W|V|A|N|Hz|C|F|USD|EUR|GBP|mph|kph|a|I"
)
"""Words directly after a number, and single letters after a space, that make no formula of it."""
_SCALES = re.compile(
    "thousand|million|billion|trillion|hundred|dozen|squared|cubed|factorial|[kKMB]"
)
"""Words that make another number of the one before."""
_CHANGES = re.compile("minus|negative|root|half|twice|double", re.IGNORECASE)
"""Words that make another number of the next one."""
_JOINS = re.compile(
    "or|and|to|through|by|of|over|vs|versus|plus|minus|times|x|mod|und|oder|until|out",
    re.IGNORECASE,
)
"""Words that make one answer of the numbers on both sides."""


def last_number(text: str, *, alone: bool = False) -> Fraction | None:
    """Return the last number in a text, or None if it has none or the last one has no single reading.

    If `alone`, the whole text is an answer: a number, perhaps with a unit, or after an equals sign.
    """
    last = max(map(text.rfind, "0123456789" + _VULGAR)) + 1
    size = _WINDOW
    while last:
        window = text[max(last - size, 0) : last + _LONGEST]
        tokens = [
            (_KINDS.get(m.lastgroup or "", m.lastgroup or ""), m[0])
            for m in _TOKEN.finditer(_unify(window))
        ]
        numbers_at = [index for index, (kind, _) in enumerate(tokens) if kind == "number"]
        if numbers_at:
            return _number_at(tokens, numbers_at[-1], alone)
        if size >= last:
            break
        size *= 10
    return None


_Tokens = Sequence[tuple[str, str]]
"""Kinds and texts."""


def _number_at(tokens: _Tokens, at: int, alone: bool) -> Fraction | None:
    """Read the formula around a token."""
    first = at
    while first > 0 and tokens[first - 1][0] in ("number", "math", "space"):
        first -= 1
    end = at + 1
    while end < len(tokens) and tokens[end][0] in ("math", "space"):
        end += 1
    before = tokens[:first]
    after = tokens[end] if end < len(tokens) else ("end", "")
    formula = "".join(text for _, text in tokens[first:end])
    if len(formula) > 2 * _LONGEST or _is_joined(before) or (alone and _has_others(before)):
        return None
    head = _without_head(formula, before, alone)
    return None if head is None else _value(_without_tail(head, after, alone))


def _unify(text: str) -> str:
    for character in _VULGAR:
        if character in text:
            value = Fraction(unicodedata.numeric(character)).limit_denominator(10)
            text = text.replace(character, f" {value.numerator}/{value.denominator}")
    text = _SUPERSCRIPTS.sub(lambda m: f"^{{{unicodedata.normalize('NFKC', m[0])}}}", text)
    for pattern, replacement in _NOTATIONS:
        text = pattern.sub(replacement, text)
    return text


def _is_joined(before: _Tokens) -> bool:
    """Return whether what stands before a formula changes it, or makes an answer of several numbers."""
    rest = [token for token in before[-40:] if token[0] != "space" and token[1] not in ("$", '"')]
    if rest and _CHANGES.fullmatch(rest[-1][1]):
        return True
    count = len(rest)
    while rest and (rest[-1][1] == "," or _JOINS.fullmatch(rest[-1][1])):
        rest.pop()
    if not rest:
        return False
    kind, text = rest[-1]
    if len(rest) < count and (kind == "number" or text in tuple(")}]%")):
        return True
    is_operator = kind == "math" and text not in tuple("([{:*.,!)'")
    return kind == "inequality" or is_operator or _CHANGES.fullmatch(text) is not None


def _has_others(before: _Tokens) -> bool:
    """Return whether an answer has another number, besides one in an equation that ends with the formula."""
    relations = [index for index, (kind, _) in enumerate(before) if kind == "relation"]
    left = before[: relations[-1]] if relations else before
    if relations:
        return any(text in (",", ";") or text.lower() in ("or", "and") for _, text in left)
    return any(kind == "number" for kind, _ in left)


def _without_head(formula: str, before: _Tokens, alone: bool) -> str | None:
    """Remove what comes before a number. None if it belongs to the formula, as in x-3 and f(2)."""
    kind, word = before[-1] if before else ("end", "\n")
    text = formula.lstrip().lstrip(":").lstrip()
    is_signed = re.match(r"[-+](?=[\d.\\({])", text) is not None
    if kind == "word":
        if not formula[0].isspace() and formula[0] != ":":
            return None
        if text[:1] in tuple("-+*/^") and not (is_signed and len(word) > 1):
            return None
    if word == "\n" and not alone and text[:1] in ("-", "+") and not is_signed:
        return None  # a list's mark, or a sign
    return text


def _without_tail(text: str, after: tuple[str, str], alone: bool) -> str:
    """Remove what comes after a number. Return "" if it belongs to the formula, as in 5x and 5!."""
    kind, word = after
    is_open = kind == "inequality" or ".." in text or "\u2026" in text
    is_factorial = alone and text.rstrip().endswith("!")
    tail = _before_word(text, word) if kind == "word" else text
    if is_open or is_factorial or tail is None:
        return ""
    tail = tail.rstrip().rstrip(".,;:!'*_ ")
    for opening, closing in ("()", "[]", "{}"):
        if tail.startswith(opening) and tail.endswith(closing) and "," not in tail:
            tail = tail[1:-1].strip()
        if tail.count(opening) > tail.count(closing):
            tail = tail.removeprefix(opening).strip()
        if tail.count(closing) > tail.count(opening):
            tail = tail.removesuffix(closing).strip()
    return tail.removesuffix("%").rstrip()


def _before_word(text: str, word: str) -> str | None:
    """Return what stands before a word, without what joins them; None for a formula."""
    tail = text.rstrip()
    if tail != text:
        is_letter = len(word) == 1 and not _UNITS.fullmatch(word)
        is_formula = tail[-1:] in tuple("-+*/^_\\") or _SCALES.fullmatch(word) or is_letter
        return None if is_formula else tail
    if tail[-1:] in ("-", "/") and (len(word) > 1 or _UNITS.fullmatch(word)):
        return tail[:-1]  # 10-mile, 60/hour
    if re.search(r"\s[(\[{]$", tail):
        return tail[:-1]
    is_apart = tail[-1:] in tuple(",.:;%)'!") or (tail[-1:].isdigit() and _UNITS.fullmatch(word))
    return tail if is_apart else None


def _value(text: str) -> Fraction | None:
    """Return the value of a text that is one number and nothing else."""
    if len(text) > _LONGEST:
        return None
    match = next(filter(None, (form.fullmatch(text) for form in _FORMS)), None)
    if match is None:
        return None
    parts = {name: part for name, part in match.groupdict().items() if part}
    sign = -1 if parts.get("sign") == "-" else 1
    to_the = int(parts.get("b") or parts.get("c") or 0)
    if abs(to_the) > _LARGEST_EXPONENT:
        return None
    if "plain" in parts:
        value = _decimal(parts["plain"])
    elif "scaled" in parts:
        value = _decimal(parts["scaled"] + f"e{to_the}")
    elif "base" in parts:
        base = Fraction(parts["base"])
        value = base**to_the if base or to_the > 0 else None
    else:
        over, under = (
            (parts["over"], parts["under"])
            if "over" in parts
            else [part for part in match.groups()[2:] if part]
        )
        value = _ratio(over, under, parts.get("whole"))
    return None if value is None else sign * value


def _ratio(over: str, under: str, whole: str | None) -> Fraction | None:
    top = _decimal(over)
    bottom = _decimal(under)
    if top is None or not bottom:
        return None
    if whole is None:
        return top / bottom
    is_proper = over.isdigit() and under.isdigit() and top < bottom
    return int(whole) + top / bottom if is_proper else None


def _decimal(text: str) -> Fraction | None:
    plain = text.replace(",", "").replace("\\", "")
    _, _, exponent = plain.lower().partition("e")
    is_small = len(exponent) < 6 and abs(int(exponent or 0)) <= _LARGEST_EXPONENT
    return Fraction(plain) if is_small else None
