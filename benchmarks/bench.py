"""Speed and memory, as ratios and sizes measured in one run: prints tables and writes results/DATE.md.

    .venv/bin/python benchmarks/bench.py [SECTION …]

Without arguments it measures all sections. A row with a target says whether it was met. Run nothing else meanwhile:
other work makes the times meaningless.
"""

import inspect
import sys
import time
from importlib import import_module
from pathlib import Path

from sections import SECTIONS
from sections.report import begin, say, write


def main() -> None:
    words = [word.replace("-", "_") for word in sys.argv[1:]]
    if "__help" in words:
        print(f"{__doc__}\nSections: {', '.join(SECTIONS)}")
        return
    if unknown := [word for word in words if word not in SECTIONS]:
        raise SystemExit(f"no section {unknown[0]!r}: {', '.join(SECTIONS)}")
    started = time.perf_counter()
    for name in words or SECTIONS:
        measure = getattr(import_module(f"sections.{SECTIONS[name]}"), name)
        begin(name, inspect.getdoc(measure))
        measure()
        say(f"{name}: {(time.perf_counter() - started) / 60:.1f} minutes so far")
    minutes = (time.perf_counter() - started) / 60
    file = write(Path(__file__).parent / "results", words, minutes)
    print(f"\n{minutes:.1f} minutes; written to benchmarks/results/{file.name}")


if __name__ == "__main__":
    main()
