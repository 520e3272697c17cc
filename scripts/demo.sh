#!/usr/bin/env bash
# Run the quick start: `make demo`, or with arguments `make demo ARGS="..."`. Expects scripts/setup.sh to have run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec .venv/bin/python examples/quickstart/demo.py "$@"
