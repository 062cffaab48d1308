"""What every test shares: where the fixtures stand."""

from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is slow now and then: how long an example takes says nothing about the code.
settings.register_profile("webgemma", deadline=None)
settings.load_profile("webgemma")

FIXTURES = Path(__file__).resolve().parent / "fixtures"
SHARED = Path(__file__).resolve().parents[2] / "shared" / "fixtures"

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/fixtures")
