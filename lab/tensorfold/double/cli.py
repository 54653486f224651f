"""The program: what `tensorfold` does for each subcommand, and with which exit code it ends."""

import os
import sys
from collections.abc import Sequence

from . import NOTICE
from .checkpoint import read_checkpoint
from .parser import build_parser, with_serve

__all__ = ["build_parser", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code.

    A missing file or a wrong value is one line and 1; anything else raises, which is a traceback and 1.
    """
    print(NOTICE, file=sys.stderr, flush=True)
    args = build_parser().parse_args(with_serve(list(sys.argv[1:] if argv is None else argv)))
    try:
        match args.command:
            case "serve":
                from .rank import serve  # the server's libraries are not needed to parse arguments

                return serve(args, os.environ)
            case "info":
                print("\n".join(read_checkpoint(args.model, os.environ).info()))
            case "pull":
                raise ValueError(f"the double downloads nothing ({' '.join(args.repos)})")
            case "models" | "update":
                print(f"tensorfold {args.command}: nothing here; this is a double")
    except (FileNotFoundError, ValueError) as error:
        print(f"tensorfold: {error}", file=sys.stderr, flush=True)
        return 1
    return 0
