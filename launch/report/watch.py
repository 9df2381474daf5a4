"""`rlsys watch`: the page of a run that goes on, served to this machine alone.

    browser ── GET /KEY/ ──────────────▶ page.html, its styles and scripts
            ── GET /KEY/main ──────────▶ all but the samples; 304 where nothing is new, and 202 with a sentence where the run has
                                         not begun (every two seconds)
            ── GET /KEY/numbers?after=N ▶ the numbers of samples that were written since the answer N, and which cannot be read
                                         (with each `main`, new or not: samples are written behind the line of their step)
            ── GET /KEY/texts-FILE, tokens-FILE ▶ when somebody looks at them

KEY is a secret that only the printed address has: on a shared machine 127.0.0.1 is everybody's.
"""

import os
import re
import secrets
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rich.console import Console

from launch.printing import print_line
from launch.report.gather import ReportedRun, page_data
from launch.report.page import build_page
from launch.report.sample_pieces import (
    READ_ERRORS,
    compress_piece,
    describe_unreadable,
    sample_files,
    sample_numbers,
    sample_texts,
    sample_tokens,
)
from launch.report.token_texts import load_token_texts
from rlsys.config.schema import ConfigError
from rlsys.runs.directory import FILES_BEFORE_CONFIG

PIECE = re.compile(r"(texts|tokens)-((?:step|eval)-\d+)")
HttpAnswer = tuple[int, str, bytes, str]  # status, type, body, tag


def watch(run: str, console: Console, *, port: int, open: bool) -> None:
    """Serves until Ctrl-C."""
    server = create_server(Path(run), port)
    address = server.address
    print_line(console, f"{server.watched.path.name}: {address}")
    print_line(
        console, f"From another machine: ssh -N -L {server.port}:127.0.0.1:{server.port} {socket.gethostname()}", "dim"
    )
    if waits := server.watched.waiting_message:
        print_line(console, waits, "yellow")
    print_line(console, "The page follows the run by itself. Ctrl-C ends this; the run goes on.", "dim")
    if open:
        webbrowser.open(address)
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        print_line(console, "Ended. The run is as it was.")
    finally:
        server.server_close()


def create_server(run: Path, port: int) -> "WatchServer":
    """A server that is bound and not yet serving. The run may not have begun; what is there and is no run is refused."""
    path = run.expanduser().resolve()
    above = next(p for p in path.parents if p.exists())
    if not above.is_dir():
        raise ConfigError(f"{above} is a file: no run can be in it. Give the directory of a run, such as runs/demo.")
    if path.exists() and not (path.is_dir() and all(p.name in FILES_BEFORE_CONFIG for p in path.iterdir())):
        ReportedRun.read(path)
    try:
        return WatchServer(WatchedRun(path), port)
    except OSError as error:
        raise ConfigError(
            f"--port: {port} on 127.0.0.1 cannot be used: {error.strerror}. Choose another, or 0 for any free one."
        ) from None


@dataclass(frozen=True)
class CachedNumbers:
    """A file of samples as it was read."""

    stamp: tuple[int, int]
    serial: int  # of the answer that was the first to have it
    numbers: dict[str, Any] | None  # None: it cannot be read
    why: str = ""


