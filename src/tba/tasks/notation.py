r"""Notation of mathematical answers: one spelling of LaTeX, numbers, units, lists.

Everything here is text and exact fractions: linear time, and nothing is evaluated.
"""

import re
from fractions import Fraction

OPENING = "([{"
_CLOSING = ")]}"

_UNICODE = str.maketrans(
    {
        "\N{MINUS SIGN}": "-",
        "\N{EN DASH}": "-",
        "\N{MULTIPLICATION SIGN}": "*",
        "\N{GREEK SMALL LETTER PI}": "\\pi ",
        "\N{INFINITY}": "\\infty ",
        "\N{UNION}": "\\cup ",
        "\N{DEGREE SIGN}": "^\\circ",
    }
)
_SPELLING = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![a-zA-Z])\.?", ""),
        (r"(?<!\\)\\!", ""),
        (r"(?<!\\)\\[,;: ]|\\q?quad(?![a-zA-Z])|~", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:textcolor|color)\s*\{[a-zA-Z]{1,20}\}", ""),
        (r"\\(?:boldsymbol|bm)(?![a-zA-Z])|(?<=\{)\\(?:bf|rm|it)(?![a-zA-Z])", ""),
        (r"\\(?:textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|text)\s*\{", r"\\text{"),
        (r"\\text\{\s*(-?[\d.,]+)\s*\}", r"\1"),
        (r"\\text\{\s*per ?cent\s*\}|(?<=\d)\s?per ?cent(?![a-z])", "%"),
        (r"(\\text\{[^{}]*)\}\s*/\s*\\text\{", r"\1/"),
        (r"\{,\}", ","),
        (r"\\%", "%"),
        (r"\\\$|\$", r"\\$"),
        (r"\\(?:degree|deg)(?![a-zA-Z])|\^\s*\{?\s*\\circ\s*\}?", r"\\text{degrees}"),
        (r"(?<=\{)[bB]matrix(?=\})", "pmatrix"),
        (r"\\text\{\s*(?:and|or)\s*\}|(?<=[\d}) ])\s(?:and|or)\s", ", "),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\leq?(?![a-zA-Z])", r"\\le "),
        (r"\\geq?(?![a-zA-Z])", r"\\ge "),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
        (r"^[a-zA-Z]\s*\\in(?![a-zA-Z])", ""),
    )
)
"""In this order; none can take more than linear time."""
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,])(?<!\d )\d{1,3}(?: \d{3})+(?! ?\d)")
_SPACES = re.compile(r"(?<!\d)\s+|\s+(?!\d)")

_MARKED_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\!\s*,|,\s*\\!|\\!)(?:\s|\\!)*(?=\d{3}(?!\d))")
_COMMA_THOUSANDS = r"(?<![\d.,])\d{1,3}(?:,(?:\\,)?\d{3})+(?!\d|,(?:\\,)?\d)"
_BRACKET_OR_THOUSANDS = re.compile(
    rf"""(?P<open>\\\{{|\\lbrace(?![a-zA-Z])|(?<!\\)[(\[{{])
        | (?P<close>\\\}}|\\rbrace(?![a-zA-Z])|(?<!\\)[)\]}}])
        | (?P<number>{_COMMA_THOUSANDS})""",
    re.VERBOSE,
)

_NUMBER = re.compile(
    r"""(?P<sign>[+-]?)(?:
        (?P<decimal>(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d{1,2})?)%?
        | (?P<exact>\d*\.\d*)\\overline\{(?P<repeated>\d+)\}%?
        | (?:(?P<mixed>\d+)[ ])?(?P<plain_a>\d+)/(?P<plain_b>\d+)
        | (?P<whole>\d*)\\frac\{(?P<inner>-?)(?P<a>\d+)\}\{(?P<b>\d+)\}
    )""",
    re.VERBOSE,
)

