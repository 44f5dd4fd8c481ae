"""A small MJPEG camera on loopback that fails as told, and frames that carry a number."""

import contextlib
import io
import socket
import struct
import threading
import time

import numpy as np
from PIL import Image

BITS = 16  # of the number in a frame: a 4 x 4 chessboard


def numbered(number, size=(64, 64)):
    """A picture of a number."""
    board = np.array([255 * (number >> bit & 1) for bit in range(BITS)], np.uint8).reshape(4, 4)
    return Image.fromarray(board).resize(size, Image.Resampling.NEAREST).convert("RGB")


def number_of(image):
    """The number in a frame, 3 x n x n; None if it is no such picture."""
    n = image.shape[-1] // 4
    middles = image.float().mean(0)[n // 2 :: n, n // 2 :: n].flatten()
    if ((middles > 60) & (middles < 195)).any():
        return None
    return sum(int(value > 127) << bit for bit, value in enumerate(middles))


def jpeg(number, size=(64, 64)):
    buffer = io.BytesIO()
    numbered(number, size).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def write_clip(path, n=60, fps=30, size=64, codec="mpeg4"):
    """A clip whose frames carry their numbers."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width = stream.height = size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.bit_rate = 4_000_000
        for i in range(n):
            container.mux(stream.encode(av.VideoFrame.from_image(numbered(i, (size, size)))))
        container.mux(stream.encode())
    return path


class Camera:
    """Serves http://127.0.0.1:PORT/, frame after frame with rising numbers, to one client at a time.

    fps: frames a second; None sends as fast as the client takes them.
    faults: (after so many frames of a connection, what happens): see `_fault`.
    """

    def __init__(self, fps=200.0, faults=(), last=None):
        self.fps, self.faults, self.last = fps, list(faults), last
        self.n_sent = 0  # whole frames handed to the socket
        self.size = (64, 64)
        self.fault_times = []
        self.stop = threading.Event()
        self._listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _listen(self, port=0):
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/"

    def _serve(self):
        while not self.stop.is_set():
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            try:
                self._talk(client)
            except OSError:
                pass
            finally:
                client.close()

    def _talk(self, client):
        client.settimeout(5)
        client.recv(4096)
        after, fault = self.faults.pop(0) if self.faults else (None, None)
        if fault == "page":
            client.sendall(b"HTTP/1.0 200 OK\r\nContent-Type: text/html\r\n\r\n<p>log in</p>")
            self.fault_times.append(time.monotonic())
            return
        client.sendall(b"HTTP/1.0 200 OK\r\nContent-Type: multipart/x-mixed-replace; boundary=x\r\n\r\n")
        n = 0
        while not self.stop.is_set() and self.n_sent != self.last:
            if n == after:
                self.fault_times.append(time.monotonic())
                if self._fault(client, fault):
                    return
            if after is not None and n == 2 * after:  # a change of resolution has been lived through
                return
            content = jpeg(self.n_sent % 2**BITS, self.size)
            client.sendall(b"--x\r\nContent-Type: image/jpeg\r\n\r\n" + content + b"\r\n")
            self.n_sent += 1
            n += 1
            if self.fps:
                time.sleep(1 / self.fps)

    def _fault(self, client, fault):
        """True ends the connection."""
        if fault == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif fault == "stall":  # silence, and the connection stays: so does one of which the other end is gone
            while client.recv(4096):
                pass
        elif fault == "cut":
            client.sendall(b"--x\r\n\r\n" + jpeg(self.n_sent)[:300])
        elif fault == "resolution":
            self.size = {(64, 64): (128, 96), (128, 96): (64, 64)}[self.size]
            return False
        elif fault == "away":
            self._hang_up()
            time.sleep(0.7)
            self._listen(self.port)
            threading.Thread(target=self._serve, daemon=True).start()
        return True

    def _hang_up(self):
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts, else the port stays open
        self._socket.close()

    def close(self):
        self.stop.set()
        self._hang_up()
