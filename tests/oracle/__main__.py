"""The whole table, as Markdown.

python -m tests.oracle                                       # every template, layout and objective; minutes
python -m tests.oracle --template 'Llama 3' --layout 'TP 2'  # a part of it
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.oracle.table import LAYOUTS, OBJECTIVES, Difference, cells, markdown, measure
from tests.oracle.templates import TEMPLATES
from tests.oracle.workspace import Workspace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, rows in (("template", TEMPLATES), ("layout", LAYOUTS), ("objective", OBJECTIVES)):
        parser.add_argument(f"--{option}", action="append", choices=[row.name for row in rows])
    chosen = parser.parse_args()
    templates = [one for one in TEMPLATES if one.name in (chosen.template or [one.name])]
    layouts = [one for one in LAYOUTS if one.name in (chosen.layout or [one.name])]
    objectives = [one for one in OBJECTIVES if one.name in (chosen.objective or [one.name])]
    with tempfile.TemporaryDirectory() as directory:
        workspace, selected = Workspace(Path(directory) / "workspace"), cells(templates, layouts, objectives)
        found: list[Difference] = []
        for difference in measure(workspace, selected, Path(directory) / "runs"):
            sys.stderr.write(f"{len(found) + 1}/{len(selected)} {difference}\n")
            found.append(difference)
    sys.stdout.write(f"{markdown(found)}\n")
    sys.exit(0 if all(one.equal for one in found) else 1)


if __name__ == "__main__":
    main()