_UNIT = re.compile(
    r"""(?P<body>.*?)\s*
        (?:\\text\{(?P<text>[^{}]*)\}|(?<=[\d}\s])(?P<words>[a-zA-Z][a-zA-Z. /]*))
        \s*(?:\^\s*\{?(?P<power>[23])\}?)?\.?""",
    re.VERBOSE | re.DOTALL,
)
_NO_UNIT = re.compile(
    r"\d|\b(?:or|and|but|not|no|never|plus|minus|times|over|under|above|below|before"
    r"|divided|multiplied|added|subtracted|squared|cubed|doubled|tripled|halved|factorial"
    r"|pi|half|halves|point(?= )|(?:negative|positive)(?=$)|more|less|fewer|greater|than|about"
    r"|almost|to|choose|mod|modulo|if|maybe"
    r"|is|isn|are|was|were|be|wrong|false|incorrect|except|without|short|gross|mil|[mbt]n|bil"
    r"|(?:thi|four|fif|six|seven|eigh|nin|ten|eleven|twelf|twentie|hundred|thousand"
    r"|(?:m|b|tr)illion)(?:rd|th)s?"
    r"|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty"
    r"|(?-i:[KMBTk]|MM))\b",
    re.IGNORECASE,
)
"""Words behind a number that change what it says, or take it back."""
_MULTIPLES = {
    name + plural: 10**zeros * (12 if name == "dozen" else 1)
    for name, zeros in {
        "dozen": 0,
        "hundred": 2,
        "thousand": 3,
        "million": 6,
        "billion": 9,
        "trillion": 12,
    }.items()
    for plural in ("", "s")
}
_BASE = re.compile(r"(?P<body>[0-9A-Z]+)_\{?(?P<base>\d{1,2})\}?")

_UNITS = {
    name: unit
    for unit, names in {
        "mm": "mm millimeter millimeters",
        "cm": "cm centimeter centimeters",
        "m": "m meter meters metre metres",
        "km": "km kilometer kilometers kilometre kilometres",
        "in": "in inch inches",
        "ft": "ft foot feet",
        "yd": "yd yard yards",
        "mi": "mi mile miles",
        "s": "s sec second seconds",
        "min": "min minute minutes",
        "h": "h hr hour hours",
        "day": "day days",
        "week": "week weeks",
        "month": "month months",
        "year": "year years",
        "g": "g gm gram grams",
        "kg": "kg kilogram kilograms",
        "mg": "mg milligram milligrams",
        "lb": "lb lbs pound pounds",
        "oz": "oz ounce ounces",
        "ton": "ton tons",
        "l": "l L liter liters litre litres",
        "ml": "ml milliliter milliliters millilitre millilitres",
        "gallon": "gal gallon gallons",
        "quart": "qt quart quarts",
        "pint": "pint pints",
        "cup": "cup cups",
        "hz": "hz hertz",
        "khz": "khz kilohertz",
        "mhz": "mhz megahertz",
        "mi/h": "mph",
        "km/h": "kph kmh kmph",
        "dollar": "dollar dollars",
        "cent": "cent cents",
        "degree": "degree degrees",
        "radian": "radian radians rad",
        "a.m.": "a.m am",
        "p.m.": "p.m pm",
    }.items()
    for name in names.split()
}


def normal_form(text: str, *, thousands: bool = True) -> str:
    """Return an answer in one spelling of LaTeX; spaces remain.

    `3,125` outside of brackets is a number, or with `thousands=False` a list.
    """
    text = text.strip().translate(_UNICODE)
    if len(text) > 2 and text.startswith("$") and text.endswith("$"):
        text = text[1:-1]
    text = _join_thousands(_MARKED_THOUSANDS.sub("", text), lists=not thousands)
    for pattern, replacement in _SPELLING:
        text = pattern.sub(replacement, text)
    text = _SPACED_THOUSANDS.sub(lambda match: match[0].replace(" ", ""), text)
    return text.strip().rstrip(".,;:").strip()


def _join_thousands(text: str, *, lists: bool) -> str:
    """Leave out the commas of thousands; no comma is one in brackets or before a space.

    With `lists`, only numbers of which no list would consist (`1,000`) are joined.
    """
    inside = [False]

    def replace(match: re.Match[str]) -> str:
        if match["open"]:
            inside.append(inside[-1] or not _opens_argument(text, match.start()))
        elif match["close"]:
            if len(inside) > 1:
                inside.pop()
        elif not inside[-1] and (not lists or re.search(r",(?:\\,)?0", match[0])):
            return re.sub(r"[,\\]", "", match[0])
        return match[0]

    return _BRACKET_OR_THOUSANDS.sub(replace, text)


def _opens_argument(text: str, position: int) -> bool:
    r"""Say whether a bracket is the brace of a command or power, as in `\frac{1}{2}`, no list's."""
    if text[position] != "{":
        return False
    before = text[max(0, position - 9) : position].rstrip()
    if before.endswith(("\\in", "\\cup", "\\cap")):
        return False
    is_font = text.startswith(("{\\bf", "{\\rm", "{\\it"), position)
    return is_font or re.search(r"[a-zA-Z}\]^_]$", before) is not None


