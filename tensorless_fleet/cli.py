# SPDX-License-Identifier: Apache-2.0
"""The ``tensorless`` command. Imports little: ``info`` and ``models`` must start no Ansible and answer at once."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import NoReturn

from tensorless_fleet import _usage
from tensorless_fleet._commands import BY_NAME
from tensorless_fleet._usage import Options, Usage
from tensorless_fleet.errors import Interrupted, TensorlessError, UsageError

SEE_HELP = "Run 'tensorless help' for usage."
# What shows nothing of the collection may run beside another version of it.
ALONE = ("help", "version", "completion", "capabilities")


def main(argv: list[str] | None = None) -> int:
    """Runs one command line and returns its exit code: 0, 1, 2 or 130."""
    _streams()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        from tensorless_fleet import _help

        sys.stdout.write(_help.overview())
        return 2
    try:
        code = _answer(words)
        sys.stdout.flush()  # what cannot be written is said here, not by Python at the very end
        return code
    except Usage as error:
        return _refuse(str(error), 2)
    except UsageError as error:
        return _refuse(str(error), 2)
    except Interrupted as error:
        sys.stderr.write(f"tensorless: {error}\n")
        return 130
    except TensorlessError as error:
        return _refuse(str(error), 1)
    except KeyboardInterrupt:
        sys.stderr.write("tensorless: interrupted\n")
        return 130
    except BrokenPipeError:
        # The reader of a pipe went away (`| head`): nothing is left to say, at exit neither.
        _silence()
        return 1
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            where = error.filename or "the output"
            _silence()
            return _refuse(f"cannot write {where}: {error.strerror}; make room, or write elsewhere", 1)
        from ansible_collections.tensorless.fleet.plugins.module_utils._refusal import Refusal
        from ansible_collections.tensorless.fleet.plugins.module_utils._runtime import RuntimeUnavailable

        if isinstance(error, Refusal):
            return _refuse(error.message, error.rc)
        if isinstance(error, RuntimeUnavailable):
            return _refuse(str(error), 1)
        return _broken(error)


def _streams() -> None:
    """A program may be started without standard output, or in a locale that lacks letters of a host's message."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() not in ("utf-8", "utf8"):
            stream.reconfigure(errors="backslashreplace")


def _silence() -> None:
    """What is left in the buffer of standard output goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(message: str, code: int) -> int:
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    sys.stderr.write(f"tensorless: {message}\n")
    if code == 2:
        sys.stderr.write(SEE_HELP + "\n")
    return code


def _broken(error: Exception) -> int:
    """A fault of this program: one line, and the trace in a file for the report."""
    import traceback

    from tensorless_fleet._private import Log

    log = Log("fault")
    log.write("".join(traceback.format_exception(error)))
    log.close()
    where = f"; the trace is in {log.path}" if log.path else ""
    return _refuse(f"internal fault: {type(error).__name__}: {error}{where}. Please report it", 1)


def _answer(words: list[str]) -> int:
    if words[0] == "help" and len(words) > 1 and words[1] in BY_NAME:
        words = [words[1], "-h"]
    options = _usage.parse(words)
    if options.help and options.command != "help":
        from tensorless_fleet import _help

        sys.stdout.write(_help.of_command(BY_NAME[options.command]))
        return 0
    if options.command not in ALONE:
        from tensorless_fleet import _collection

        _collection.refuse_other_versions(dict(os.environ))
    if options.inventory:
        from tensorless_fleet import _remote

        return _remote.answer(options)
    return _here(options)


def _here(options: Options) -> int:
    """A command on this machine."""
    if options.command in ("help", "completion"):
        from tensorless_fleet import _help

    if options.command == "help":
        sys.stdout.write(_help.overview())
    elif options.command == "version":
        from tensorless_fleet import _version

        sys.stdout.write(_version.version_line())
    elif options.command == "completion":
        sys.stdout.write(_help.completion(options.operand or ""))
    elif options.command in ("models", "info", "capabilities") or options.dry_run:
        from tensorless_fleet import _show

        return int(_show.answer(options))
    else:
        from tensorless_fleet import _local

        return _local.answer(options)
    return 0


def entry() -> NoReturn:
    """For ``python -m tensorless_fleet``."""
    sys.exit(main())


if __name__ == "__main__":
    entry()
