"""A headless Chromium and its tabs, driven through pipes: no driver program, no port.

Source: Chrome DevTools Protocol (Target, Page, Runtime, Log, Network, Input, Emulation).
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import json
import os
import shutil
import signal
from collections.abc import Coroutine
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

TIMEOUT = 30.0  # seconds for the browser to start, and for any one command
_FIRST_FREE_FD = 10  # the browser reads commands at 3 and writes at 4
_LARGEST = 64 * 1024 * 1024  # bytes of a message: screenshots are megabytes
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
)


def find_browser() -> str | None:
    """The path of a Chromium, or None."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Browser:
    """One browser process. Tabs share no storage."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, transport: asyncio.ReadTransport, out: int) -> None:
        self._pid = pid
        self._reader = reader
        self._transport = transport
        self._out = out
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._tabs: dict[str, Tab] = {}
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, path: str, folder: Path) -> Browser:
        """Start the browser with a fresh profile in `folder`."""
        commands, out = _pipe()
        incoming, answers = _pipe()
        arguments = [path, *_FLAGS, f"--user-data-dir={folder}", "about:blank"]
        actions = [
            (os.POSIX_SPAWN_DUP2, commands, 3),
            (os.POSIX_SPAWN_DUP2, answers, 4),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ]
        environment = {**os.environ, "HOME": str(folder)}
        pid = os.posix_spawn(path, arguments, environment, file_actions=actions, setpgroup=0)
        os.close(commands)
        os.close(answers)
        reader = asyncio.StreamReader(limit=_LARGEST)
        protocol = asyncio.StreamReaderProtocol(reader)
        source = os.fdopen(incoming, "rb", 0)  # the transport closes it
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, source)
        browser = cls(pid, reader, transport, out)
        await browser.send("Browser.getVersion")
        return browser

    async def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send one command and return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        os.write(self._out, json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(TIMEOUT):
            return await answer

    async def tab(self, width: int = 1280, height: int = 800) -> Tab:
        """Open an empty tab with storage of its own."""
        context = (await self.send("Target.createBrowserContext"))["browserContextId"]
        target = (await self.send("Target.createTarget", url="about:blank", browserContextId=context))["targetId"]
        session = (await self.send("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        tab = self._tabs[session] = Tab(self, session, context)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await tab.send(f"{domain}.enable")
        await tab.size(width, height)
        return tab

    async def close(self) -> None:
        """End the browser and every process of it."""
        os.close(self._out)  # it exits when its commands end
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        await asyncio.to_thread(os.waitpid, self._pid, 0)
        self._listener.cancel()
        await asyncio.gather(self._listener, return_exceptions=True)
        self._transport.close()

    async def _listen(self) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                self._take(json.loads((await self._reader.readuntil(b"\0"))[:-1]))
        for answer in self._answers.values():
            answer.set_exception(ConnectionError("the browser ended"))

    def _take(self, message: dict[str, Any]) -> None:
        if "id" not in message:
            if tab := self._tabs.get(message.get("sessionId", "")):
                tab.note(message["method"], message["params"])
            return
        answer = self._answers.pop(message["id"])
        if answer.done():
            return
        if "error" in message:
            answer.set_exception(RuntimeError(message["error"]["message"]))
        else:
            answer.set_result(message["result"])


class Tab:
    """One tab. errors: what its console shows as an error. urls: all that it asked for."""

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self.errors: list[str] = []
        self.urls: list[str] = []
        self._password = ""
        self._tasks: set[asyncio.Future[Any]] = set()
        self._browser = browser
        self._session = session
        self._context = context

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command to this tab."""
        return await self._browser.send(method, self._session, **params)

    async def answer_prompt(self, password: str) -> None:
        """Let the browser's own prompt for name and password be answered from now on."""
        self._password = password
        await self.send("Fetch.enable", handleAuthRequests=True)

    def note(self, method: str, params: dict[str, Any]) -> None:
        """Remember one event."""
        if method == "Fetch.requestPaused":
            self._later(self.send("Fetch.continueRequest", requestId=params["requestId"]))
        elif method == "Fetch.authRequired":
            given = {"response": "ProvideCredentials", "username": "me", "password": self._password}
            self._later(
                self.send("Fetch.continueWithAuth", requestId=params["requestId"], authChallengeResponse=given)
            )
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str([one.get("value") for one in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])

    def _later(self, sending: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(sending)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def open(self, url: str) -> None:
        """Go to an address."""
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def value(self, expression: str) -> Any:
        """Return what a JavaScript expression gives, awaited, as JSON has it."""
        result = await self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"].get("description", expression))
        return result["result"].get("value")

    async def until(self, expression: str, seconds: float = 15.0) -> None:
        """Wait until an expression is true."""
        try:
            async with asyncio.timeout(seconds):
                while not await self.value(f"!!({expression})"):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            shown = await self.value("document.body.innerText")
            raise AssertionError(f"never true: {expression}; errors {self.errors}; the page says:\n{shown}") from None

    async def text(self, selector: str) -> str:
        """Return the visible text of an element."""
        return await self.value(f"document.querySelector({json.dumps(selector)}).innerText")

    async def click(self, selector: str) -> None:
        """Click the middle of an element, as a mouse does."""
        x, y = await self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def hover(self, selector: str) -> None:
        """Move the mouse over an element."""
        x, y = await self._middle(selector)
        await self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def type(self, text: str) -> None:
        """Type into what has the focus."""
        await self.send("Input.insertText", text=text)

    async def key(self, key: str, code: int, modifiers: int = 0) -> None:
        """Press one key. code: the Windows virtual key code. modifiers: 8 is Shift."""
        press = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        text = {"text": "\r"} if key == "Enter" else {}
        await self.send("Input.dispatchKeyEvent", type="keyDown", **press, **text)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **press)

    async def fill(self, selector: str, text: str) -> None:
        """Replace the text of a field."""
        await self.value(f"(e => {{ e.focus(); e.select(); }})(document.querySelector({json.dumps(selector)}))")
        await self.type(text)

    async def size(self, width: int, height: int) -> None:
        """Set the size of the window's inside; small ones are phones."""
        phone = width < 500
        scale = 2 if phone else 1
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )

    async def prefer(self, scheme: str) -> None:
        """Say which colours the system prefers: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.send("Emulation.setEmulatedMedia", features=features)

    async def picture(self, path: Path) -> Path:
        """Save what is seen as PNG."""
        taken = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(taken["data"]))
        return path

    async def close(self) -> None:
        """Close the tab and forget its storage."""
        await self._browser.send("Target.disposeBrowserContext", browserContextId=self._context)

    async def _middle(self, selector: str) -> tuple[float, float]:
        query = json.dumps(selector)
        box = await self.value(
            f"(e => {{ e.scrollIntoView({{block: 'nearest'}}); const b = e.getClientRects()[0];"
            f" return b && [b.x + b.width / 2, b.y + b.height / 2]; }})(document.querySelector({query}))"
        )
        if box is None:
            raise AssertionError(f"{selector} cannot be seen")
        return box[0], box[1]


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are above the numbers that the browser's own get."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
