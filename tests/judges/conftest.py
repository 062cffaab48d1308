"""Collects the judges' tests only if `make judges` has downloaded what they need.

With WEBGEMMA_JUDGES=1, which `make judges` sets, a missing part is an error."""

import os

import pytest
from helpers.judges import PARTS

MISSING = [str(part) for part in PARTS.values() if not part.exists()]
if MISSING and os.environ.get("WEBGEMMA_JUDGES"):
    raise pytest.UsageError(f"The judges need {', '.join(MISSING)}: tools/judges.sh makes them.")
collect_ignore_glob = ["test_*.py"] if MISSING else []
