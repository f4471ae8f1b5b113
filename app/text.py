"""Text from capsules, file names and git is hostile: here it is made visible before it reaches a terminal."""

from __future__ import annotations

import re

# Letters by category that paint nothing (fillers), so `isprintable` lets them pass.
_BLANK_LETTERS = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0\U000e0100")

# What JSON may hold raw but a terminal must not see: DEL, C1, format and bidi controls, separators, private use, tags.
_UNSAFE_IN_JSON = re.compile(
    "[\x7f-\x9f\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u08e2\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff\U000e0000-\U000e0fff]"
)

_NOT_ASCII = re.compile(r"[^\x00-\x7e]")

#: Signs of ours for terminals whose encoding lacks them.
_ASCII_SIGNS = {
    "✗": "x", "↳": ">", "✓": "+", "–": "-", "—": "-", "◐": "*", "·": ".", "…": "~", "▸": ">",
    "└": "`", "├": "|", "│": "|", "×": "x", "±": "~", "≤": "<", "≥": ">", "→": ">",
}  # fmt: skip


def visible(text: object, keep: str = "") -> str:
    r"""Make every character that does not print visible as an escape (``\x1b``, ``\u202e``).

    Covers C0 and C1 controls (so every escape sequence), bidirectional overrides, zero-width and other format
    characters, line separators, lone surrogates, private use and unassigned code points.

    Args:
        text: anything; what is not a string is converted.
        keep: control characters that may pass, such as ``"\n"`` in a block of documentation.
    """
    string = text if isinstance(text, str) else str(text)
    if string.isprintable() and string.isascii():
        return string
    return "".join(char if _prints(char) or char in keep else _escape(char) for char in string)


def one_line(text: object, limit: int = 500) -> str:
    """``visible`` on a single line: runs of white space become one blank, and the middle of a long text is left out."""
    string = visible(" ".join((text if isinstance(text, str) else str(text)).split()))
    if len(string) <= limit:
        return string
    head = limit * 2 // 3
    return f"{string[:head]} … {string[-(limit - head) :]}"


def keep_tail(text: str, width: int) -> str:
    """Shorten to ``width`` cells by dropping the head: the end of a long name tells more (``…23.mlp.down``)."""
    if text.isascii():
        return text if len(text) <= width else "…" + text[len(text) - width + 1 :]
    from rich.cells import cell_len  # a character may be two cells wide

    if cell_len(text) <= width:
        return text
    tail = text[max(0, len(text) - width + 1) :]
    while tail and cell_len(tail) > width - 1:
        tail = tail[1:]
    return "…" + tail


def keep_ends(text: str, width: int) -> str:
    """Shorten to ``width`` cells by dropping the middle: a number at the head and the word at the tail both tell."""
    from rich.cells import cell_len

    if cell_len(text) <= width:
        return text
    head = ""
    for char in text:
        if cell_len(head + char) > width // 3:
            break
        head += char
    return head + keep_tail(text[len(head) :], width - cell_len(head))


def ending(text: object, width: int) -> str:
    """``one_line`` cut after ``width`` characters at the end of a word."""
    string = one_line(text, 10_000)
    if len(string) <= width:
        return string
    return string[: width - 1].rpartition(" ")[0].rstrip(" ,;:") + " …"


def safe_json(document: str, *, ascii_only: bool = False) -> str:
    r"""Escape, inside JSON text, what a terminal would act on or cannot show; the document stays equal JSON."""
    unsafe = _NOT_ASCII if ascii_only else _UNSAFE_IN_JSON
    return unsafe.sub(lambda match: _json_escape(match.group()), document)


def stand_in(error: UnicodeError) -> tuple[str, int]:
    """Codec error handler: a sign that the terminal's encoding lacks becomes an ASCII one of the same width."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(_ASCII_SIGNS.get(char) or _escape(char) for char in missing), error.end


def _prints(char: str) -> bool:
    if char in _BLANK_LETTERS:
        return False
    # Spaces other than U+0020 (the ideographic one, say) are harmless, though not `isprintable`.
    return char.isprintable() or char in "\u00a0\u2002\u2003\u2009\u202f\u3000"


def _escape(char: str) -> str:
    code = ord(char)
    if char in "\n\r\t":
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}[char]
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _json_escape(char: str) -> str:
    encoded = char.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{encoded[i : i + 4]}" for i in range(0, len(encoded), 4))
