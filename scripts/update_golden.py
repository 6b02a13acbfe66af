#!/usr/bin/env python3
"""Writes the golden digests anew: tests/python/golden/operators.json and smollm2.json.

    python scripts/update_golden.py           says which digests differ from the committed ones; writes nothing
    python scripts/update_golden.py --write   writes them

Every digest that changes is a promise that is broken: weights packed by an earlier version, logits and tokens that
users saw come out different. Write only when that is intended, and say in the commit why. Operators are digested at the
scalar reference level; SmolLM2, which takes half a minute a scheme there, at this CPU's best one.
tests/python/test_golden.py then compares every level of every CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "python")]

import golden_cases as golden  # noqa: E402
import torch  # noqa: E402

import tle_torch  # noqa: E402
from tle_torch.ops import _C  # noqa: E402


def fetched(thing: str) -> Path:
    """The path of something that scripts/fetch.py brings."""
    command = [sys.executable, str(ROOT / "scripts" / "fetch.py"), thing]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().splitlines()[-1])


def smollm2() -> dict[str, dict[str, object]]:
    """Digests of SmolLM2 with every scheme and from the GGUF file's own codes."""
    results = {}
    for scheme in [*tle_torch.schemes(), golden.GGUF]:
        print(f"SmolLM2, {scheme} ...", flush=True)
        results[scheme] = golden.smollm2_digests(golden.smollm2_model(scheme, fetched))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the files; without it, only compare")
    options = parser.parse_args()
    _C.set_isa("ref")
    operators = {}
    for cases in golden.CASES:
        operators |= golden.operator_digests(cases)
    _C.set_isa("")
    differing = 0
    for path, now in ((golden.OPERATORS, operators), (golden.SMOLLM2, smollm2())):
        before = golden.read(path) if path.exists() else {}
        changed = [name for name in sorted(now.keys() & before.keys()) if now[name] != before[name]]
        added, removed = sorted(now.keys() - before.keys()), sorted(before.keys() - now.keys())
        for what, names in (("CHANGED", changed), ("new", added), ("gone", removed)):
            print("\n".join(f"{path.name}: {what}: {name}" for name in names), end="\n" if names else "")
        differing += len(changed) + len(added) + len(removed)
        if changed:
            warning = f"{len(changed)} results in {path.name} are not the bits that they were."
            print(f"\nWARNING: {warning}\n", file=sys.stderr)
        if options.write:
            golden.write(path, now)
    print(f"{differing} digests differ from the committed ones" + (", written" if options.write else ""))
    return 1 if differing and not options.write else 0


if __name__ == "__main__":
    sys.exit(main())
