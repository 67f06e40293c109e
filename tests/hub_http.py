"""Request plumbing of the loopback Hub: routes by pattern, JSON bodies, byte ranges, error headers."""

import json
import re
from http.server import BaseHTTPRequestHandler
from threading import Lock
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit


class HubError(Exception):
    """An HTTP error with the headers the client reads: `X-Error-Code` and `X-Error-Message`."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class RoutedHandler(BaseHTTPRequestHandler):
    """Calls the method that `routes` names for a method and path, with the pattern's groups as arguments.

    The method returns the JSON body, replies by itself and returns None, or raises `HubError` to refuse.
    """

    routes: ClassVar[list[tuple[str, str, str]]] = []
    lock: ClassVar[Lock]  # requests are answered one at a time
    log: ClassVar[list[str]]
    protocol_version = "HTTP/1.1"

    def handle_request(self) -> None:
        url = urlsplit(self.path)
        self.body = self.read_body()
        with self.lock:
            self.log.append(f"{self.command} {unquote(url.path)}")
            try:
                for method, pattern, route in self.routes:
                    match = re.fullmatch(pattern, url.path)
                    if match and self.command in method:
                        groups = {key: unquote(value or "") for key, value in match.groupdict().items()}
                        self.query = parse_qs(url.query)
                        return self.reply(200, getattr(self, route)(**groups))
                raise HubError(404, f"No route for {self.command} {url.path}")
            except HubError as error:
                headers = {"X-Error-Message": error.message}
                if error.code is not None:
                    headers["X-Error-Code"] = error.code
                self.reply(error.status, {"error": error.message}, headers)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request

    def log_message(self, *arguments) -> None:
        """Silence: `log` is the log."""

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def reply(self, status: int, content: dict | list | bytes | None, headers: dict[str, str] | None = None) -> None:
        if content is None:  # the route has replied itself
            return
        payload = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(payload))} | (headers or {})
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(payload)

    def send_file(self, content: bytes, headers: dict[str, str]) -> None:
        headers |= {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span is None:
            return self.reply(200, content, headers)
        start, stop = int(span[1]), int(span[2] or len(content) - 1) + 1
        if start >= len(content):
            return self.reply(416, b"", headers | {"Content-Range": f"bytes */{len(content)}"})
        selected = content[start:stop]
        content_range = f"bytes {start}-{start + len(selected) - 1}/{len(content)}"
        return self.reply(206, selected, headers | {"Content-Range": content_range})
