"""A small MJPEG camera on loopback that fails as told, and frames that carry a number."""

import contextlib
import io
import select
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


def write_two_scenes(path, n=120, side=96):
    """A clip of two scenes that a person tells apart at a glance: a red disc that moves, then a blue square."""
    import av

    y, x = np.mgrid[:side, :side]
    rng = np.random.default_rng(0)
    ground = rng.integers(60, 160, (side // 8, side // 8, 1)).repeat(8, 0).repeat(8, 1)
    ground = ground + rng.integers(-9, 10, ground.shape)  # rows that repeat would be taken for a smear
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=30)
        stream.width = stream.height = side
        stream.pix_fmt, stream.bit_rate = "yuv420p", 4_000_000
        for i in range(n):
            frame = ground.repeat(3, 2).astype(np.uint8)
            if i < n // 2:
                frame[(x - 24 - 0.8 * i) ** 2 + (y - 48) ** 2 < 500] = (230, 30, 30)
            else:
                frame[np.maximum(abs(x - 48), abs(y - 24 - 0.8 * (i - n // 2))) < 20] = (30, 30, 230)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


class HeldPort:
    """A port of this machine that nobody else is given, whether somebody listens at it at the moment or not."""

    def __init__(self):
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that others may listen who ask for it
        self._socket.bind(("127.0.0.1", 0))
        self.number = self._socket.getsockname()[1]

    def close(self):
        self._socket.close()


PAGES = {  # what a camera may send that is no stream
    "page": b"HTTP/1.0 200 OK\r\nContent-Type: text/html\r\n\r\n<p>log in</p>",
    "junk": b"\x00\xff what is this\r\n\r\n",
}


class Camera:
    """Serves http://127.0.0.1:PORT/, frame after frame with rising numbers, to one client at a time.

    fps: frames a second; None sends as fast as the client takes them.
    faults: (after so many frames of a connection, what happens): see `_fault`. One that did not come so far, because
        its client thought that it was too slow, happens to the next connection.
    last: frames after which it is silent, and the connection stays; it may be raised.
    """

    def __init__(self, fps=200.0, faults=(), last=None):
        self.fps, self.faults, self.last = fps, list(faults), last
        self.n_sent = 0  # whole frames handed to the socket
        self.size = (64, 64)
        self.fault_times = []
        self.stop = threading.Event()
        self._port = HeldPort()
        self.url = f"http://127.0.0.1:{self._port.number}/"
        self._listen()

    def _listen(self):
        self._socket = socket.create_server(("127.0.0.1", self._port.number))
        threading.Thread(target=self._serve, args=[self._socket], daemon=True).start()

    def _serve(self, listener):
        while not self.stop.is_set():
            try:
                client, _ = listener.accept()
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
        after, fault = self.faults[0] if self.faults else (None, None)
        if fault in PAGES:
            client.sendall(PAGES[fault])
            self._note_fault()
            return
        client.sendall(b"HTTP/1.0 200 OK\r\nContent-Type: multipart/x-mixed-replace; boundary=x\r\n\r\n")
        n = 0
        while not self.stop.is_set():
            if n == after:
                self._note_fault()
                if self._fault(client, fault):
                    return
            if after is not None and n == 2 * after:  # a change of resolution has been lived through
                return
            if self.last is not None and self.n_sent >= self.last:
                if select.select([client], [], [], 0.001)[0] and not client.recv(4096):  # it has gone
                    return
                continue
            content = jpeg(self.n_sent % 2**BITS, self.size)
            client.sendall(b"--x\r\nContent-Type: image/jpeg\r\n\r\n" + content + b"\r\n")
            self.n_sent += 1
            n += 1
            if self.fps:
                time.sleep(1 / self.fps)

    def _note_fault(self):
        self.fault_times.append(time.monotonic())
        self.faults.pop(0)

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
            self.hang_up()
            time.sleep(0.7)
            self._listen()
        return True

    def hang_up(self):
        """Whoever asks is refused from now on."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts, else the port stays open
        self._socket.close()

    def close(self):
        self.stop.set()
        self.hang_up()
        self._port.close()


class RtspCamera:
    """Serves rtsp://127.0.0.1:PORT/ over TCP, MPEG-4 video whose frames carry their numbers (RFC 2326, RFC 3016).

    stall_after, close_after: frames of a connection after which it is silent, or gone; of the first connection only.
    """

    def __init__(self, fps=50, stall_after=None, close_after=None):
        self.fps, self.stall_after, self.close_after = fps, stall_after, close_after
        self.n_connections = self.n_sent = 0
        self.stop = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"rtsp://127.0.0.1:{self._socket.getsockname()[1]}/live"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while not self.stop.is_set():
            with contextlib.suppress(OSError):
                client, _ = self._socket.accept()
                with client:
                    self.n_connections += 1
                    self._talk(client)

    def _talk(self, client):
        from fractions import Fraction

        import av

        encoder = av.CodecContext.create("mpeg4", "w")
        encoder.width = encoder.height = 64
        encoder.pix_fmt, encoder.time_base, encoder.framerate = "yuv420p", Fraction(1, self.fps), Fraction(self.fps)
        encoder.bit_rate, encoder.gop_size, encoder.flags = 4_000_000, 1, 1 << 22  # every frame by itself; header apart
        encoder.open()
        sdp = (
            "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=test\r\nt=0 0\r\n"
            "m=video 0 RTP/AVP 96\r\na=rtpmap:96 MP4V-ES/90000\r\n"
            f"a=fmtp:96 profile-level-id=1; config={encoder.extradata.hex()}\r\na=control:track1\r\n"
        )
        lines = client.makefile("rb")
        while True:
            method, sequence = lines.readline().split(b" ")[0].decode(), ""
            if not method:
                return
            while line := lines.readline().strip():
                if line.lower().startswith(b"cseq:"):
                    sequence = line.partition(b":")[2].decode().strip()
            extra = {
                "DESCRIBE": f"Content-Type: application/sdp\r\nContent-Length: {len(sdp)}\r\n\r\n{sdp}",
                "SETUP": "Transport: RTP/AVP/TCP;unicast;interleaved=0-1\r\nSession: 1\r\n\r\n",
                "PLAY": "Session: 1\r\n\r\n",
            }.get(method, "Public: DESCRIBE, SETUP, PLAY, TEARDOWN\r\n\r\n")
            client.sendall(f"RTSP/1.0 200 OK\r\nCSeq: {sequence}\r\n{extra}".encode())
            if method == "PLAY":
                break
        for i in range(10**9):
            if self.stop.is_set():
                return
            if self.n_connections == 1 and i in (self.stall_after, self.close_after):
                if i == self.close_after:
                    client.shutdown(socket.SHUT_WR)
                while client.recv(4096):  # what is unread when a socket closes takes frames with it that are on the way
                    pass
                return
            for packet in encoder.encode(av.VideoFrame.from_image(numbered(self.n_sent % 2**BITS))):
                stamp = int(i * 90_000 / self.fps)
                rtp = struct.pack(">BBHII", 0x80, 0x80 | 96, i % 2**16, stamp, 7) + bytes(packet)
                client.sendall(b"$\0" + struct.pack(">H", len(rtp)) + rtp)
            self.n_sent += 1
            time.sleep(1 / self.fps)

    def close(self):
        self.stop.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
