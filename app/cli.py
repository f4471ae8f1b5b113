"""The command line: dispatch on the first word; a command's module is imported when it runs."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import keyword
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .output import UNUSABLE, CommandError, narrate
from .text import one_line, stand_in

#: Every command, in the order a newcomer needs them.
COMMANDS = {
    "demo": "train a small model until it breaks, and see what llmconsole makes of it",
    "analyze": "name the first place where a run left the expected path",
    "import": "make a capsule of raw evidence: logs, trainer states, event files",
    "show": "what a capsule holds, and whether it can be replayed",
    "diff": "the first step at which two runs part, and whether it looks like a fault",
    "shrink": "the smallest script that still hangs or fails as the ranks of a job did",
    "probe": "what a data loader yields, before any training",
    "rules": "every check; with an id, its documentation",
    "cases": "search the log of resolved incidents",
    "incident": "resolve an incident: a case in the log, committed",
    "gate": "prove a fix in six items, and keep the proof in git",
    "env": "the environment as a capsule would record it",
    "doctor": "what this machine offers, and what to do about what it lacks",
}

_INTERRUPTED = 130
_BROKEN_PIPE = 141


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line and leave with status 2."""
        raise CommandError(f"{message}; see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:  # pyright: ignore
        """As argparse does, but what is left over is an error, of an action's own parser too; it says what is near."""
        found, left = super().parse_known_args(args, namespace)
        if left:
            near = (self._nearest(each.partition("=")[0]) for each in left if each.startswith("-"))
            advice = next((f" (did you mean {each}?)" for each in near if each), "")
            self.error(f"unrecognized arguments: {' '.join(left)}{advice}")
        return found, left

    def _nearest(self, option: str) -> str:
        """The option of this parser that somebody may have meant, or nothing."""
        import difflib

        known = list(self._option_string_actions)
        begins = [each for each in known if len(option) > 2 and each.startswith(option)]
        return next(iter(begins or difflib.get_close_matches(option, known, n=1)), "")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 nothing found, 1 findings, 2 unusable path or usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # A terminal that cannot show a sign gets an escape for it, never an encoding error.
    if sys.stdout is None:  # closed by the caller (`>&-`)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    codecs.register_error("llmconsole.stand-in", stand_in)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="llmconsole.stand-in")  # pyright: ignore
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()
        return status
    except CommandError as error:
        narrate(error)
        return UNUSABLE
    except KeyboardInterrupt:
        narrate("interrupted")
        return _INTERRUPTED
    except BrokenPipeError:
        _silence_output()
        return _BROKEN_PIPE
    except OSError as error:
        # A name that is missing is the working directory's: standard output has none to miss.
        where = "the working directory" if isinstance(error, FileNotFoundError) else "standard output"
        narrate(f"{error.filename or where}: {error.strerror or error}")
        _silence_output()
        return UNUSABLE
    except SystemExit as leaving:  # --help and --version of argparse
        return leaving.code if isinstance(leaving.code, int) else UNUSABLE
    except Exception as error:
        if os.environ.get("LLMCONSOLE_DEBUG"):
            raise
        narrate(
            f"internal error, {type(error).__name__}: {one_line(error, 300)}; "
            "please report it (LLMCONSOLE_DEBUG=1 shows where it happened)"
        )
        return UNUSABLE


def _silence_output() -> None:
    """Where standard output leads nowhere (`| head`, a full disk), Python would complain again at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: list[str]) -> int:
    word = arguments[0] if arguments else ""
    if word in ("-h", "--help", "help"):
        print(_help())
        return 0
    if word in ("-V", "--version", "version"):
        print(f"llmconsole {_version()}")
        return 0
    if word in COMMANDS:
        return _run(word, arguments[1:])
    if word.startswith("-"):
        command = next((at for at, each in enumerate(arguments) if not each.startswith("-")), 0)
        if arguments[command] in COMMANDS and not os.path.isdir(arguments[command]):
            right = " ".join(map(shlex.quote, [*arguments[command:], *arguments[:command]]))
            raise CommandError(f"options come after the command: llmconsole {right}")
    if not word or os.path.isdir(word) or word.startswith("-"):
        return _run("home", arguments)
    raise CommandError(_unknown(word))


def _run(command: str, arguments: list[str]) -> int:
    from importlib import import_module

    name = f"{command}_" if keyword.iskeyword(command) else command
    module = import_module(f".commands.{name}", __package__)
    prog = "llmconsole" if command == "home" else f"llmconsole {command}"
    parser = Parser(
        prog=prog,
        description=module.__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    status = module.run(parser.parse_args(arguments))
    return int(status)


def _unknown(word: str) -> str:
    import difflib

    if os.path.exists(word):
        return f"{word} is a file, not a command: llmconsole analyze {word}"
    near = difflib.get_close_matches(word, COMMANDS, n=1)
    advice = f"did you mean llmconsole {near[0]}?" if near else "llmconsole --help lists the commands"
    return f"no command and no directory is called {word}; {advice}"


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {line}" for name, line in COMMANDS.items())
    return f"""\
usage: llmconsole [DIR]            the capsules of a directory (default LLMCONSOLE_DIR, else this one)
       llmconsole COMMAND …        one of the commands below; COMMAND --help says more

{commands}

Every command takes --json. Exit status: 0 nothing found, 1 findings of severity warning or above,
2 a path that cannot be used, or a wrong command line."""


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("llmconsole")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
