"""A real browser for tests: Chromium from the npm registry, driven over its DevTools protocol.

`@sparticuz/chromium` carries the binary itself, with the libraries that a bare machine lacks; npm fetches it, once,
into out/cache. `TRTSEEK_CHROMIUM` names another Chromium to take instead.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import brotli
import matplotlib

PACKAGE, VERSION = "@sparticuz/chromium", "153.0.0"
INTEGRITY = "sha512-jiGWqSvPMdu4+P9TilYqAR7yEGPEHINx+lCvE/NqNO/EHYzF/x1hUiI5T6ioVIt7dEy7n88byyT0vk+dnsgQwA=="
CACHE = Path(__file__).parents[1] / "out" / "cache" / f"chromium-{VERSION}"
PARTS = ("chromium.br", "al2023.tar.br", "fonts.tar.br", "swiftshader.tar.br")
FLAGS = (
    *("--headless", "--no-sandbox", "--no-zygote", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"),
    *("--hide-scrollbars", "--remote-debugging-port=0", "about:blank"),
)
# The machine may have no fonts: the package brings Open Sans, matplotlib DejaVu.
FONTS = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd"><fontconfig>
<dir>{text}</dir><dir>{more}/fonts/ttf</dir><cachedir>{cache}</cachedir>
<alias><family>monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias>
<alias><family>sans-serif</family><prefer><family>Open Sans</family></prefer></alias>
</fontconfig>"""
PATIENCE = 120  # seconds for a step that a busy machine may take long over


class NoBrowserError(Exception):
    """What is missing: npm, or a registry that it reaches."""


def find_chromium() -> Path:
    """The browser's binary, fetched where there is none yet. Raises NoBrowserError where it cannot be."""
    if named := os.environ.get("TRTSEEK_CHROMIUM"):
        return Path(named)
    binary = CACHE / "chromium"
    if not binary.is_file():
        _fetch(CACHE)
    return binary


def _fetch(target: Path) -> None:
    if not shutil.which("npm"):
        raise NoBrowserError("this test needs a browser: install npm, which brings one, or set TRTSEEK_CHROMIUM to one")
    draft = target.with_name(f"{target.name}-{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        subprocess.run(
            ["npm", "pack", "--silent", f"{PACKAGE}@{VERSION}"], cwd=draft, check=True, timeout=200, capture_output=True
        )
    except subprocess.SubprocessError as error:
        shutil.rmtree(draft)
        raise NoBrowserError(f"npm could not fetch {PACKAGE}@{VERSION}, the browser of this test: {error}") from error
    archive = next(draft.glob("*.tgz"))
    found = "sha512-" + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if found != INTEGRITY:
        raise RuntimeError(f"{PACKAGE}@{VERSION} has the digest {found}, not {INTEGRITY}")
    with tarfile.open(archive) as package:
        package.extractall(draft, filter="data")
    for part in PARTS:
        with (
            (draft / "package" / "bin" / part).open("rb") as source,
            (draft / part.removesuffix(".br")).open("wb") as file,
        ):
            decompressor = brotli.Decompressor()
            while piece := source.read(1 << 20):
                file.write(decompressor.process(piece))
    for part in draft.glob("*.tar"):
        with tarfile.open(part) as package:
            package.extractall(draft, filter="data")
        part.unlink()
    archive.unlink()
    shutil.rmtree(draft / "package")
    (draft / "chromium").chmod(0o755)
    with contextlib.suppress(OSError):  # another process was quicker
        draft.rename(target)
    shutil.rmtree(draft, ignore_errors=True)


class Page:
    """One tab. `requests` and `errors` are what it did and complained of since it was opened."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._count = socket, 0
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._seen: set[str] = set()

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol and its result."""
        self._count += 1
        await self._socket.send_json({"id": self._count, "method": method, "params": parameters})
        while True:
            message = await self._receive()
            if message.get("id") == self._count:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result

    async def open(self, path: Path, width: int, height: int = 800) -> None:
        """A file, on a screen of `width` CSS pixels."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")
        await self.resize(width, height)
        self._seen.discard("Page.loadEventFired")
        await self.call("Page.navigate", url=path.as_uri())
        while "Page.loadEventFired" not in self._seen:
            await self._receive()

    async def resize(self, width: int, height: int = 800) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2, mobile=width < 500
        )

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, as JSON has it."""
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return result["result"].get("value")

    async def print_pdf(self) -> bytes:
        result = await self.call("Page.printToPDF", printBackground=False, preferCSSPageSize=True)
        return base64.b64decode(result["data"])

    async def take_picture(self) -> bytes:
        """The whole page as PNG."""
        result = await self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        return base64.b64decode(result["data"])

    async def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = await self._socket.receive_json(timeout=PATIENCE)
        method, parameters = message.get("method", ""), message.get("params", {})
        self._seen.add(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.errors.append(str(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        return message


@contextlib.asynccontextmanager
async def open_page(profile: Path) -> AsyncIterator[Page]:
    """A tab of a browser of its own, ended with it. `profile`: an empty folder."""
    binary = find_chromium()
    fonts = profile / "fonts.conf"
    fonts.write_text(FONTS.format(text=binary.parent / "fonts", more=matplotlib.get_data_path(), cache=profile))
    libraries = f"{binary.parent / 'lib'}:{binary.parent}"
    environment = {**os.environ, "LD_LIBRARY_PATH": libraries, "HOME": str(profile), "FONTCONFIG_FILE": str(fonts)}
    browser = await asyncio.create_subprocess_exec(
        str(binary),
        *FLAGS[:-1],
        f"--user-data-dir={profile}",
        FLAGS[-1],
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    try:
        port = await asyncio.wait_for(_read_port(profile / "DevToolsActivePort", browser), PATIENCE)
        async with aiohttp.ClientSession() as session:
            async with session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer:
                address = (await answer.json())["webSocketDebuggerUrl"]
            async with session.ws_connect(address, max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(browser.pid, signal.SIGKILL)
        await browser.wait()


async def _read_port(file: Path, browser: asyncio.subprocess.Process) -> int:
    while True:
        if file.is_file() and (lines := file.read_text().split()):
            return int(lines[0])
        if browser.returncode is not None:
            raise RuntimeError(f"the browser ended with {browser.returncode}")
        await asyncio.sleep(0.05)
