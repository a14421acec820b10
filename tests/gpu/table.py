# SPDX-License-Identifier: LGPL-3.0-or-later
"""Print the JSON file of the tests on a device as one table."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def rows(path: Path) -> list[str]:
    """One line for each test: outcome, seconds, name, figures."""
    content = json.loads(path.read_text())
    lines = [", ".join(f"{key} {value}" for key, value in content["machine"].items())]
    for name, row in content["tests"].items():
        test = name.split("::")[-1].removeprefix("test_").replace("_", " ")
        figures = ", ".join(
            f"{key} {value}" for key, value in row.get("figures", {}).items()
        )
        lines.append(
            f"{row.get('outcome', 'lost'):<8}{row.get('seconds', 0):>7.2f} s  {test}"
            + (f"  [{figures}]" if figures else "")
        )
    counted = [row.get("outcome", "lost") for row in content["tests"].values()]
    lines.append(
        ", ".join(f"{counted.count(kind)} {kind}" for kind in sorted(set(counted)))
    )
    return lines


if __name__ == "__main__":
    file = Path(sys.argv[1])
    print("\n".join(rows(file)) if file.exists() else f"no {file}: no test ran")
