"""What every test shares: where the fixtures stand."""

from pathlib import Path

import pytest

FIXTURES = Path(__file__).resolve().parent / "fixtures"
SHARED = Path(__file__).resolve().parents[2] / "shared" / "fixtures"

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/fixtures")