class WatchedRun:
    """What there is of a run now. What was read is kept as long as its file is the same."""

    def __init__(self, path: Path):
        self.path = path
        self.started = (path / "config.yaml").is_file()
        self.lock = threading.Lock()
        self.tag, self.main = "", b""
        self.cache: dict[str, CachedNumbers] = {}  # by the file's name
        self.serial = 0
        self.words: Callable[[list[int]], list[str]] | None = None

    def page(self) -> bytes:
        return build_page(self.path.name, {}, live=True).encode()

    @property
    def waiting_message(self) -> str:
        """A sentence, until the run has begun. One that has, and was removed, is not waited for."""
        self.started = self.started or (self.path / "config.yaml").is_file()
        return "" if self.started else f"There is no run in {self.path} yet; the page waits for it to begin."

    def main_data(self, have: str) -> tuple[str, bytes]:
        """All but the samples, and its tag; nothing where `have` is that tag."""
        with self.lock:
            tag = f'"{hash(tuple(_stamp(self.path / name) for name in ("metrics.jsonl", "events.jsonl", "config.yaml"))):x}"'
            if tag == have:
                return tag, b""
            if tag != self.tag:
                self.main, self.tag = compress_piece(page_data([ReportedRun.read(self.path)]) | {"left_out": ""}), tag
            return tag, self.main

    def numbers(self, after: int) -> bytes:
        with self.lock:
            self.cache = {file.stem: self._read(file) for file in sample_files(self.path)}
            new = [known.numbers for known in self.cache.values() if known.serial > after and known.numbers]
            why = {name: known.why for name, known in self.cache.items() if known.why}
            return compress_piece({"serial": self.serial, "found": new, "unread": describe_unreadable(why)})

    def _read(self, file: Path) -> CachedNumbers:
        """As it is known, unless it has changed: one that is damaged, or half copied, may be whole the next time."""
        stamp, known = _stamp(file), self.cache.get(file.stem)
        if known and known.stamp == stamp:
            return known
        self.serial += 1
        try:
            found = sample_numbers(file)
        except READ_ERRORS as error:
            return CachedNumbers(stamp, self.serial, None, str(error))
        return CachedNumbers(stamp, self.serial, found | {"kept": len(found["groups"])})

    def read_piece(self, kind: str, name: str) -> bytes | None:
        file = self.path / "samples" / f"{name}.parquet"
        if not file.is_file():
            return None
        if kind == "texts":
            return compress_piece(sample_texts(file))
        self.words = self.words or load_token_texts(
            self.path, str(ReportedRun.read(self.path).options.get("model.path", ""))
        )
        return compress_piece(sample_tokens(file, None, self.words))

    def respond(self, path: str, query: dict[str, list[str]], have: str) -> HttpAnswer:
        if path == "":
            return 200, "text/html; charset=utf-8", self.page(), ""
        if path == "main" and (waits := self.waiting_message):
            return 202, "text/plain; charset=utf-8", waits.encode(), ""
        if path == "main":
            tag, body = self.main_data(have)
            return (200 if body else 304), "application/json", body, tag
        if path == "numbers":
            return 200, "application/json", self.numbers(int(query.get("after", ["0"])[0])), ""
        if (wanted := PIECE.fullmatch(path)) and (piece := self.read_piece(*wanted.groups())):
            return 200, "application/json", piece, ""
        return 404, "text/plain; charset=utf-8", b"There is no such thing here.", ""


def _stamp(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


class WatchServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, watched: WatchedRun, port: int):
        self.watched, self.key = watched, secrets.token_urlsafe(12)
        super().__init__(("127.0.0.1", port), WatchRequestHandler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that has gone before it had its answer is no error of ours."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/{self.key}/"


class WatchRequestHandler(BaseHTTPRequestHandler):
    server: WatchServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        key, slash, path = url.path.removeprefix("/").partition("/")
        if not slash or not secrets.compare_digest(key.encode(), self.server.key.encode()):
            return self.send(
                404, "text/plain; charset=utf-8", b"The address is the whole line that rlsys watch has printed.", ""
            )
        try:
            self.send(*self.server.watched.respond(path, parse_qs(url.query), self.headers.get("If-None-Match", "")))
        except ConnectionError:
            raise
        except (ConfigError, ValueError, OSError) as error:  # for instance the run was removed
            self.send(503, "text/plain; charset=utf-8", str(error).encode(), "")

    def send(self, status: int, kind: str, body: bytes, tag: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        if kind == "application/json" and body:
            self.send_header("Content-Encoding", "gzip")
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: the terminal has the address, and keeps it in sight."""
        if os.environ.get("RLSYS_TRACEBACK"):
            super().log_message(format, *arguments)
