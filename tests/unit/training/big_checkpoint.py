"""Run by a test in a process of its own: import and export a big checkpoint, and print how the memory grew.

Usage: python big_checkpoint.py FOLDER_OF_THE_CHECKPOINT OUT
"""

import json
import resource
import sys
from pathlib import Path

from joynexus.models.formats.expected import check_tensors
from joynexus.models.formats.lerobot import open_lerobot
from joynexus.training.put_together import put_together
from joynexus.training.take_apart import take_apart


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    check_tensors(open_lerobot(source))  # transformers is imported and its classes are built before the count starts
    before = peak_bytes()
    take_apart(open_lerobot(source), out / "in")
    put_together(out / "in" / "policy", out / "back", project="lerobot")
    sys.stdout.write(json.dumps({"growth": peak_bytes() - before}))


if __name__ == "__main__":
    main()
