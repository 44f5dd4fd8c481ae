"""A camera on loopback: MJPEG at a steady rate, from a clip that is played again and again.

    python benchmarks/camera.py CLIP FPS

Prints its URL, and runs until standard input closes.
"""

import io
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import av

MAX_FRAMES = 300  # of the clip, which are held in memory


def jpegs(clip: str) -> list[bytes]:
    found = []
    with av.open(clip) as container:
        for frame in container.decode(video=0):
            file = io.BytesIO()
            frame.to_image().save(file, "JPEG", quality=85)
            found.append(file.getvalue())
            if len(found) == MAX_FRAMES:
                break
    return found


def main() -> None:
    frames, fps = jpegs(sys.argv[1]), float(sys.argv[2])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=x")
            self.end_headers()
            started, n = time.monotonic(), 0
            try:
                while True:
                    time.sleep(max(0.0, started + n / fps - time.monotonic()))
                    frame = frames[n % len(frames)]
                    head = f"--x\r\nContent-Type: image/jpeg\r\nContent-Length: {len(frame)}\r\n\r\n"
                    self.wfile.write(head.encode() + frame + b"\r\n")
                    n += 1
            except OSError:
                pass  # the client has gone

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port}/", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
