"""Puts the measured tables into docs/performance.md, so that no figure is typed by hand.

Between `<!-- table: NAME.json -->` and `<!-- end -->` stands what `benchmarks/results/NAME.json`
says, or that it was not measured yet.

    python benchmarks/tables.py             # rewrites the page
    python benchmarks/tables.py --check     # exit code 1 if a table is not what its file says
"""

import argparse
import json
import re
import sys
from pathlib import Path

from bonsai_ft.bench import markdown

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"
TABLE = re.compile(r"<!-- table: ([\w.-]+\.json) -->\n.*?<!-- end -->", re.DOTALL)


def filled(text: str, results: Path) -> str:
    """The page with every table as its file has it now."""

    def table(match: re.Match[str]) -> str:
        path = results / match[1]
        body = "Not measured yet."
        if path.is_file():
            body = markdown(json.loads(path.read_text(encoding="utf-8")))
        return f"<!-- table: {match[1]} -->\n\n{body}\n\n<!-- end -->"

    return TABLE.sub(table, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    before = args.page.read_text(encoding="utf-8")
    after = filled(before, args.results)
    if args.check:
        if after != before:
            sys.exit(f"{args.page}: a table is not what its file says; run benchmarks/tables.py")
        return
    args.page.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
