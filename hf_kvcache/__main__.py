"""``python -m hf_kvcache plan --model ... --context 32768 --batch 8 --memory 80GiB``: what would a cache cost?"""

from __future__ import annotations

import argparse
import json
import sys

from .planner import SPECS, UNITS, parse_memory, plan


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m hf_kvcache", description="KV caches for transformers")
    commands = top.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("plan", help="bytes of a cache, and what fits, before anything is allocated")
    sub.add_argument("--model", required=True, help="a config.json, a folder that holds one, or a name on the hub")
    sub.add_argument("--context", type=int, default=8192, help="tokens per row, prompt and answer (default: 8192)")
    sub.add_argument("--batch", type=int, default=1, help="rows (default: 1)")
    sub.add_argument("--memory", help="of the device, such as 80GiB or 24GB: adds what fits, with 20 %% left free")
    sub.add_argument("--spec", nargs="+", default=None, help="the first is explained, all are in the table")
    sub.add_argument("--dtype", help="bfloat16, float16 or float32 (default: what the config says)")
    sub.add_argument("--weights", help="size of the weights, where they are not what the config says, such as 40GiB")
    sub.add_argument("--json", action="store_true", help="one object: the first spec, and all under 'table'")
    return top


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    try:
        print(_run(args))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(args: argparse.Namespace) -> str:
    names = list(dict.fromkeys([*(args.spec or ["full"]), *SPECS]))
    if args.memory is not None and args.memory.isdigit() and int(args.memory) < UNITS["MIB"]:
        raise ValueError(f"--memory {args.memory} is {args.memory} bytes: write a unit, such as {args.memory}GiB")
    weights = None if args.weights is None else parse_memory(args.weights)
    made = plan(
        args.model,
        args.context,
        args.batch,
        spec=names[0],
        dtype=args.dtype,
        device_memory=args.memory,
        weight_bytes=weights,
    )
    if args.json:
        table = [made.at(spec=name).as_dict() for name in names]
        return json.dumps({**made.as_dict(), "table": table}, indent=2)
    return f"{made}\n\n{made.table(names)}"


if __name__ == "__main__":
    sys.exit(main())
