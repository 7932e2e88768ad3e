"""The configuration reference of the guide, made from the code: `python -m toto_compat.production.reference GUIDE`."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from toto_compat.production.metrics import PREFIX, ROWS
from toto_compat.verdict.switch_lines import MEANINGS

BEGIN = "<!-- made from the code: python -m toto_compat.production.reference docs/production.md -->"
END = "<!-- end of what is made from the code -->"
_GUARD = Path(__file__).with_name("guard.py")


def reference() -> str:
    """Write the tables: variables, the guard's arguments with their defaults, metrics."""
    lines = ["### Variables", "", "| variable | means |", "|---|---|"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in MEANINGS.items()]
    for title in ("Budget", "Shadow"):
        lines += ["", f"### `{title}`", "", "| argument | default | means |", "|---|---|---|"]
        lines += [f"| `{name}` | `{default}` | {means} |" for name, default, means in _fields(title)]
    lines += ["", "### Metrics", "", "| metric | kind | means |", "|---|---|---|"]
    lines += [f"| `{PREFIX}{row.name}` | {row.kind} | {row.help} |" for row in ROWS]
    return "\n".join(lines)


def _fields(title: str) -> Iterator[tuple[str, str, str]]:
    """Read a dataclass of the guard's without importing it: the guard needs torch."""
    text = _GUARD.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == title:
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and field.value is not None:
                    means = lines[field.lineno - 1].partition("  # ")[2]
                    yield ast.unparse(field.target), ast.unparse(field.value), means


def with_reference(guide: str) -> str:
    """Put the tables into the guide, between their marks."""
    before, _, rest = guide.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n\n{reference()}\n\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_reference(path.read_text(encoding="utf-8")), encoding="utf-8")