def without_spaces(text: str) -> str:
    """Return a text without spaces, but for those that keep two digits apart (`2 1/2`)."""
    return _SPACES.sub("", text)


def read_number(text: str) -> Fraction | None:
    """Return the exact value of a (repeating) decimal, fraction, mixed number or percentage.

    The per cent sign is passed over; None: no number, as with a denominator of zero.
    """
    match = _NUMBER.fullmatch(without_spaces(text))
    if match is None:
        return None
    part = {k: v or "" for k, v in match.groupdict().items()}
    if part["decimal"]:
        value = Fraction(part["decimal"].rstrip("."))
    elif part["exact"]:
        value = Fraction("0" + part["exact"] + "0")
        places = len(part["exact"].partition(".")[2])
        value += Fraction(int(part["repeated"]), 10**places * (10 ** len(part["repeated"]) - 1))
    else:
        above, below = int(part["plain_a"] or part["a"]), int(part["plain_b"] or part["b"])
        if below == 0:
            return None
        value = int(part["whole"] or part["mixed"] or 0) + Fraction(above, below)
    return -value if (part["sign"] == "-") != (part["inner"] == "-") else value


def split_unit(text: str) -> tuple[str, str]:
    """Return an answer without its unit, and the unit in words; a numeral's base is its unit.

    `5 million people` is 5000000, of people.
    """
    if text.startswith(("\\$", "-\\$")):
        return split_unit(text.replace("\\$", "", 1).strip())[0], "dollar"
    if base := _BASE.fullmatch(text):
        return base["body"], f"base {base['base']}"
    match = _UNIT.fullmatch(text)
    if match is None or not re.search(r"[\d})%]$", match["body"]) or _is_product(text, match):
        return text, ""
    words = (match["text"] or match["words"] or "").strip()
    if _NO_UNIT.search(words):
        return text, ""
    times, unit = _split_multiple(words)
    if times != 1:
        value = read_number(match["body"])
        return (text, "") if value is None else (str(value * times), unit)
    power = match["power"] or {"square": "2", "sq": "2", "cubic": "3"}.get(words.split(" ")[0], "")
    words = re.sub(r"^(?:square|sq|cubic)\.? ", "", words).rstrip(".")
    return match["body"].strip(), words + (f"^{power}" if power else "")


def _split_multiple(words: str) -> tuple[int, str]:
    """Return the multiple that words begin with, as in `million people`, and the rest."""
    times = 1
    first, _, rest = words.partition(" ")
    while first.lower() in _MULTIPLES:
        times, words = times * _MULTIPLES[first.lower()], rest
        first, _, rest = words.partition(" ")
    return times, words


def _is_product(text: str, match: re.Match[str]) -> bool:
    """Say whether what may be a unit is variables, as in `5xy` and `5 x`."""
    words = match["words"]
    if words is None or _standard(words.strip(" .")):
        return False
    return len(words) == 1 or "/" in words or not text[match.start("words") - 1].isspace()


def units_differ(a: str, b: str) -> bool:
    """Say whether both units are known and not the same."""
    return bool(_standard(a) and _standard(b)) and _standard(a) != _standard(b)


def _standard(unit: str) -> str:
    """Return the one name of a known unit, or nothing; a lone letter's case matters."""
    name, power, exponent = unit.partition("^")
    if name.startswith("base "):
        return "base" + name[5:] + power + exponent
    parts = [part.strip() for part in name.replace(" per ", "/").split("/")]
    names = [_UNITS.get(part if len(part) == 1 else part.lower(), "") for part in parts]
    return "/".join(names) + power + exponent if all(names) else ""


def split_top_level(text: str, separator: str) -> list[str]:
    """Split at a separator outside of all brackets."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        if text[i] in OPENING:
            depth += 1
        elif text[i] in _CLOSING:
            depth -= 1
        elif depth == 0 and text.startswith(separator, i):
            parts.append(text[start:i])
            start = i + len(separator)
        i += 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()] or [text]


def closes_itself(text: str) -> bool:
    """Say whether a text is one pair of round or square brackets, mixed or not, and its inside."""
    if not text or text[0] not in "([" or text[-1] not in ")]":
        return False
    depth = 0
    for position, character in enumerate(text):
        depth += (character in OPENING) - (character in _CLOSING)
        if depth == 0:
            return position == len(text) - 1
    return False
