"""The rules of accessibility that a page breaks, by axe-core."""

from pathlib import Path
from typing import Any

AXE = Path(__file__).resolve().parents[2] / "node_modules" / "axe-core" / "axe.min.js"
VIOLATIONS = """async () => (await axe.run()).violations.map(
  ({ id, help, nodes }) => `${id}: ${help}: ${nodes.map(({ html }) => html).join(" ")}`)"""


def violations(page: Any) -> list[str]:
    """Return the rules that the page breaks, and where."""
    page.evaluate(AXE.read_text(encoding="utf-8") + "; null")
    return list(page.evaluate(VIOLATIONS))
