"""`python -m eval COMMAND`: one subcommand per question, each in the module of its name."""

from __future__ import annotations

import argparse
from typing import Any

from eval import doctor, profile, quality, report, retrieval, run, streaming, tasks
from eval.ranks import launched

COMMANDS: dict[str, Any] = {
    "quality": quality,
    "retrieval": retrieval,
    "streaming": streaming,
    "doctor": doctor,
    "profile": profile,
    "tasks": tasks,
    "run": run,
    "report": report,
}


def parser() -> argparse.ArgumentParser:
    """The command line: a subcommand for each module."""
    parser = argparse.ArgumentParser(prog="python -m eval", description="Measure KV caches on your model and text.")
    commands = parser.add_subparsers(dest="command")
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").splitlines()[0]
        module.add_arguments(commands.add_parser(name, help=summary, description=summary))
    return parser


def main(argv: list[str] | None = None) -> None:
    """Parse, run, and turn a refusal into one line on stderr."""
    args = parser().parse_args(argv)
    if args.command is None:
        parser().print_help()
        return
    try:
        if launched() > 1 and args.command != "run":
            raise ValueError(f"{args.command} runs in one process, and {launched()} were launched: only run is shared")
        COMMANDS[args.command].run(args)
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
