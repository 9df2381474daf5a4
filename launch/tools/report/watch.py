"""`rlsys watch`: the page of a running run, served to this machine alone.

    browser ── GET /KEY/ ──────────────▶ page.html with its styles and scripts
            ── GET /KEY/main ──────────▶ everything but the samples, every two seconds;
                                         304: nothing is new; 202 with a sentence: the run has not started
            ── GET /KEY/numbers?after=N ▶ the numbers of samples written since answer N, and unreadable files;
                                         after each `main`, since samples are written later than metrics
            ── GET /KEY/texts-FILE, tokens-FILE ▶ when somebody looks at them

KEY is a secret that only the printed address contains: on a shared machine every user can reach 127.0.0.1.
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
from launch.tools.report.gather import ReportedRun, page_data
from launch.tools.report.page import build_page
from launch.tools.report.sample_pieces import (
    READ_ERRORS,
    compress_piece,
    describe_unreadable,
    sample_files,
    sample_numbers,
    sample_texts,
    sample_tokens,
)
from launch.tools.report.token_texts import load_token_texts
from rlsys.errors import ConfigError
from rlsys.runs.directory import FILES_BEFORE_CONFIG

PIECE = re.compile(r"(texts|tokens)-((?:step|eval)-\d+)")
HttpAnswer = tuple[int, str, bytes, str]  # status, type, body, tag


def watch(run: str, console: Console, *, port: int, open: bool) -> None:
    """Serves the page until Ctrl-C."""
    server = create_server(Path(run), port)
    address, name = server.address, server.watched.path.name
    print_line(console, f"{name}: {address}")
    tunnel = f"ssh -N -L {server.port}:127.0.0.1:{server.port} {socket.gethostname()}"
    print_line(console, f"From another machine: {tunnel}", "dim")
    if message := server.watched.waiting_message:
        print_line(console, message, "yellow")
    print_line(console, "The page follows the run by itself. Ctrl-C ends this; the run goes on.", "dim")
    if open:
        webbrowser.open(address)
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        print_line(console, "Ended. The run is not affected.")
    finally:
        server.server_close()


def create_server(run: Path, port: int) -> "WatchServer":
    """Binds a server that does not serve yet. The run may not have started; a path to something else is refused."""
    path = run.expanduser().resolve()
    parent = next(p for p in path.parents if p.exists())
    if not parent.is_dir():
        raise ConfigError(f"{parent} is a file: no run can be in it. Give the directory of a run, such as runs/demo.")
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
    """The numbers of one file of samples, as last read."""

    stamp: tuple[int, int]  # of the file: time and size
    serial: int  # number of the answer that first had it
    numbers: dict[str, Any] | None  # None: the file cannot be read
    error: str = ""


class WatchedRun:
    """A run that may still be going on. Everything read is kept until its file changes."""

    def __init__(self, path: Path):
        self.path = path
        self.started = (path / "config.yaml").is_file()
        self.lock = threading.Lock()
        self.tag, self.main = "", b""
        self.cache: dict[str, CachedNumbers] = {}  # by the name of the file
        self.serial = 0
        self.token_texts: Callable[[list[int]], list[str]] | None = None

    def page(self) -> bytes:
        return build_page(self.path.name, {}, live=True).encode()

    @property
    def waiting_message(self) -> str:
        """A sentence until the run has started, then nothing, even if the run is removed later."""
        self.started = self.started or (self.path / "config.yaml").is_file()
        return "" if self.started else f"There is no run in {self.path} yet; the page waits for it to begin."

    def main_data(self, known_tag: str) -> tuple[str, bytes]:
        """Returns the current tag and everything but the samples; no data if `known_tag` is current."""
        with self.lock:
            stamps = tuple(_stamp(self.path / name) for name in ("metrics.jsonl", "events.jsonl", "config.yaml"))
            tag = f'"{hash(stamps):x}"'
            if tag == known_tag:
                return tag, b""
            if tag != self.tag:
                data = page_data([ReportedRun.read(self.path)]) | {"left_out": ""}
                self.main, self.tag = compress_piece(data), tag
            return tag, self.main

    def numbers(self, after: int) -> bytes:
        """Returns the numbers of the files that were read after answer `after`."""
        with self.lock:
            self.cache = {file.stem: self._read_numbers(file) for file in sample_files(self.path)}
            new = [cached.numbers for cached in self.cache.values() if cached.serial > after and cached.numbers]
            errors = {name: cached.error for name, cached in self.cache.items() if cached.error}
            return compress_piece({"serial": self.serial, "files": new, "unread": describe_unreadable(errors)})

    def _read_numbers(self, file: Path) -> CachedNumbers:
        """Returns the cached numbers unless the file has changed: a half-copied one may be complete later."""
        stamp, cached = _stamp(file), self.cache.get(file.stem)
        if cached and cached.stamp == stamp:
            return cached
        self.serial += 1
        try:
            numbers = sample_numbers(file)
        except READ_ERRORS as error:
            return CachedNumbers(stamp, self.serial, None, str(error))
        return CachedNumbers(stamp, self.serial, numbers | {"kept": len(numbers["groups"])})

    def read_piece(self, kind: str, name: str) -> bytes | None:
        file = self.path / "samples" / f"{name}.parquet"
        if not file.is_file():
            return None
        if kind == "texts":
            return compress_piece(sample_texts(file))
        if self.token_texts is None:
            model = str(ReportedRun.read(self.path).options.get("model.path", ""))
            self.token_texts = load_token_texts(self.path, model)
        return compress_piece(sample_tokens(file, None, self.token_texts))

    def respond(self, path: str, query: dict[str, list[str]], known_tag: str) -> HttpAnswer:
        if path == "":
            return 200, "text/html; charset=utf-8", self.page(), ""
        if path == "main" and (message := self.waiting_message):
            return 202, "text/plain; charset=utf-8", message.encode(), ""
        if path == "main":
            tag, body = self.main_data(known_tag)
            return (200 if body else 304), "application/json", body, tag
        if path == "numbers":
            return 200, "application/json", self.numbers(int(query.get("after", ["0"])[0])), ""
        if (match := PIECE.fullmatch(path)) and (piece := self.read_piece(*match.groups())):
            return 200, "application/json", piece, ""
        return 404, "text/plain; charset=utf-8", b"There is no such page.", ""


def _stamp(file: Path) -> tuple[int, int]:
    try:
        stat = file.stat()
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size


class WatchServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, watched: WatchedRun, port: int):
        self.watched, self.key = watched, secrets.token_urlsafe(12)
        super().__init__(("127.0.0.1", port), WatchRequestHandler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores a browser that closed its connection before the answer."""
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

    def send(self, status: int, content_type: str, body: bytes, tag: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        if content_type == "application/json" and body:
            self.send_header("Content-Encoding", "gzip")
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Logs nothing by default, so that the address stays visible in the terminal."""
        if os.environ.get("RLSYS_TRACEBACK"):
            super().log_message(format, *arguments)
