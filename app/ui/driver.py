"""The terminal side of the console: Textual's driver, hardened against what real terminals send and cannot show."""

from __future__ import annotations

import codecs
import re
from typing import Any

from textual.drivers import linux_driver

from .. import terminal

#: A mouse report of the oldest protocol: three bytes follow, and beyond column 95 they are no UTF-8. tmux sends them
#: after a reattach. There is no column to be had from them that the modern report does not give, so they are dropped.
_LEGACY_MOUSE = re.compile(rb"\x1b\[M[\x20-\xff]{3}", re.DOTALL)
_UNFINISHED = re.compile(rb"\x1b(?:\[(?:M[\x20-\xff]{0,2})?)?\Z", re.DOTALL)

#: Signs of ours for a terminal that shows ASCII only.
_ASCII = str.maketrans(
    {
        **dict.fromkeys("─━╌═", "-"),
        **dict.fromkeys("│┃║▌▐", "|"),
        **dict.fromkeys("╭╮╰╯┌┐└┘├┤┬┴┼╔╗╚╝", "+"),
        **dict.fromkeys("█▇▆▅▄▃▂▁▀▔▊▎", "#"),
        "✗": "x",
        "✓": "v",
        "◐": "o",
        "●": "*",
        "·": ".",
        "…": "~",
        "–": "-",
        "—": "-",
        "−": "-",
        "→": ">",
        "←": "<",
        "↳": ">",
        "↑": "^",
        "↓": "v",
        "▲": "^",
        "▼": "v",
        "▸": ">",
        "▶": ">",
        "×": "x",
        "≤": "<",
        "≥": ">",
        "²": "2",
        "○": "o",
        "‖": "|",
        "⏎": "<",
        **{chr(code): "*" for code in range(0x2801, 0x2900)},
    }
)


class InputDecoder:
    """Bytes of the terminal to text, incrementally; never raises, and drops legacy mouse reports whole."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pending = b""

    def decode(self, data: bytes, final: bool = False) -> str:
        """Text of ``data`` and what was held back before; an unfinished report waits for its rest."""
        data = _LEGACY_MOUSE.sub(b"", self._pending + data)
        tail = None if final else _UNFINISHED.search(data)
        # A lone ESC is a key: only what has begun to look like a mouse report waits.
        if tail is not None and len(tail.group()) >= 3:
            data, self._pending = data[: tail.start()], data[tail.start() :]
        else:
            self._pending = b""
        return self._utf8.decode(data, final)


def _our_decoder(encoding: str) -> Any:
    return InputDecoder


class Driver(linux_driver.LinuxDriver):
    """Textual's Linux driver with a decoder that cannot fail, and signs a plain terminal can show."""

    def __init__(self, app: Any, **options: Any) -> None:
        super().__init__(app, **options)
        self._plain = not terminal.speaks_unicode()

    def run_input_thread(self) -> None:
        """As Textual does, with our decoder in the place of the strict one that its module looks up by name."""
        linux_driver.getincrementaldecoder = _our_decoder  # pyright: ignore[reportPrivateImportUsage]
        super().run_input_thread()

    def toggle_mouse(self) -> bool:
        """Switch mouse reports off or on; returns whether they are on now."""
        if self._mouse:
            self._disable_mouse_support()
            self._mouse = False
        else:
            self._mouse = True
            self._enable_mouse_support()
        return self._mouse

    def write(self, data: str) -> None:
        """Write to the terminal."""
        super().write(data.translate(_ASCII) if self._plain else data)
