"""What `make bench-peers` runs: the comparisons with the packages themselves, lightly and OpenCV, in .venv-peers.

    .venv/bin/python benchmarks/peers.py [SECTION …]

It has a venv of its own, which sees the packages of .venv, because what these bring along must not change them. What
cannot be installed is told in one line, and left out.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
VENV = ROOT / ".venv-peers"
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'benchmarks'}"}
# Each package, the section that it is for, and what must work there.
PEERS = {
    "lightly": ("rivals", "from sections.contestant import import_lightly; import_lightly()"),
    "opencv-python-headless": ("capture", "import cv2"),
}


def main() -> None:
    if "--help" in sys.argv:
        print(__doc__)
        return
    python = make_venv(VENV)
    sections = []
    for package, (section, trial) in PEERS.items():
        if section in (sys.argv[1:] or [section]):
            if problem := install(python, package) or failure(python, "-c", trial):
                print(f"{package} is left out: {problem}")
            else:
                sections.append(section)
    if sections:
        sys.exit(subprocess.call([python, ROOT / "benchmarks" / "bench.py", *sections], env=ENVIRONMENT))


def make_venv(place: Path) -> Path:
    """Its Python."""
    if not place.exists():
        venv.create(place, with_pip=True, symlinks=True)
    own, usual = (sysconfig.get_path("purelib", vars=vars_of) for vars_of in ({"base": str(place)}, None))
    (Path(own) / "packages-of-streamclr.pth").write_text(f"import site; site.addsitedir({usual!r})\n")
    return place / "bin" / "python"


def install(python: Path, package: str) -> str:
    """As far as the versions in constraints.txt allow; why not, if not."""
    words = ["install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
    return failure(python, "-m", "pip", *words, "-c", str(ROOT / "constraints.txt"), package)


def failure(python: Path, *words: str) -> str:
    """Why Python failed with these words, in a line; empty if it did not."""
    done = subprocess.run([python, *words], capture_output=True, text=True, env=ENVIRONMENT)
    if not done.returncode:
        return ""
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return next((line for line in lines if line.startswith("ERROR: ")), lines[-1]).removeprefix("ERROR: ")


if __name__ == "__main__":
    main()
