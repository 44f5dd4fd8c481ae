"""Files from the network."""

import urllib.request
from pathlib import Path

from streamclr.base.progress import Progress


def download(url: str, file: Path, timeout: float = 30) -> None:
    """Get a file, with a progress bar. What goes wrong is an OSError or an HTTPException; the caller checks the file.

    timeout: seconds without an answer after which it is given up.
    """
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        size = int(answer.headers.get("Content-Length", 0)) or None
        with file.open("wb") as out, Progress(f"getting {file.name}", size) as bar:
            while chunk := answer.read(2**20):
                out.write(chunk)
                bar.advance(len(chunk))
