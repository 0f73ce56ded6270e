"""`python -m eval COMMAND`: one subcommand per question, each in the module of its name."""

from __future__ import annotations

import argparse
from typing import Any

from eval import doctor, quality, report, retrieval, run, streaming, tasks

COMMANDS: dict[str, Any] = {
    "quality": quality,
    "retrieval": retrieval,
    "streaming": streaming,
    "doctor": doctor,
    "tasks": tasks,
    "run": run,
    "report": report,
}


def main(argv: list[str] | None = None) -> None:
    """Parse, run, and turn a refusal into one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m eval", description="Measure KV caches on your model and text.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").splitlines()[0]
        module.add_arguments(commands.add_parser(name, help=summary, description=summary))
    args = parser.parse_args(argv)
    try:
        COMMANDS[args.command].run(args)
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
